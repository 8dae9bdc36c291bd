"""What the script's tensors are: a lean dispatch mode and saved-tensor hooks, active in a traced step alone.

They only append plain tuples to lists; account.py makes sense of them afterwards. Nothing here keeps a
tensor alive beyond the call that it is seen in, and nothing changes what an operator computes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch._C._autograd import _get_sequence_nr
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from memadvisor.capture.collectives import CollectiveLog, Mark
from memadvisor.capture.compiled import never_compiled
from memadvisor.capture.operator_cost import operator_cost
from memadvisor.capture.position import Position

# What a step remembers of an operator takes about 1 kB until it is written: at most 100 MB.
MOST_OPERATORS = 100_000
_NAMESPACES_OF_COLLECTIVES = ("c10d", "_c10d_functional")
_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)


class Place(NamedTuple):
    """Where the training stood when something happened."""

    phase: str
    module: str
    unit: str
    micro_batch: int


class OperatorCall(NamedTuple):
    start_ns: int
    end_ns: int
    name: str
    place: Place
    inputs: tuple[int, ...]  # addresses of the storages read
    outputs: tuple[tuple[int, str, str], ...]  # (address, dtype, shape) of the storages that are not inputs
    executed_flops: int
    model_flops: int
    shapes: str = ""
    read_bytes: int | None = None
    written_bytes: int | None = None


class Named(NamedTuple):
    """From somebody who knows: the storage at `address` is of `category`."""

    time_ns: int
    address: int
    category: str
    unit: str


class Sighting(NamedTuple):
    """A storage met as an input: if the allocator never saw its birth, it was there before the step."""

    time_ns: int
    size_bytes: int
    dtype: str
    shape: str


@dataclass(slots=True, eq=False)
class SavedTensor:
    """A tensor that autograd packed. `released_ns` is when autograd let go of it."""

    address: int
    size_bytes: int
    shape: str
    place: Place
    saved_ns: int
    unpacked_ns: int | None = None
    released_ns: int | None = None
    node_number: int | None = None  # sequence number of the autograd node that keeps it


@dataclass(slots=True)
class LabelLog:
    """Everything that the label layer saw of one step, in order of time."""

    calls: list[OperatorCall] = field(default_factory=list)
    places: list[tuple[int, Place]] = field(default_factory=list)
    named: list[Named] = field(default_factory=list)
    saved: list[SavedTensor] = field(default_factory=list)
    sightings: dict[int, Sighting] = field(default_factory=dict)
    forward_starts_ns: list[int] = field(default_factory=list)
    recompute_ends_ns: list[int] = field(default_factory=list)
    operator_of_node: dict[int, str] = field(default_factory=dict)  # by sequence number, forwards alone
    uncounted: set[str] = field(default_factory=set)  # operators whose FLOPs could not be worked out


def plain_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors with storage behind a tensor: itself, or what a subclass (DTensor, a quantised one) wraps."""
    flatten = getattr(type(tensor), "__tensor_flatten__", None)
    if flatten is None:
        yield tensor
        return
    for name in flatten(tensor)[0]:
        part = getattr(tensor, name)
        if isinstance(part, torch.Tensor):  # DTensor names its mesh too
            yield from plain_tensors(part)


def storage_address(tensor: torch.Tensor) -> int:
    """Address of the tensor's storage, 0 where it has none (meta, fake, sparse, wrapper subclasses)."""
    if type(tensor).__name__ == "FakeTensor":
        return 0
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0


def has_wrapper(types: Iterable[type]) -> bool:
    """Whether tensors that wrap others (DTensor, a quantised one) are among the arguments.

    A dispatch mode then returns NotImplemented: they run operators on what they wrap, which it sees.
    """
    return any(hasattr(kind, "__tensor_flatten__") for kind in types)


def is_shared(tensor: torch.Tensor) -> bool:
    """Whether other processes share its memory, which then is not the CPU allocator's; CUDA's always may be."""
    return tensor.device.type == "cpu" and bool(tensor.untyped_storage().is_shared())


def describe(tensor: torch.Tensor) -> tuple[str, str]:
    """(dtype, shape) as the run records them."""
    return str(tensor.dtype).removeprefix("torch."), str(list(tensor.shape))


class _Operator(NamedTuple):
    """What is the same for all calls of an operator. `func` keeps it alive, for it is found by its id."""

    func: Any
    name: str
    is_collective: bool


_operators: dict[int, _Operator] = {}


def _learn(func: Any) -> _Operator:
    name = f"{func.namespace}::{func._schema.name.partition('::')[2]}"
    known = _operators[id(func)] = _Operator(func, name, func.namespace in _NAMESPACES_OF_COLLECTIVES)
    return known


class LabelMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operator of the step, its place, and which storages it reads and makes.

    It runs at every operator, so it makes no strings and no generators, and looks up what it can.
    """

    def __init__(
        self, log: LabelLog, collectives: CollectiveLog, position: Position, device: torch.device
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._log = log
        self._collectives = collectives
        self._position = position
        self._is_here = attrgetter(f"is_{device.type}")  # tensor.is_cpu, tensor.is_cuda
        self._modules_by_sequence: list[tuple[int, Place]] = []
        self._here = self.live_place()
        self._last_place: Place | None = None
        self._places_of_nodes: dict[int, Place] = {}
        self._described: dict[tuple[torch.dtype, torch.Size], tuple[str, str]] = {}
        self.is_active = True
        self.is_full = False  # more operators than may be remembered; what follows is not seen

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        # Without this a mode switches torch.compile off, for good.
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # torch would wrap __torch_dispatch__ so, and import Dynamo for it; `never_compiled` does the same for less.
        return False

    # Without this torch refuses to run flex_attention, cond and their like under a mode.
    supports_higher_order_operators = True

    @never_compiled
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if kwargs is None:
            kwargs = {}
        if len(self._log.calls) >= MOST_OPERATORS:
            self.is_full, self.is_active = True, False
        if not self.is_active:
            return func(*args, **kwargs)
        if not isinstance(func, OpOverload):  # it has no schema, and runs operators where no mode sees them
            self._log.uncounted.add(str(func))
            return func(*args, **kwargs)
        if types and has_wrapper(types):
            return NotImplemented
        place = self._place()
        known = _operators.get(id(func)) or _learn(func)
        start_mark = self._collectives.mark() if known.is_collective else None
        start_ns = time.time_ns()
        out = func(*args, **kwargs)
        self._note_call(known, func, args, kwargs, out, place, start_ns, time.time_ns(), start_mark)
        return out

    def _note_call(
        self,
        known: _Operator,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: Any,
        place: Place,
        start_ns: int,
        end_ns: int,
        start_mark: Mark | None,
    ) -> None:
        if known.is_collective:
            for tensor in self._collectives.record(func, args, kwargs, out, start_ns, place, start_mark):
                self.name(tensor, "communication", "")
        inputs: list[int] = []
        self._read(args, inputs, start_ns)
        if kwargs:
            self._read(kwargs.values(), inputs, start_ns)
        outputs: list[tuple[int, str, str]] = []
        self._write((out,), inputs, outputs)
        cost = operator_cost(func, args, kwargs, out, self._log.uncounted)
        if place.phase != "backward":
            # Autograd makes an operator's node just before it runs; what runs next without one is not its.
            self._log.operator_of_node.setdefault(_get_sequence_nr(), known.name)
        self._log.calls.append(
            OperatorCall(start_ns, end_ns, known.name, place, tuple(inputs), tuple(outputs), *cost)
        )

    def _read(self, values: Iterable[Any], inputs: list[int], now_ns: int) -> None:
        """Add the addresses of tensors among an operator's arguments: flat, or in lists one or two levels deep."""
        for value in values:
            if isinstance(value, torch.Tensor):
                address = self.address(value)
                if address and address not in inputs:
                    inputs.append(address)
                    if address not in self._log.sightings:
                        self._sight(value, address, now_ns)
            elif isinstance(value, (list, tuple)):
                self._read(value, inputs, now_ns)

    def _write(self, values: Iterable[Any], inputs: list[int], outputs: list[tuple[int, str, str]]) -> None:
        """Add what is known of the results that are no inputs."""
        for value in values:
            if isinstance(value, torch.Tensor):
                address = self.address(value)
                if address and address not in inputs:
                    outputs.append((address, *self.describe(value)))
            elif isinstance(value, (list, tuple)):
                self._write(value, inputs, outputs)

    def describe(self, tensor: torch.Tensor) -> tuple[str, str]:
        key = (tensor.dtype, tensor.shape)
        known = self._described.get(key)
        if known is None:
            known = self._described[key] = describe(tensor)
        return known

    def name(self, tensor: torch.Tensor, category: str, unit: str) -> None:
        for plain in plain_tensors(tensor):
            address = self.address(plain)
            if address:
                now_ns = time.time_ns()
                self._sight(plain, address, now_ns)
                self._log.named.append(Named(now_ns, address, category, unit))

    def note_place(self) -> None:
        """A module was entered or left, or the phase changed."""
        place = self._here = self.live_place()
        self._log.places.append((time.time_ns(), place))
        if place.phase in ("forward", "recompute"):
            # Nodes made from here on belong to this place: the backward finds its modules by them.
            self._mark_nodes(place)

    def _mark_nodes(self, place: Place) -> None:
        marks, number = self._modules_by_sequence, _get_sequence_nr()
        if not marks or number >= marks[-1][0]:  # another thread (CUDA's backward) counts from 0 again
            marks.append((number, place))

    def live_place(self) -> Place:
        position = self._position
        return Place(position.phase, position.module, position.unit, position.micro_batch)

    def _place(self) -> Place:
        place = self._here
        if place.phase == "backward":
            place = self._place_of_node(place)
            if place is not self._last_place and place != self._last_place:
                self._log.places.append((time.time_ns(), place))
                if torch.is_grad_enabled():
                    self._mark_nodes(place)  # a second backward goes through the nodes made in this one
        self._last_place = place
        return place

    def _place_of_node(self, place: Place) -> Place:
        """The module whose forward made the running backward node, by the node's sequence number."""
        node = torch._C._current_autograd_node()
        if node is None:
            return place
        number = node._sequence_nr()
        known = self._places_of_nodes.get(number)
        if known is not None and known.micro_batch == place.micro_batch:
            return known
        marks = self._modules_by_sequence
        low, high = 0, len(marks)
        while low < high:
            middle = (low + high) // 2
            if marks[middle][0] <= number:
                low = middle + 1
            else:
                high = middle
        if low == 0 or number >= 2**62:  # gradient accumulation nodes carry the largest number
            return place
        made = marks[low - 1][1]
        found = Place("backward", made.module, made.unit, place.micro_batch)
        self._places_of_nodes[number] = found
        return found

    def address(self, tensor: torch.Tensor) -> int:
        """Address of the tensor's storage on the traced device, 0 where it has none there."""
        if not self._is_here(tensor):
            return 0
        if type(tensor) in _PLAIN_TENSORS:
            try:
                return tensor.untyped_storage().data_ptr()
            except (RuntimeError, NotImplementedError):  # sparse
                return 0
        return storage_address(tensor)

    def _sight(self, tensor: torch.Tensor, address: int, now_ns: int) -> None:
        if address not in self._log.sightings:
            storage = tensor.untyped_storage()
            if storage.resizable() and not is_shared(tensor):  # else census.py has asked the allocator
                self._log.sightings[address] = Sighting(now_ns, storage.nbytes(), *self.describe(tensor))


