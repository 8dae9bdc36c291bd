"""What travels between ranks, and how: over torch.distributed, in order, on lanes."""
