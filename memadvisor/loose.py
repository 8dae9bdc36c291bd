"""Which gradients stay in autograd's own tensors until ranks of a CPU have reduced them to shards. Pure data."""

from __future__ import annotations

# Smaller ones would make many messages, and save little memory.
LOOSE_BYTES = 2**16


def is_loose(size_bytes: int) -> bool:
    """Of one parameter's gradient: whether it is sent from where it is, and not collected with others."""
    return size_bytes >= LOOSE_BYTES
