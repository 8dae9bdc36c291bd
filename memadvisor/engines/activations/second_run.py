"""A forward that is run a second time: under what, and where that which autograd saves in it is put.

What autograd saves in the first run is packed as a place; the second run saves the same tensors in the same order,
and fills the places that autograd still holds. A place keeps its value until autograd lets go of it. torch's own
checkpoint does likewise, with several objects, a dictionary's entry and calls of the compiler's a tensor: beside the
forward itself its calls take two to three times as long.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import get_device_states, set_device_states

from memadvisor.engines.activations.inner_hooks import FiringOnce
from memadvisor.engines.activations.kept import KeptOutputs
from memadvisor.engines.activations.saved_activations import Holder, KeptView, kept_view

Around = Callable[[], contextlib.AbstractContextManager[None]]
Told = Callable[
    [torch.Tensor], None
]  # of what the script has computed, and is kept though autograd saves it nowhere


class Place:
    """Stands for a saved tensor inside autograd; `value` is there from a second run on.

    `later`: instead of a value, a place of a part of the unit that has yet to run again, and who fills that
    (parts.py).
    """

    __slots__ = ("__weakref__", "dtype", "later", "shape", "value")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape = tensor.shape
        self.dtype = tensor.dtype
        self.value: torch.Tensor | None = None
        self.later: tuple[Place, Callable[[Place], torch.Tensor]] | None = None


class Enough(Exception):
    """All that a second run is for has been saved. An Exception: modules tell of the end of their calls for no others."""


class Places:
    """What autograd has saved in a first run, in order. Autograd alone holds the places."""

    __slots__ = ("_references",)

    def __init__(self) -> None:
        self._references: list[weakref.ref[Place]] = []

    def pack(self, tensor: torch.Tensor) -> Place:
        place = Place(tensor)
        self._references.append(weakref.ref(place))
        return place

    def __len__(self) -> int:
        return len(self._references)

    def filling(self, is_last: bool) -> Filling:
        """With `is_last` nothing after the last place is needed. What a walk of a graph that is kept does not ask for goes
        with its end."""
        if is_walked_again():
            torch.autograd.Variable._execution_engine.queue_callback(self._empty)
        return Filling(self._references, is_last)

    def _empty(self) -> None:
        for reference in self._references:
            place = reference()
            if place is not None:
                place.value = None


class Filling:
    """A hook that puts what is saved, in order, into the places that are still waited for; with `is_last` it raises
    Enough at the last one."""

    __slots__ = ("_is_last", "_number", "_references", "is_over")

    def __init__(self, references: Sequence[weakref.ref[Place]], is_last: bool) -> None:
        self.is_over = False
        self._references = references
        self._is_last = is_last
        self._number = 0

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        value = tensor.detach() if tensor.requires_grad else tensor
        place = self._next(tensor)
        if place is not None:
            place.value = value
        self._ends()
        return value

    def put_off(self, tensor: torch.Tensor, part: Place, unpack: Callable[[Place], torch.Tensor]) -> Place:
        """The place gets what `unpack` gives for a part's place, when it is asked for."""
        place = self._next(tensor)
        if place is not None:
            place.later = part, unpack
        self._ends()
        return part

    def _next(self, tensor: torch.Tensor) -> Place | None:
        number = self._number
        self._number += 1
        place = self._references[number]() if number < len(self._references) else None
        return (
            place
            if place is not None and (place.shape, place.dtype) == (tensor.shape, tensor.dtype)
            else None
        )

    def _ends(self) -> None:
        if self._is_last and self._number == len(self._references):
            self.is_over = True
            raise Enough


class until_enough:  # it reads as a function
    """Ends quietly with Enough, and with what a library has made of it that reports all errors as its own (einx)."""

    def __init__(self, filling: object) -> None:
        self._filling = filling

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        filling = self._filling
        is_enough = isinstance(error, Exception) and isinstance(filling, Filling) and filling.is_over
        if error is not None and is_enough:
            # Its frames, and those around them, would hold the step's graph until the garbage collector comes.
            error.__traceback__ = None
        return is_enough


