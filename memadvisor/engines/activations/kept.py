"""Outputs of operators that a unit keeps though it runs again: the second run is given them, and skips the operators.

torch's own selective checkpoint (`create_selective_checkpoint_contexts`) does likewise for its own checkpoint. This
one is for our second run; it never gives back the output of another call where autocast has weights in its cache in
one of the runs alone; it lets operators in place that follow at once belong to what is kept; and where anything is
not as in the first run, it runs the operator instead of raising an error. Modes see an operator below autograd, so
autograd makes the same graph in both runs.

- A call is known by its number among those of its name; its place among all calls must be the same in both runs.
- What is written into after it was kept (its version tells) is not used: the operator runs again.
- Where an operator that draws random numbers runs again, all that drew before it do, so that it draws the same.
- What is called after autograd has saved its last tensor is not kept: the second run ends there.
- Where the unit's activations wait on another tier, so do these, from the end of the first run on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from memadvisor.engines.activations.saved_activations import Holder, KeptView, kept_view
from memadvisor.operator_calls import UNCOUNTED, dropout_position, is_without_dropout, may_draw, operator_name
from memadvisor.tensor_classes import SteppingAside


class _Operator(NamedTuple):
    name: str
    is_counted: bool
    is_in_place: bool
    may_draw: bool
    dropout_position: int | None

    def draws(self, args: Any, kwargs: Mapping[str, Any]) -> bool:
        return self.may_draw and not is_without_dropout(self.dropout_position, args, kwargs)


_operators: dict[Any, _Operator] = {}


def _learn(func: Any) -> _Operator:
    if not isinstance(func, OpOverload):  # it runs operators where no mode sees them
        return _Operator(str(func), False, False, False, None)
    name = operator_name(func)
    known = _operators[func] = _Operator(
        name, name not in UNCOUNTED, name.endswith("_"), may_draw(func), dropout_position(func)
    )
    return known


class _Output:
    """What a call has returned: as it is when the next call begins, operators in place on it included."""

    __slots__ = ("draws", "is_tuple", "num_saved", "place", "tensors", "versions")

    def __init__(self, out: Any, place: int, draws: bool, num_saved: int) -> None:
        self.is_tuple = isinstance(out, tuple)
        self.tensors: list[torch.Tensor | KeptView | None] = [
            _alias(leaf) for leaf in (out if self.is_tuple else (out,))
        ]
        self.versions: list[int] = []
        self.place = place
        self.draws = draws
        self.num_saved = num_saved  # tensors, before the call

    def holds(self, tensor: Any) -> bool:
        return isinstance(tensor, torch.Tensor) and any(
            isinstance(mine, torch.Tensor) and _storage(mine) == _storage(tensor) for mine in self.tensors
        )

    def handed(self, holder: Holder) -> None:
        """What a holder has a form for is with it from now on."""
        if self.is_unchanged():
            self.tensors = [
                kept_view(mine, holder) or mine if isinstance(mine, torch.Tensor) else mine
                for mine in self.tensors
            ]

    def settle(self) -> None:
        self.versions = self._versions()

    def is_unchanged(self) -> bool:
        return self.versions == self._versions()

    def _versions(self) -> list[int]:
        return [_version(mine) for mine in self.tensors]

    def value(self) -> Any:
        self.tensors = [mine.tensor() if isinstance(mine, KeptView) else mine for mine in self.tensors]
        return tuple(self.tensors) if self.is_tuple else self.tensors[0]


def _version(mine: torch.Tensor | KeptView | None) -> int:
    of = mine.probe if isinstance(mine, KeptView) else mine
    return 0 if of is None else of._version


def _alias(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """The same memory without a graph; changes in place of the one are seen in the version of the other."""
    if tensor is None:
        return None
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


def _storage(tensor: torch.Tensor) -> int:
    number: int = tensor.untyped_storage()._cdata
    return number


def _can_be_kept(out: Any, args: Iterable[Any]) -> bool:
    """Plain tensors with memory of their own."""
    leaves = [leaf for leaf in (out if isinstance(out, tuple) else (out,)) if leaf is not None]
    if not leaves or not all(_is_plain(leaf) for leaf in leaves):
        return False
    taken = {_storage(arg) for arg in args if _is_plain(arg)}
    return not any(_storage(leaf) in taken for leaf in leaves)


def _is_plain(value: Any) -> bool:
    return type(value) is torch.Tensor and value.layout is torch.strided and not value.is_inference()


class KeptOutputs:
    """Of one call of a unit. `names` are of plan.UnitPlan's `kept`; `miss` is told those that no call bore, `label` of
    each output that is kept."""

    def __init__(
        self,
        names: Collection[str],
        miss: Callable[[set[str]], None],
        label: Callable[[torch.Tensor], None] = lambda tensor: None,
    ) -> None:
        self.names = names
        self.miss = miss
        self.label = label
        self.outputs: dict[tuple[str, int], _Output] = {}
        self.is_aside = False

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Operators within it are none of the unit's: those of a script's hook, which may be in one of the runs alone."""
        self.is_aside = True
        try:
            yield
        finally:
            self.is_aside = False

    def first_run(self, num_saved: Callable[[], int]) -> TorchDispatchMode:
        """`num_saved`: how many tensors autograd has saved in it so far."""
        return _FirstRun(self, num_saved)

    def second_run(self) -> TorchDispatchMode:
        self._forget_changed()
        return _SecondRun(self)

    def hand_over(self, holder: Holder) -> None:
        """The first run is over: outputs are the holder's from now on."""
        for output in self.outputs.values():
            output.handed(holder)

    def settle(self, num_saved: int) -> None:
        """The first run has ended, with so many tensors saved; nobody asks for what came after the last of them."""
        self.outputs = {call: output for call, output in self.outputs.items() if output.num_saved < num_saved}
        for output in self.outputs.values():
            for tensor in output.tensors:
                if isinstance(tensor, torch.Tensor):
                    self.label(tensor)

    def forget_drawn(self) -> None:
        self.outputs = {call: output for call, output in self.outputs.items() if not output.draws}

    def _forget_changed(self) -> None:
        drawn_again = False
        for call, output in reversed(self.outputs.copy().items()):
            if not output.is_unchanged() or (drawn_again and output.draws):
                drawn_again |= output.draws
                del self.outputs[call]


