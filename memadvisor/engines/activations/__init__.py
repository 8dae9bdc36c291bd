"""What autograd keeps for the backward: recomputed, on another tier, or in fewer bits."""
