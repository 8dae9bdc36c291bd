"""What one of each kind of the engine's own work takes, found from trainings that each do so many of every kind."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from memadvisor.errors import MemadvisorError

LIMIT_S = 120.0  # for the processes that measure; some 15 s of an idle machine
WIDTH, BATCH = 128, 128  # so that as much comes between two pieces of its work as in a training


class Block(torch.nn.Sequential):
    """A unit."""


def make_blocks(num_blocks: int, num_layers: int) -> torch.nn.Sequential:
    """Modules and parameters are about as many as each other, as in blocks of transformers."""
    torch.manual_seed(0)
    layers = (
        [torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU()) for _ in range(num_layers)]
        for _ in range(num_blocks)
    )
    return torch.nn.Sequential(*(Block(*each) for each in layers))


def least_squares(
    names: Sequence[str], counts: Sequence[Sequence[float]], spent_s: Sequence[float]
) -> dict[str, float]:
    """Seconds by name. No kind of work takes less than nothing: one that would is left out, and the others are fitted
    anew."""
    kept = list(range(len(names)))
    taken = torch.tensor(spent_s, dtype=torch.float64).unsqueeze(1)
    while kept:
        chosen = torch.tensor(counts, dtype=torch.float64)[:, kept]
        found = torch.linalg.lstsq(chosen, taken).solution.flatten()
        if (lowest := int(found.argmin())) >= 0 and found[lowest] >= 0:
            break
        kept.pop(lowest)
    values = dict(zip(kept, found.tolist(), strict=True)) if kept else {}
    return {name: values.get(place, 0.0) for place, name in enumerate(names)}


def failure(what: str, is_late: bool) -> MemadvisorError:
    """The error of processes that have measured nothing: those that are not late have said why."""
    if is_late:
        return MemadvisorError(f"{what} in {LIMIT_S:.0f} s.", hint="measure when the machine has less to do.")
    return MemadvisorError(
        f"{what}.", hint="see the messages above; `memadvisor doctor` says what does not work here."
    )