class _Mode(SteppingAside):
    """Counts calls by name, and all of them. `_open`: what is kept, while nothing but operators in place on it ran."""

    supports_higher_order_operators = True

    def __init__(self, kept: KeptOutputs) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept = kept
        self._counts: dict[str, int] = {}
        self._place = 0
        self._open: _Output | None = None

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        # Without this a mode switches torch.compile off, for good.
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # torch would import Dynamo for it; models that are compiled are not recomputed.
        return False

    def _call(self, known: _Operator) -> tuple[str, int]:
        number = self._counts.get(known.name, 0)
        self._counts[known.name] = number + 1
        self._place += 1
        return known.name, number

    def _close(self) -> None:
        if self._open is not None:
            self._open.settle()
            self._open = None


class _FirstRun(_Mode):  # type: ignore[no-untyped-call]
    def __init__(self, kept: KeptOutputs, num_saved: Callable[[], int]) -> None:
        super().__init__(kept)
        self._num_saved = num_saved

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._kept.is_aside:
            self._close()
            return func(*args, **kwargs)
        known = _operators.get(func) or _learn(func)
        continues = known.is_in_place and self._open is not None and self._open.holds(args[0])
        if not continues:
            self._close()
        out = func(*args, **kwargs)
        if not known.is_counted:
            return out
        call = self._call(known)
        draws = known.draws(args, kwargs)
        if continues and self._open is not None:
            self._open.draws |= draws
            return out
        names = self._kept.names
        is_wanted = known.name in names or f"{known.name}#{call[1]}" in names
        if is_wanted and not known.is_in_place and _can_be_kept(out, args):
            self._open = self._kept.outputs[call] = _Output(out, self._place, draws, self._num_saved())
        elif draws:
            self._kept.forget_drawn()
        return out

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._close()
        missing = {name for name in self._kept.names if "#" in name} - {
            f"{name}#{number}" for name, number in self._kept.outputs
        }
        if missing and not any(exception):
            self._kept.miss(missing)
        self._kept.settle(self._num_saved())


class _SecondRun(_Mode):  # type: ignore[no-untyped-call]
    """Gives each output once, and lets go of it; a graph that is walked again is run again as a whole."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._kept.is_aside:
            self._open = None
            return func(*args, **kwargs)
        known = _operators.get(func) or _learn(func)
        if not known.is_counted:
            self._open = None
            return func(*args, **kwargs)
        call = self._call(known)
        if known.is_in_place and self._open is not None and self._open.holds(args[0]):
            return args[0]  # as it was kept, it has been done
        self._open = None
        output = self._kept.outputs.get(call)
        if output is None or output.place != self._place:
            return func(*args, **kwargs)
        del self._kept.outputs[call]
        self._open = output
        return output.value()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._kept.outputs.clear()  # what was not asked for is needed for nothing
