"""A module that stands beside the script that imports it."""

WORD = "found beside the script"
