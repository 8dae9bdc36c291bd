"""What to change in the script itself: found in the records of one run, with what each change would save."""
