"""The script's live model as the engines meet it: its units, torch's hooks, and names of torch that are put back."""
