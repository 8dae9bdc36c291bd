"""Architectures by name, from Hugging Face's config.json, and from files of their own fields."""