def value_of(place: Place, unit: str, *, stays: bool = False) -> torch.Tensor:
    """What a place stands for; with `stays` nobody could make it once more."""
    if place.later is not None:
        part, unpack = place.later
        return unpack(part)
    value = place.value
    if value is None:
        raise RuntimeError(
            f"the forward of {unit!r} saved other tensors when it was run again; "
            "it cannot be recomputed (memadvisor run --policy none)"
        )
    if is_walked_again() and not stays:
        place.value = None
    return value


def is_walked_again() -> bool:
    """Within a backward whose graph is kept (retain_graph=True), or has one of its own (create_graph=True): another one may
    ask for the same, and until then nothing is held for it."""
    autograd: Any = torch._C._autograd
    is_in_backward = torch._C._current_graph_task_id() >= 0
    return is_in_backward and (torch.is_grad_enabled() or bool(autograd._get_current_graph_task_keep_graph()))


class Conditions:
    """The random state, casts and default device under which a forward runs, to be had again."""

    __slots__ = (
        "_autocast",
        "_caches_casts",
        "_ddp",
        "_default_device",
        "_device_states",
        "_devices",
        "_random_state",
    )

    def __init__(self, leaves: Sequence[Any]) -> None:
        """`leaves`: what the forward is called with."""
        kinds = {leaf.device.type for leaf in leaves if isinstance(leaf, torch.Tensor)} | {"cpu"}
        self._autocast = [(kind, *_casts_of(kind)) for kind in kinds if torch.amp.is_autocast_available(kind)]
        self._caches_casts = torch.is_autocast_cache_enabled()
        # Dynamo cuts what it compiles inside of a DDP's forward at DDP's buckets, and does not elsewhere.
        self._ddp = DistributedDataParallel._active_ddp_module
        modes = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
        self._default_device = [mode for mode in modes if isinstance(mode, DeviceContext)][-1:]
        self._random_state = torch.get_rng_state()
        self._devices: list[int] = []
        self._device_states: list[torch.Tensor] = []
        if len(kinds) > 1:
            self._devices, self._device_states = get_device_states(*leaves)

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Within it all is as it was then, afterwards as it is now."""
        with contextlib.ExitStack() as stack:
            stack.callback(torch.set_rng_state, torch.get_rng_state())
            torch.set_rng_state(self._random_state)
            if self._devices:
                stack.enter_context(torch.random.fork_rng(self._devices))
                set_device_states(self._devices, self._device_states)
            if self._ddp is not None:
                stack.enter_context(self._ddp._inside_ddp_forward())
            for kind, enabled, dtype in self._autocast:
                if enabled or _casts_of(kind) != (enabled, dtype):
                    stack.enter_context(torch.autocast(kind, dtype, enabled, self._caches_casts))
            for mode in self._default_device:
                stack.enter_context(mode)
            stack.enter_context(torch.enable_grad())
            yield


def _casts_of(kind: str) -> tuple[bool, torch.dtype]:
    return torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)


def without_graph(leaf: Any) -> Any:
    """What is kept of an argument: not the graph that has made it."""
    return leaf.detach().requires_grad_() if isinstance(leaf, torch.Tensor) and not leaf.is_leaf else leaf


def kept_of(leaf: Any, told: Told) -> Any:
    """What is kept of an argument, of which somebody is told."""
    kept = without_graph(leaf)
    if kept is not leaf:
        told(kept)
    return kept


def each_once(made: Callable[[Any], Any], leaves: Iterable[Any]) -> list[Any]:
    """`made` of every leaf, and once of one that comes several times: attention asks whether its query is its key."""
    found: dict[int, Any] = {}
    return [
        found[id(leaf)] if id(leaf) in found else found.setdefault(id(leaf), made(leaf)) for leaf in leaves
    ]


Within = Callable[[Filling], contextlib.AbstractContextManager[None]]


def as_packed(packed: torch.Tensor) -> torch.Tensor:
    return packed


def versions_of(leaves: Sequence[Any]) -> list[int]:
    """How often each has been changed in place; 0 for what does not tell."""
    return [
        leaf._version if isinstance(leaf, torch.Tensor) and not leaf.is_inference() else 0 for leaf in leaves
    ]


def check_versions(leaves: Sequence[Any], versions: Sequence[int], unit: str) -> None:
    """Raise RuntimeError where an argument that is kept has been changed in place since."""
    if versions_of(leaves) != versions:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: an input of {unit!r}, which is run again."
        )


class Returned:
    """A tensor that a call has returned, as its leaf of this number, as long as the script has it."""

    __slots__ = ("number", "reference", "requires_grad", "version")

    def __init__(self, number: int, tensor: torch.Tensor) -> None:
        self.number = number
        self.reference = weakref.ref(tensor)
        self.version = tensor._version
        self.requires_grad = tensor.requires_grad

    def is_unchanged(self, tensor: torch.Tensor) -> bool:
        return self.reference() is tensor and tensor._version == self.version


class _Alone:
    """A call that keeps its arguments alone, until its second run, which fills all places that are still waited for; one
    for a derivative is not the last. The hooks that autograd holds are all that holds it."""

    def __init__(
        self,
        unit: str,
        forward: Callable[..., Any],
        arguments: Any,
        around: Around,
        kept: KeptOutputs | None,
        told: Told,
        within: Within,
    ) -> None:
        self._unit = unit
        self._kept = kept
        self._within = within
        self._forward = forward
        self._around = around
        leaves, self._spec = tree_flatten(arguments)
        self._leaves: list[Any] = each_once(lambda leaf: kept_of(leaf, told), leaves)
        self._moving = [kept is not leaf for kept, leaf in zip(self._leaves, leaves, strict=True)]
        self._versions = versions_of(self._leaves)
        self._has_run = False
        self._conditions = Conditions(leaves)
        self._places = Places()
        self.pack = self._places.pack
        self.num_saved = self._places.__len__

    def hand_over(self, holder: Holder) -> None:
        """The first run is over: what others have made, and need a gradient of, is the holder's from now on."""
        moving = {id(leaf) for leaf, moves in zip(self._leaves, self._moving, strict=True) if moves}
        self._leaves = each_once(
            lambda leaf: kept_view(leaf, holder) or leaf if id(leaf) in moving else leaf, self._leaves
        )

    def unpack(self, place: Place) -> torch.Tensor:
        if place.value is None and place.later is None and not self._has_run:
            self._again()
        return value_of(place, self._unit, stays=self._has_run)

    def _again(self) -> None:
        probes = [leaf.probe if isinstance(leaf, KeptView) else leaf for leaf in self._leaves]
        check_versions(probes, self._versions, self._unit)
        leaves = each_once(
            lambda leaf: leaf.tensor().requires_grad_() if isinstance(leaf, KeptView) else leaf, self._leaves
        )
        args, kwargs = tree_unflatten(leaves, self._spec)
        filling = self._places.filling(True)
        hooks = torch.autograd.graph.saved_tensors_hooks(filling, as_packed)
        given = self._kept.second_run() if self._kept is not None else contextlib.nullcontext()
        parts = self._within(filling)
        # Innermost: what is cut short holds its local variables until it is caught, and they are of the run.
        with self._conditions.again(), self._around(), hooks, given, parts, until_enough(filling):
            self._forward(*args, **kwargs)
        if not is_walked_again():
            self._leaves, self._has_run = [], True


