"""What a machine can do: peaks, bandwidths and the cost of collectives, each with where it comes from."""