class SavedTensorHooks:
    """Pack and unpack hooks that give autograd back the very tensor, and note when it lets go."""

    def __init__(
        self, mode: LabelMode, log: LabelLog, also: Callable[[torch.Tensor], None] | None = None
    ) -> None:
        self._also = also  # autograd asks the innermost hooks alone
        self._mode = mode
        self._log = log

    @never_compiled
    def pack(self, tensor: torch.Tensor) -> Any:
        address = self._mode.address(tensor)
        if self._also is not None:
            self._also(tensor)
        was_active, self._mode.is_active = (
            self._mode.is_active,
            False,
        )  # our own detach is none of the script's
        tensor = without_cycle(tensor)
        self._mode.is_active = was_active
        if not address or not was_active:
            return _Kept(tensor, None)
        size_bytes = tensor.untyped_storage().nbytes()
        now_ns = time.time_ns()
        self._mode._sight(tensor, address, now_ns)
        place, (_, shape) = self._mode._here, self._mode.describe(tensor)
        row = SavedTensor(address, size_bytes, shape, place, now_ns, node_number=_get_sequence_nr())
        self._log.saved.append(row)
        return _Kept(tensor, row)

    @staticmethod
    @never_compiled
    def unpack(kept: Any) -> torch.Tensor:
        if kept.row is not None:
            kept.row.unpacked_ns = time.time_ns()
        tensor: torch.Tensor = kept.tensor
        return tensor


def without_cycle(tensor: torch.Tensor) -> torch.Tensor:
    """What a pack hook may give back. Of an operator's own result autograd would otherwise keep the graph that
    keeps the result, and what no backward runs through would never be freed; it restores the rest by itself."""
    return tensor if tensor.grad_fn is None else tensor.data


class _Kept:
    """Stands for a saved tensor inside autograd; its end is the moment that autograd lets go."""

    __slots__ = ("row", "tensor")

    def __init__(self, tensor: torch.Tensor, row: SavedTensor | None) -> None:
        self.tensor = tensor
        self.row = row

    @never_compiled
    def __del__(self) -> None:
        if self.row is not None:
            self.row.released_ns = time.time_ns()


def _tensors(values: Any) -> Iterable[torch.Tensor]:
    """Tensors among an operator's arguments or results: flat, or in lists one or two levels deep."""
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from _tensors(value)