def run_keeping_arguments(
    unit: str,
    forward: Callable[..., Any],
    args: Any,
    kwargs: Any,
    around: Around,
    kept: KeptOutputs | None = None,
    told: Told = lambda tensor: None,
    holder: Holder | None = None,
    within: Within = lambda filling: contextlib.nullcontext(),
    firing: FiringOnce | None = None,
) -> Any:
    """Call a unit's forward such that it is run again, inside `around()`, when the backward first needs it.

    `kept`: outputs of operators that the second run is given. `holder`: who takes what is kept out of memory meanwhile.
    `within`: what its second run is done inside, told where that puts what is saved (parts.py). `firing`: the script's
    hooks on modules inside, which are watched in the first run.
    """
    call = _Alone(unit, forward, (args, kwargs), around, kept, told, within)
    watch = kept.first_run(call.num_saved) if kept is not None else contextlib.nullcontext()
    aside = kept.aside if kept is not None else contextlib.nullcontext
    hooks = firing.first_run(call.num_saved, aside) if firing is not None else contextlib.nullcontext()
    with torch.autograd.graph.saved_tensors_hooks(call.pack, call.unpack), watch, hooks:
        output = forward(*args, **kwargs)
    if holder is not None:
        if kept is not None:
            kept.hand_over(holder)
        call.hand_over(holder)
    return output
