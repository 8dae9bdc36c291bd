"""The product before a loss, and the loss, a chunk of rows at a time: what a plan says of it. Pure data.

A language model's last layer makes (rows, classes) scores of (rows, features), rows being tokens. With their gradient, and
what a cross entropy makes in between, they are often most of a step's peak. In chunks of rows no more than a chunk of them
is ever there; the layer's product is done once more in the backward.
"""

from __future__ import annotations

from dataclasses import dataclass

from memadvisor.errors import MemadvisorError, PlanError

# Of products with fewer rows, kernels are less efficient.
_LEAST_ROWS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkedLoss:
    """`layer`: the name of the linear layer whose scores are made so; None: the widest outside of the model's blocks. `rows`: how many rows of
    them are there at a time; None: `usual_rows`."""

    layer: str | None = None
    rows: int | None = None


def usual_rows(num_rows: int, num_features: int, num_classes: int) -> int:
    """As many as make a chunk of scores about as large as what the layer is called with: a power of 2, 256 at the least."""
    wanted = max(_LEAST_ROWS, -(-num_rows * num_features // num_classes))
    return 1 << (wanted - 1).bit_length()


def check_chunked_loss(
    chunked: ChunkedLoss | None,
    excluded: dict[str, bool],
    source: str,
    error: type[MemadvisorError] = PlanError,
) -> None:
    """Raise `error`, naming `source`, where it is beside what it cannot be done with, or has no rows."""
    if chunked is None:
        return
    if chunked.rows is not None and chunked.rows < 1:
        raise error(f"{source} makes a loss in chunks of {chunked.rows} rows.", hint="give 1 or more.")
    for what, is_given in excluded.items():
        if is_given:
            raise error(
                f"{source} makes a loss in chunks, for which the layer before it must have its weights until then, and {what}.",
                hint="leave one of them out.",
            )


def chunked_loss_text() -> str:
    """What of a training is not the same, in words."""
    return (
        "the product before the loss, and the loss, are done for some rows at a time, and summed over rows in another order. "
        "Losses may differ in their last digits."
    )
