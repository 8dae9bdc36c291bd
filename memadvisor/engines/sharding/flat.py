"""Flat storage: a unit's parameters of one dtype, one after another, padded to a multiple of the ranks.

Parameters are views into it, so names, shapes, identity and hooks survive. Rank r owns elements
[r*s, (r+1)*s) of every flat, s = ceil(elements / ranks): its shard.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from memadvisor.engines.collectives.quantise import rounded
from memadvisor.engines.collectives.wire import Pieces
from memadvisor.engines.lanes.lanes import Chain, Ticket
from memadvisor.engines.script.live import LiveUnit
from memadvisor.engines.sharding.paged_flats import Leaving, Page, PagedTensor

Label = Callable[[torch.Tensor, str, str], None]  # is told of a tensor that is made, its category and unit
Labelled = tuple[torch.Tensor, str, str]
Note = Callable[[str, str], None]  # is told level and text

_STRETCH = 2**14  # elements that are compared at a time, which takes 80 KiB


@dataclass(slots=True, eq=False, weakref_slot=True)
class Slot:
    """A parameter's place in its flat: elements [start, end). `index` counts the slots of a model."""

    name: str
    parameter: torch.nn.Parameter
    shape: torch.Size
    stride: tuple[int, ...]
    start: int
    end: int
    index: int
    flat: Flat = field(repr=False)
    token: Any = None  # what stands for the gradient of a sharded parameter (gradients.py)
    had_gradient: bool = False
    has_hooks: bool = False  # the script's own, on its gradient (gradient_hooks.py)
    before_hooks: tuple[int, int] = (0, 0)  # the gradient's storage, and who held it, before these ran
    version: int = 0  # of the parameter, when its values were shown last
    filler: torch.Tensor | None = None  # what stands for its values while they are not here (released.py)
    shown: torch.Tensor | None = None  # the view of the flat's `full` that it is while they are
    own_range: tuple[int, int] = field(init=False)  # elements of the flat that are this rank's too

    def __post_init__(self) -> None:
        self.own_range = self.range_on(self.flat.rank)

    @property
    def is_written(self) -> bool:
        """Whether a module has changed the parameter in place during its own forward."""
        return self.parameter._version != self.version

    def view(self, flat_tensor: torch.Tensor) -> torch.Tensor:
        """This parameter's elements of a full flat tensor, in its own shape and strides."""
        return flat_tensor.as_strided(self.shape, self.stride, flat_tensor.storage_offset() + self.start)

    def piece(self, shard: torch.Tensor) -> torch.Tensor:
        """This parameter's elements of the rank's own shard, 1-D and often empty."""
        low, high = self.own_range
        base = self.flat.rank * self.flat.shard_numel
        return shard[low - base : high - base]

    def own_elements(self, value: torch.Tensor) -> torch.Tensor:
        """Those of a value of the parameter's shape that are this rank's, 1-D."""
        low, high = self.own_range
        return self.flattened(value)[low - self.start : high - self.start]

    def range_on(self, rank: int) -> tuple[int, int]:
        """Elements of the flat that are both this parameter's and that rank's."""
        base = rank * self.flat.shard_numel
        low = min(max(self.start, base), base + self.flat.shard_numel)
        high = max(min(self.end, base + self.flat.shard_numel), low)
        return low, high

    def flattened(self, value: torch.Tensor) -> torch.Tensor:
        """A value of the parameter's shape as a new 1-D tensor in storage order."""
        flattened = torch.empty(self.end - self.start, dtype=value.dtype, device=value.device)
        flattened.as_strided(self.shape, self.stride).copy_(value)
        return flattened


class Loose(Protocol):
    """A flat's gradients where autograd has made them (loose_gradients.py)."""

    @property
    def is_there(self) -> bool: ...
    def take(self, slot: Slot, gradient: torch.Tensor, share: float) -> None: ...
    def add_zeros(self, slot: Slot) -> None: ...
    def clear(self) -> None: ...
    def tensors(self) -> list[torch.Tensor]: ...
    def pieces(self) -> Pieces: ...


