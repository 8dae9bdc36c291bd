"""What the executor needs of other ranks where there are none: a model whose parameters lie elsewhere, in one process.

There nothing is sent, nobody has to be met, and a shard is all of its flat.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, cast

import torch

from memadvisor.engines.collectives.wire import Wire
from memadvisor.engines.lanes.tiers import Tier, make_tier
from memadvisor.engines.sharding.flat import Flat, Label, Note, Slot, UnitState
from memadvisor.engines.sharding.paged_flats import Page, PagedTensor, Trouble
from memadvisor.errors import PlanError
from memadvisor.schedule import Lane, Schedule

StateOf = Callable[[Slot, str], torch.Tensor | None]


class NoWire:
    """Stands where `Wire` does."""

    rank = 0
    num_ranks = 1
    num_contributions = 1
    group = everyone = across = None

    def gather(self, full: torch.Tensor, shard: torch.Tensor, unit: str = "", number: int = 0) -> None:
        full.copy_(shard)

    def largest(self, values: list[int]) -> list[int]:
        return values

    broadcast = largest

    def close(self) -> None: ...


def wire_of(ddp: Any, schedule: Schedule, number: int, staged: Callable[[torch.Tensor], None]) -> Wire:
    """The wire of a model that `ddp` wraps; without that, of one process."""
    if ddp is None:
        return cast(Wire, NoWire())  # nothing else of a wire is asked for on one rank
    ranks, algorithms = schedule.shard_ranks, schedule.algorithms
    return Wire(ddp.process_group, staged, number, shard_ranks=ranks, algorithms=algorithms)


class NoService:
    """Stands where `Service` does: what is asked for is all here, or on a tier."""

    def __init__(self, state_of: StateOf) -> None:
        self.state_of = state_of

    def all_have_read(self, number: int) -> bool:
        """There is no other rank."""
        return True

    def fetch_parameters(self, flat: Flat, full: torch.Tensor) -> None:
        """Fill `full` with the parameters."""
        if flat.page is None or flat.own_shard is not None:
            raise AssertionError(
                "on one rank parameters that are not present lie on a tier, but in an update"
            )
        flat.page.parameters.read_into(full).wait()

    def can_send(self, device: torch.device) -> bool:
        return False

    def begin_fetch(self, flat: Flat, full: torch.Tensor) -> NoReturn:
        raise AssertionError("there is nobody to ask")

    def fetch_gradients(self, flat: Flat, full: torch.Tensor) -> None:
        """Fill `full` with the gradient."""
        gradient = flat.grad_shard
        if gradient is None:
            raise RuntimeError(f"the gradient of unit {flat.unit!r} has been dropped")
        full.copy_(gradient)

    def fetch(self, slot: Slot, key: str, own: torch.Tensor) -> torch.Tensor:
        """A parameter, or a state of one, 1-D in storage order."""
        return own.detach().reshape(-1).clone()

    def fetch_state(self, slot: Slot, key: str, own: torch.Tensor) -> torch.Tensor:
        """The same in the parameter's shape."""
        return self.fetch(slot, key, own).as_strided(slot.shape, slot.stride)

    def fetch_owned_state(self, slot: Slot, number: int, owner: int) -> torch.Tensor:
        raise AssertionError("optimizers that need whole parameters are refused")

    def open(self, kept: object) -> None: ...

    def stop(self) -> None: ...

    def leave(self) -> None: ...


def make_pages(
    units: Sequence[UnitState],
    lanes: dict[str, Lane],
    directory: Path,
    label: Label,
    note: Note,
) -> None:
    """Give the flats of units that lie elsewhere a page each. Raises PlanError where the tier is none, UsageError where
    no file can be made."""
    tiers: dict[tuple[Lane, torch.device], Tier] = {}
    trouble = Trouble(note)
    for unit in units:
        for flat in unit.flats:
            lane = lanes[unit.name]
            if lane is Lane.HOST and flat.device.type == "cpu":
                raise PlanError(
                    "On a CPU parameters are in the host's memory already.",
                    hint="have them on disk (--offload-parameters disk).",
                )
            if (lane, flat.device) not in tiers:
                tiers[lane, flat.device] = make_tier(lane, flat.device, directory, note)
            flat.page = _page(flat, tiers[lane, flat.device], trouble, label)


def _page(flat: Flat, tier: Tier, trouble: Trouble, label: Label) -> Page:
    def paged(what: str) -> PagedTensor:
        def label_as(tensor: torch.Tensor) -> None:
            label(tensor, what, flat.unit)

        words = f"The {what}s of {f'unit {flat.unit!r}' if flat.unit else 'the model itself'}"
        return PagedTensor(tier, flat.padded_numel, flat.dtype, flat.device, words, trouble, label_as)

    return Page(paged("parameter"), paged("gradient") if flat.trainable else None)
