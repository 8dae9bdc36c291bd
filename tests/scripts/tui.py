WHOSE = "the script's own"
