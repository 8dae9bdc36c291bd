"""What an optimizer allocates for each unit's part of its step, where an engine has it update units one after another.

In the captured step one update is of all units. A temporary of it is taken for that of a parameter with as many bytes:
of updates of all together (foreach) each operator makes one for each parameter, else all of a parameter's come before
those of the next. So a unit's own update allocates what its parameters had, one by one, and not so many smaller ones.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType

from memadvisor.cost.flats import piece_elements
from memadvisor.cost.fsdp2_sizes import shard_bytes, sharing_ranks
from memadvisor.cost.states import UnitStates
from memadvisor.cost.step import CapturedStep, StepStorage
from memadvisor.schedule import Lane, Schedule

_Parameter = tuple[str, str]  # unit, name


class UnitUpdates:
    """Of the first rank, whose pieces of parameters stand for those of all.

    `apart`: units that are updated by themselves. `fetched`: those whose state comes from elsewhere for that, with whether
    it is in codes. `state_bytes`: what that takes. `are_told`: whether temporaries are told by parameters, which takes a
    unit apart, or pieces of parameters and an update of all together.
    """

    def __init__(self, step: CapturedStep, schedule: Schedule, state_bytes: Mapping[str, int]) -> None:
        self.fetched = {u: lane is Lane.COMPUTE for u, lane in schedule.offloaded_states.items()}
        self.apart = {*self.fetched, *schedule.updated_alone, *schedule.updated_in_backward}
        self.are_told = bool(self.apart) or (step.updates_together and schedule.num_ranks > 1)
        self._states = step.states
        self._state_bytes = state_bytes
        # What the script's FSDP2 shards was captured as shards, and is that under a plan.
        sharing = sharing_ranks(step)
        stages = (
            {} if step.shard_groups else {u.name: u.stage_on(schedule.shard_ranks) for u in schedule.units}
        )
        self._pieces = {
            name: piece_elements(states, schedule.shard_ranks if stages.get(name) else 1, 0)
            for name, states in self._states.items()
        }
        at = set(step.optimizer_at)
        passing = (n for n, item in enumerate(step.storages if self.are_told else ()) if passes_in(item, at))
        self._of = parameters_of(
            step.storages, passing, self._states, together=step.updates_together, sharing=sharing
        )

    def unit_of(self, number: int) -> str | None:
        """Whose update makes a temporary; None where that cannot be told."""
        return self._of[number][0] if number in self._of else None

    def share(self, number: int, otherwise: float) -> float:
        """How much of it this rank's piece of its parameter takes."""
        if number not in self._of:
            return otherwise
        unit, name = self._of[number]
        whole = next(p.num_elements for p in self._states[unit].parameters if p.name == name)
        return self._pieces[unit].get(name, 0) / whole

    def made(self, unit: str) -> list[int]:
        """Bytes of what the optimizer makes for a fetched unit in its first step, one by one."""
        sizes = self._state_sizes(unit)
        # In another dtype than was captured they are wider.
        wider = self._state_bytes[unit] / sum(sizes) if sizes else 1.0
        return [round(size * wider) for size in sizes]

    def parts(self, unit: str, size_bytes: int) -> list[int]:
        """The same of one whose state stays, which takes so much; last, as one, what is not told by parameters."""
        sizes = self._state_sizes(unit)
        rest_bytes = size_bytes - sum(sizes)
        if rest_bytes < 0:
            return [size_bytes]
        return [*sizes, rest_bytes] if rest_bytes else sizes

    def _state_sizes(self, unit: str) -> list[int]:
        states = self._states.get(unit)
        if states is None:
            return []
        if states.shard_items:
            return [item.size_bytes for own in states.shard_items.values() for item in own]
        counts = self._pieces[unit]
        sizes = [
            counts.get(parameter.name, 0) * item_bytes
            for parameter in states.parameters
            for item_bytes, _ in states.state_items.get(parameter.name, ())
        ]
        return [size for size in sizes if size]


def passes_in(item: StepStorage, segments: set[int]) -> bool:
    """Whether it comes and goes within one of these."""
    return item.birth_segment in segments and item.birth_segment == item.death_segment


def parameters_of(
    storages: Sequence[StepStorage],
    passing: Iterable[int],
    states: Mapping[str, UnitStates],
    *,
    together: bool,
    sharing: Mapping[str, int] = MappingProxyType({}),
) -> dict[int, _Parameter]:
    """Of the temporaries `passing`, in order of birth, the parameters that they are made for, where that can be told.

    `sharing`: by unit, how many ranks share what its parameters were captured as, under the script's FSDP2.
    """
    owners: dict[int, list[_Parameter]] = defaultdict(list)
    for unit, parameter, size_bytes in _trained(states, sharing):
        owners[size_bytes].append((unit, parameter))
    alike: dict[int, list[int]] = defaultdict(list)
    for number in passing:
        alike[storages[number].size_bytes].append(number)
    found: dict[int, _Parameter] = {}
    for size_bytes, numbers in alike.items():
        own = owners.get(size_bytes, [])
        each, rest = divmod(len(numbers), len(own)) if own else (0, 1)
        for place, number in enumerate(numbers if not rest else ()):
            found[number] = own[place % len(own) if together else place // each]
    return found


def _trained(states: Mapping[str, UnitStates], sharing: Mapping[str, int]) -> Iterator[tuple[str, str, int]]:
    for unit, own in states.items():
        for parameter in own.parameters:
            if parameter.requires_grad and parameter.num_elements:
                is_shared = unit in sharing
                size_bytes = shard_bytes(parameter, sharing[unit]) if is_shared else parameter.size_bytes
                yield unit, parameter.name, size_bytes
