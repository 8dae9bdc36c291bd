"""The states of one unit: parameters, and what the optimizer keeps for them; and what they take on a rank that shares them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property

from memadvisor.cost.allocator_settings import MIN_BLOCK_BYTES
from memadvisor.precision import Precision, bytes_in
from memadvisor.run.records import Parameter


@dataclass(frozen=True, slots=True)
class FlatSizes:
    """Bytes of all of a unit's flats: as they are at rest; of trainable ones alone, as shards are of their gradients; as
    gathers make them; and of the buffers of gradients."""

    resting_bytes: int
    trainable_bytes: int
    full_bytes: int
    buffer_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitSizes:
    """Bytes of one unit, of whose states `num_ranks` share what its stage shards.

    `flats`: all of its flats. `resting_bytes`: parameters that are there all the time. `state_bytes`: this rank's
    optimizer state with an element for each of a parameter's. `widening`: bytes that the optimizer keeps for what it
    updates, as a multiple of those of the plain run. `largest_parameter`, `largest_piece`: elements of the largest
    trainable parameter, and of what is updated at once. `master_bytes`: this rank's masters, where they are kept beside
    whole parameters (stages 1 and 2). `whole_bytes`: parameters that are updated as wholes;
    `whole_state_bytes`: what the optimizer keeps for them. `loose_bytes`: all of its gradients, where ranks of a CPU
    share them and some stay where autograd has made them; None where none does.
    """

    flats: FlatSizes
    resting_bytes: int
    state_bytes: int
    widening: Fraction
    largest_parameter: int
    largest_piece: Fraction
    master_bytes: int
    whole_bytes: int
    whole_state_bytes: int
    loose_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeUpdate:
    """A parameter that its optimizer updates as a whole, and all that it keeps for it."""

    parameter: Parameter
    optimizer: str  # its class
    state_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardState:
    """A tensor of an optimizer's state with an element for each one of this rank's shard of a parameter."""

    size_bytes: int
    num_elements: int
    is_coded: bool  # whether it may be


@dataclass(frozen=True, kw_only=True)
class UnitStates:
    """A unit's parameters, tied ones once, and what the optimizer keeps for them in the plain run.

    `optimizer_bytes` are the tensors with one element per parameter element (momenta);
    `optimizer_scalar_bytes` are the rest (step counters), which sharding does not shrink. Neither counts what is
    kept for `whole_updates`. `state_items`: of each parameter, for each of the former tensors the bytes of an element,
    and whether it may be kept in codes. `shard_items`: where the script itself shards parameters, those of this rank's shard,
    which are in `optimizer_scalar_bytes` too. `mapped_bytes`: of parameters that the allocator did not give, as those mapped
    from a file; until an engine puts them into storage of its own they are in no peak. `given_parameter_bytes`,
    `given_optimizer_bytes`: what a GPU's allocator gave beyond that, which hands out blocks and leaves up to 1 MiB of a
    block with the tensor that it was for; gone where an engine keeps them in storage of its own, or away.
    """

    name: str
    parameters: tuple[Parameter, ...]
    optimizer_bytes: int
    optimizer_scalar_bytes: int
    mapped_bytes: int = 0
    given_parameter_bytes: int = 0
    given_optimizer_bytes: int = 0
    whole_updates: tuple[WholeUpdate, ...] = ()
    state_items: Mapping[str, tuple[tuple[int, bool], ...]] = field(default_factory=dict)
    shard_items: Mapping[str, tuple[ShardState, ...]] = field(default_factory=dict)

    @cached_property
    def sizes(self) -> dict[tuple[int, int, Precision], UnitSizes]:
        """What is known of it, by stage, ranks that share it, and precision (unit_sizes.py)."""
        return {}

    @cached_property
    def parameter_bytes(self) -> int:
        return sum(parameter.size_bytes for parameter in self.parameters)

    @property
    def has_state_to_move(self) -> bool:
        """Whether the optimizer keeps anything for it that may lie elsewhere between updates."""
        return bool(self.optimizer_bytes or self.shard_items)

    @cached_property
    def trainable_bytes(self) -> int:
        return sum(parameter.size_bytes for parameter in self.parameters if parameter.requires_grad)

    def stand_in_bytes(self, device: str, param_dtype: str | None) -> int:
        """What stands for the values of parameters that are released: one element each, in a block of its own on a GPU."""
        if device != "cpu":
            return MIN_BLOCK_BYTES * len(self.parameters)
        sizes = self.item_bytes
        return sum(bytes_in(sizes.get(p.dtype, 0), p.dtype, param_dtype or p.dtype) for p in self.parameters)

    @cached_property
    def num_elements(self) -> Mapping[tuple[str, bool], int]:
        """Of all parameters, by dtype and whether they are trained."""
        counts: Counter[tuple[str, bool]] = Counter()
        for parameter in self.parameters:
            counts[parameter.dtype, parameter.requires_grad] += parameter.num_elements
        return +counts

    @cached_property
    def item_bytes(self) -> Mapping[str, int]:
        """Bytes of an element, by dtype."""
        return {p.dtype: p.size_bytes // p.num_elements for p in self.parameters if p.num_elements}
