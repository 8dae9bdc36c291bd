"""A plan as the configuration of another engine: data in, text out. Nothing of that engine, or of torch, is imported."""