@dataclass(slots=True, eq=False, weakref_slot=True)
class Flat:
    """Storage of one unit, dtype and trainability.

    dtype: the one that shards and optimizer state are in. script_dtype: the parameters' own, which the script reads;
    another one where shards are masters (a precision's optimizer_dtype). param_dtype: that of `full`, which modules
    compute with and gathers carry; other than the script's with stage 3 alone. reduce_dtype: that of `grad`; other than
    the script's with stages 2 and 3 alone. gather_bits, reduce_bits: of each element while it travels (transfers.py).

    full: all parameters; with stage 3 its storage is resized to nothing between uses. None with stage 0, whose parameters
    stay where the script put them. own_shard: this rank's slice of `full`, or, with stage 3 and of masters, storage of
    its own; `shard` is that or a copy of what lies elsewhere. page: where both lie between their uses, of a unit that has
    them on another tier (paged_flats.py). grad: full gradients, while they are being made (stages 2, 3) or until the
    script drops them (0, 1); with `loose` they are there. own_gradient: this rank's slice of the mean gradient (stages 2,
    3), as `grad_shard` gives it.
    """

    unit: str
    index: int
    stage: int
    rank: int
    num_ranks: int
    dtype: torch.dtype
    script_dtype: torch.dtype
    param_dtype: torch.dtype
    reduce_dtype: torch.dtype
    gather_bits: int | None
    reduce_bits: int | None
    device: torch.device
    trainable: bool
    num_elements: int
    slots: list[Slot] = field(default_factory=list)
    full: torch.Tensor | None = None
    num_own_holders: int = 0  # of the memory of `full`, between steps: itself, parameters and shard
    is_held: bool = False  # the script had it too when the step began
    own_shard: torch.Tensor | None = None
    grad: torch.Tensor | None = None
    loose: Loose | None = field(default=None, repr=False)
    own_gradient: torch.Tensor | None = None
    page: Page | None = None
    loan: torch.Tensor | None = None  # full parameters in the script's hands (loans.py)
    loan_version: int = 0  # of the loan, when what was written into it was kept last
    is_loan_fixed: bool = False  # something may use its memory that cannot be seen
    ready: set[int] = field(default_factory=set)  # indices of slots whose gradient came in this backward
    second: torch.Tensor | None = None  # this rank's part of the second copy (second_copies.py)
    arriving: Ticket | None = None  # the gather that fills `full`; until it is waited for, nobody looks
    scattering: Chain | Leaving | None = None  # the reduction of `grad` that is under way

    @property
    def shard(self) -> torch.Tensor | None:
        """This rank's slice; of one that lies on another tier a copy, which is read now."""
        if self.own_shard is None and self.page is not None:
            return self.page.parameters.read()
        return self.own_shard

    @shard.setter
    def shard(self, value: torch.Tensor | None) -> None:
        self.own_shard = value

    @property
    def has_shard(self) -> bool:
        """Whether there is one, here or elsewhere."""
        return self.own_shard is not None or self.page is not None

    @property
    def grad_shard(self) -> torch.Tensor | None:
        """This rank's slice of the mean gradient, likewise; None where there is none."""
        if self.own_gradient is None and self.paged_gradient is not None:
            return self.paged_gradient.read()
        return self.own_gradient

    @grad_shard.setter
    def grad_shard(self, value: torch.Tensor | None) -> None:
        self.own_gradient = value
        if value is None and self.paged_gradient is not None:
            self.paged_gradient.drop()

    def full_gradient(self) -> torch.Tensor | Pieces | None:
        """All of this rank's own gradient, as it is sent; None where none has come."""
        if self.loose is None:
            return self.grad
        return self.loose.pieces() if self.loose.is_there else None

    def drop_full_gradient(self) -> None:
        self.grad = None
        if self.loose is not None:
            self.loose.clear()

    @property
    def has_gradient(self) -> bool:
        """Whether there is one, here or elsewhere."""
        return self.own_gradient is not None or self.paged_gradient is not None

    @property
    def paged_gradient(self) -> PagedTensor | None:
        """The gradient that lies on another tier, if there is one."""
        gradient = None if self.page is None else self.page.gradient
        return gradient if gradient is not None and gradient.is_there else None

    @contextlib.contextmanager
    def changing_gradient(self) -> Iterator[torch.Tensor]:
        """This rank's slice of the gradient, wherever it lies: what is written into it meanwhile stays."""
        paged = self.paged_gradient
        if self.own_gradient is not None:
            yield self.own_gradient
            return
        if paged is None:
            raise RuntimeError(f"the gradient of unit {self.unit!r} has been dropped")
        self.own_gradient = gradient = paged.read()
        try:
            yield gradient
            paged.put_at_once(gradient)
        finally:
            self.own_gradient = None

    @property
    def shard_numel(self) -> int:
        return -(-self.num_elements // self.num_ranks)

    @property
    def padded_numel(self) -> int:
        return self.shard_numel * self.num_ranks

    @property
    def padding_bytes(self) -> int:
        return (self.padded_numel - self.num_elements) * self.dtype.itemsize

    @property
    def present(self) -> bool:
        """Whether the full parameters are in memory, all of them."""
        return self.full is None or (self.full.untyped_storage().nbytes() > 0 and self.arriving is None)

    @property
    def is_cast(self) -> bool:
        """Whether modules compute with the parameters in another dtype than they are kept in."""
        return self.param_dtype != self.dtype

    @property
    def has_cast_gradients(self) -> bool:
        """Whether what the script finds in `p.grad` has another dtype than autograd makes it in."""
        return self.is_cast and self.trainable and self.stage >= 2

    @property
    def is_rounded(self) -> bool:
        """Whether modules compute with less than the shards hold."""
        return self.is_cast or self.gather_bits is not None

    def new(self, numel: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype or self.dtype, device=self.device)

    def own_slice(self, full: torch.Tensor) -> torch.Tensor:
        return full[self.rank * self.shard_numel : (self.rank + 1) * self.shard_numel]

    def own_part(self, full: torch.Tensor) -> torch.Tensor:
        """What this rank gives to `full`: its shard; where that has another dtype, its own slice, filled."""
        shard = self.shard
        if shard is None:
            raise AssertionError("a flat without a shard has nothing to gather")
        if self.may_have_written_loan and self.loan is not None:
            return self.own_slice(full).copy_(self.own_slice(self.loan))
        return shard if full.dtype == shard.dtype else self.own_slice(full).copy_(shard)

    @property
    def may_have_written_loan(self) -> bool:
        """Whether the script may have written into `loan` past us (`p.data`), which is kept when all ranks have come as far."""
        if self.loan is None or self.page is not None or self.gather_bits is not None:
            return False
        return self.is_loan_fixed or self.loan._version != self.loan_version

    @property
    def has_masters(self) -> bool:
        """Whether the optimizer updates the parameters in another dtype than the script has them in."""
        return self.dtype != self.script_dtype

    @property
    def has_masters_beside(self) -> bool:
        """Whether those are kept beside parameters that stay whole (masters.py)."""
        return self.has_masters and 0 < self.stage < 3

    def round_masters(self) -> None:
        """Masters that are kept beside have changed: so does this rank's slice of the parameters."""
        if self.has_masters_beside and self.full is not None:
            self.own_part(self.full)

    @property
    def is_cheap_to_keep(self) -> bool:
        """Whether to take over what is in `full` is a copy of this rank's slice, which changes nothing where nothing was
        written."""
        return self.page is None and not self.is_rounded and not self.has_masters

    def keep_written(self) -> None:
        """Take over what a module, or with masters beside the script, has written into `full`.

        What was left alone does not lose the digits that the shard has more.
        """
        if self.page is not None and self.full is not None and self.own_shard is None:
            self.page.parameters.put_at_once(self.full)
            return
        if self.full is None or self.shard is None:
            return
        seen = self.shard if self.gather_bits is None else rounded(self.shard, self.gather_bits)
        self._take_over(self.own_slice(self.full), seen)

    def keep_loan(self) -> None:
        """Take over what the script has written into `loan`, likewise."""
        if self.loan is not None and self.page is not None and self.own_shard is None:
            self.page.parameters.put_at_once(self.loan)
        elif self.loan is not None and self.shard is not None:
            self._take_over(self.own_slice(self.loan), self.shard)

    def _take_over(self, written: torch.Tensor, seen: torch.Tensor) -> None:
        if self.shard is None:
            raise AssertionError("a flat without a shard keeps nothing")
        if written.dtype == self.dtype and seen is self.shard:
            self.shard.copy_(written)
            return
        # A stretch at a time, or what it takes would be as large as the shard.
        for kept, *both in zip(
            *(torch.split(each, _STRETCH) for each in (self.shard, written, seen)), strict=True
        ):
            with_written(kept, *both, out=kept)

    def tensors(self) -> Iterator[tuple[torch.Tensor, str]]:
        """What the engine holds for it now, by category."""
        for tensor in (self.full, self.second, self.loan):
            if tensor is not None:
                yield tensor, "parameter"
        if self.own_shard is not None:
            yield self.own_shard, "optimizer_state" if self.has_masters_beside else "parameter"
        for tensor in (self.grad, self.own_gradient, *(() if self.loose is None else self.loose.tensors())):
            if tensor is not None:
                yield tensor, "gradient"
        if self.page is not None:
            yield from self.page.tensors()


def with_written(
    kept: torch.Tensor, written: torch.Tensor, seen: torch.Tensor, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """`kept`, of the wider dtype, with what is written otherwise than it is seen."""
    return torch.where(written == seen.to(written.dtype), kept, written, out=out)


@dataclass(slots=True, eq=False)
class UnitState:
    """A unit as the executor sees it; `depth` counts the calls into it that are under way.

    is_kept: all ranks hold its parameters from a training forward on, and release them together.
    in_backward: its backward has begun. has_come: all of its gradients have come in the backward under way.
    """

    live: LiveUnit
    stage: int
    flats: list[Flat]
    depth: int = 0
    is_kept: bool = False
    in_backward: bool = False
    has_come: bool = False
    pushes: list[int] = field(default_factory=list)  # saved-tensor hooks put in place at each depth

    @property
    def name(self) -> str:
        return self.live.name

    @property
    def trainable(self) -> list[Flat]:
        return [flat for flat in self.flats if flat.trainable]

    @property
    def present(self) -> bool:
        return all(flat.present for flat in self.flats)

    def drop_second(self) -> None:
        for flat in self.flats:
            flat.second = None

    @property
    def is_frozen_and_done(self) -> bool:
        """Whether no gradient will tell that the unit's parameters may go, but the pass itself does."""
        return not self.trainable and self.depth == 0 and (self.in_backward or not self.is_kept)


def flats_with(slots: Iterable[Slot]) -> list[Flat]:
    """Each flat once, in the order of its first slot."""
    return list({id(slot.flat): slot.flat for slot in slots}.values())
