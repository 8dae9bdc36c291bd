"""The script's own optimizers where their state, or what they update, is not whole and here."""
