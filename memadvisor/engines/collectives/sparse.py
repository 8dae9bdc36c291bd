"""The largest elements of each block of a tensor, exactly, and where they are; all others become zeros.

Of a block of `BLOCK_ELEMENTS` elements that follow each other the `top` of largest magnitude are kept (all of a last
block that has no more). A NaN counts as larger than any number. A message is their values, float32, and then their
places in their blocks, a byte each.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from memadvisor.compression import BLOCK_ELEMENTS, scratch_elements, sparse_bytes


def sparsify(values: torch.Tensor, message: torch.Tensor, top: int, scratch: torch.Tensor) -> None:
    """Write the largest of 1-D float32 `values` into `message`, uint8 of `sparse_bytes`.

    `scratch`: float32 of `scratch_elements`.
    """
    for blocks, kept, places in _stretches(values, message, top):
        room = scratch[: blocks.numel()].view_as(blocks)
        found = torch.abs(blocks, out=room).topk(kept.shape[1], dim=1, sorted=False).indices
        torch.gather(blocks, 1, found, out=kept)
        places.copy_(found)


def densify(message: torch.Tensor, values: torch.Tensor, top: int, *, add: bool = False) -> None:
    """Write what `message` stands for into 1-D float32 `values`, or `add` it to them."""
    if not add:
        values.zero_()
    for blocks, kept, places in _stretches(values, message, top):
        blocks.scatter_add_(1, places.long(), kept)


def _stretches(
    values: torch.Tensor, message: torch.Tensor, top: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Blocks of one length, as rows; and their kept elements and places, as rows too."""
    count = values.numel()
    if message.numel() != sparse_bytes(count, top):
        raise AssertionError(f"{message.numel()} bytes are no message of {top} a block of {count} elements")
    whole, rest = divmod(count, BLOCK_ELEMENTS)
    num_kept = whole * top + min(rest, top)
    kept, places = message[: 4 * num_kept].view(torch.float32), message[4 * num_kept : 5 * num_kept]
    step = max(1, scratch_elements(count) // BLOCK_ELEMENTS)
    for first in range(0, whole, step):
        last = min(first + step, whole)
        yield (
            values[first * BLOCK_ELEMENTS : last * BLOCK_ELEMENTS].view(-1, BLOCK_ELEMENTS),
            kept[first * top : last * top].view(-1, top),
            places[first * top : last * top].view(-1, top),
        )
    if rest:
        yield values[count - rest :][None], kept[whole * top :][None], places[whole * top :][None]
