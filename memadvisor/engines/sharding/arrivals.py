"""Updated parameters on their way to this rank: what stages 1 and 2 leave behind an optimizer step.

With a plan's `overlap` the all-gathers of what the ranks have updated run under whatever the script does next, and where
units are updated one after another under the updates of the next ones; a unit's parameters are waited for where its forward
begins. A script may read them sooner (an average of the weights, a checkpoint, a function that takes a weight), so until
they are there each parameter's class is swapped for one that waits at whatever needs its values. What reads tensors past
Python's dispatch outside of a module's forward would not wait, so scripted modules and models that torch.compile has seen
are not left behind; nor is what the script has other tensors of (`p.data`, a state dict that it kept), which are plain ones.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from memadvisor.engines.sharding.flat import Flat
from memadvisor.engines.sharding.holders import num_holders
from memadvisor.engines.sharding.replaced import Replaced
from memadvisor.engines.sharding.sharded_model import ShardedModel
from memadvisor.engines.sharding.tensor_functions import needs_no_values
from memadvisor.run.compiled import has_compiled

_flats: weakref.WeakValueDictionary[int, Flat] = weakref.WeakValueDictionary()


class ArrivingParameter(torch.nn.Parameter):
    """The class that a parameter has while its new values come in."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if needs_no_values(func):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        wait_for(args, kwargs)
        # By the classes of others, of stage 3 or a state dict, whose values are not here.
        return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        settle(_flats[id(self)])
        return torch.nn.Parameter.__deepcopy__(self, memo)  # type: ignore[no-untyped-call]


def wait_for(*values: Any) -> None:
    """For parameters among these that are on their way: they are plain ones then."""
    leaves: list[Any] = tree_leaves(values)
    for value in leaves:
        if type(value) is ArrivingParameter:
            settle(_flats[id(value)])


class Arrivals:
    """Part of an executor. Nothing is late before its first step, by which torch.compile would have been at work.

    observe_modules: has calls of all modules told of, before which their parameters must be there.
    """

    def __init__(self, sharded: ShardedModel, observe_modules: Callable[[], None]) -> None:
        self._sharded = sharded
        self._observe_modules = observe_modules
        self._may_be_late: bool | None = None
        self.replaced = Replaced()

    def step_begins(self) -> None:
        """All parameters are there, and where an optimizer step finds them."""
        self.settle()
        for flat in self._sharded.flats:
            flat.is_held = flat.full is not None and num_holders(flat.full) > flat.num_own_holders
        self.replaced.take_values(self._sharded.flats)

    def begin(self, flat: Flat) -> None:
        """Begin to bring what an optimizer step has updated, while it goes on with others; where nobody who reads it sooner
        would wait, it is brought when the step is over."""
        if self._may_begin(flat):
            self._begin(flat)

    def bring(self, stepped: set[int]) -> None:
        """Bring what an optimizer has updated, by indices of flats, to all ranks, as far as it is not on its way."""
        sharded = self._sharded
        for action in sharded.schedule.gathers_of_updated:
            unit = sharded.units.get(action.unit)
            for flat in unit.trainable if unit is not None else ():
                is_due = flat.index in stepped and flat.arriving is None and flat.stage < 3
                if not is_due or flat.full is None or flat.shard is None:
                    continue
                if action.overlaps and self._may_begin(flat):
                    self._begin(flat)
                else:
                    sharded.wire.gather(flat.full, flat.own_part(flat.full), flat.unit, flat.index)
        self.replaced.give_back()

    def _may_begin(self, flat: Flat) -> bool:
        return not flat.is_held and not self.replaced.has_taken(flat) and self.can_wait(flat)

    def _begin(self, flat: Flat) -> None:
        if flat.full is None:
            raise AssertionError("a flat of stage 1 or 2 has its place at all times")
        own = flat.own_part(flat.full)
        _leave_behind(flat, self._sharded.wire.begin_gather(flat.full, own, flat.unit, flat.index))

    def settle(self) -> None:
        """Wait for all that is on its way."""
        settle_all(self._sharded.flats)

    def can_wait(self, flat: Flat) -> bool:
        """Whether whoever reads the flat's parameters would come by here."""
        if has_compiled():
            return False
        if self._may_be_late is None:
            modules = self._sharded.live.root.modules()
            self._may_be_late = not any(isinstance(module, torch.jit.ScriptModule) for module in modules)
            if self._may_be_late:
                self._observe_modules()
        return self._may_be_late and all(type(slot.parameter) is torch.nn.Parameter for slot in flat.slots)


def _leave_behind(flat: Flat, ticket: Any) -> None:
    flat.arriving = ticket
    for slot in flat.slots:
        _flats[id(slot.parameter)] = flat
        slot.parameter.__class__ = ArrivingParameter


def drop(flat: Flat) -> None:
    """Let go of a flat of stage 3 that was gathered ahead and has not been asked for."""
    if flat.stage == 3 and flat.arriving is not None and flat.full is not None:
        flat.arriving.wait()  # else the memory would be written to after it has been given away
        flat.arriving = None
        flat.full.untyped_storage().resize_(0)


class Guard:
    """In place of a transfer: nothing comes, but whoever reads the parameters is reported."""

    def __init__(self, report: Callable[[], None]) -> None:
        self._report = report

    def wait(self) -> None:
        self._report()


def put_guard(flat: Flat, report: Callable[[], None]) -> None:
    """Have whoever reads a flat's parameters reported, once."""
    _leave_behind(flat, Guard(report))


def take_guard(flat: Flat) -> None:
    """The parameters may be read again."""
    if isinstance(flat.arriving, Guard):
        flat.arriving = None
        _show_class(flat)


def settle(flat: Flat) -> None:
    """Wait until a flat of stage 1 or 2 has its new values."""
    if flat.arriving is None:
        return
    flat.arriving.wait()
    flat.arriving = None
    _show_class(flat)


def settle_all(flats: Iterable[Flat]) -> None:
    """Wait until all that have left an optimizer step behind have theirs."""
    for flat in flats:
        if flat.stage < 3 and not isinstance(flat.arriving, Guard):
            settle(flat)


def _show_class(flat: Flat) -> None:
    for slot in flat.slots:
        if type(slot.parameter) is ArrivingParameter:
            slot.parameter.__class__ = torch.nn.Parameter  # type: ignore[assignment]  # its own class
