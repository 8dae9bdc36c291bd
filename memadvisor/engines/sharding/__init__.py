"""The executor of data-parallel schedules: flat storage, gathers, reductions, and what the script sees of them."""
