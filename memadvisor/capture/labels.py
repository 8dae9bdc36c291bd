"""What the script's tensors are: a lean dispatch mode, active in a traced step alone.

It only appends plain tuples to lists; account.py makes sense of them afterwards. Nothing here keeps a
tensor alive beyond the call that it is seen in, and nothing changes what an operator computes.

It runs at every operator, so it asks for a value's exact type before anything else: `isinstance` of a tensor's
class is slow for whatever is none.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch._C._autograd import _get_sequence_nr
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from memadvisor.capture.collectives import CollectiveLog, Mark
from memadvisor.capture.compiled import never_compiled
from memadvisor.capture.label_log import LabelLog, Named, OperatorCall, Place, Sighting
from memadvisor.capture.meeting_gradients import may_be_overwritten
from memadvisor.capture.operator_cost import operator_cost
from memadvisor.capture.position import Position
from memadvisor.capture.script_shards import NAMESPACE, named_tensors
from memadvisor.capture.tensor_storage import (
    NO_TENSORS,
    PLAIN_TENSORS,
    describe,
    has_wrapper,
    is_shared,
    plain_tensors,
    storage_address,
)
from memadvisor.operator_calls import dropout_position, is_without_dropout, may_draw, operator_name
from memadvisor.own_hooks import own_hooks_aside

# What a step remembers of an operator takes about 1 kB until it is written: at most 100 MB.
MOST_OPERATORS = 100_000
_NUM_FIELDS = len(OperatorCall._fields)
NAMESPACES_OF_COLLECTIVES = ("c10d", "_c10d_functional")
_ADD = torch.ops.aten.add.Tensor


class _Operator(NamedTuple):
    """What is the same for all calls of an operator. `func` keeps it alive, for it is found by its id."""

    func: Any
    name: str
    is_collective: bool
    is_sharding: bool  # of FSDP2
    is_random: bool  # it may draw random numbers
    dropout_position: int | None


_operators: dict[int, _Operator] = {}


def _learn(func: Any) -> _Operator:
    known = _operators[id(func)] = _Operator(
        func,
        operator_name(func),
        func.namespace in NAMESPACES_OF_COLLECTIVES,
        func.namespace == NAMESPACE,
        may_draw(func),
        dropout_position(func),
    )
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
        self._calls, self._sightings = log.flat, log.sightings
        self._operator_of_node = log.operator_of_node
        self._collectives = collectives
        self._position = position
        self._is_here = attrgetter(f"is_{device.type}")  # tensor.is_cpu, tensor.is_cuda
        self._modules_by_sequence: list[tuple[int, Place]] = []
        self._here = self.live_place()
        self._last_place: Place | None = None
        self._places_of_nodes: dict[int, Place] = {}
        self._described: dict[tuple[torch.dtype, torch.Size], tuple[str, str]] = {}
        self._is_alone = _get_current_dispatch_mode() is None  # under another's mode every step adds aside
        self.is_active = True
        self.names_nodes = True  # whether autograd may have a node for what runs now
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
        if len(self._calls) >= MOST_OPERATORS * _NUM_FIELDS:
            self.is_full, self.is_active = True, False
        if not self.is_active:
            return func(*args, **kwargs)
        known = _operators.get(id(func))
        if known is None:
            # It has no schema, and runs operators where no mode sees them.
            if not isinstance(func, OpOverload):
                self._log.uncounted.add(str(func))
                return func(*args, **kwargs)
            known = _learn(func)
        if types and has_wrapper(types):
            return NotImplemented
        place = self._place()
        start_mark = self._collectives.mark() if known.is_collective else None
        is_aside = func is _ADD and place.phase == "backward" and self._is_alone and may_be_overwritten(*args)
        start_ns = time.time_ns()
        if known.is_collective:
            with own_hooks_aside():
                out = func(*args, **kwargs)
        else:
            out = func(*args, **kwargs)
        if is_aside:
            self._log.added_aside.append((start_ns, time.time_ns(), self.address(args[0])))
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
        if known.is_sharding:
            for tensor, category in named_tensors(known.name, args, kwargs):
                self.name(tensor, category, "")  # of the unit that it was made for
        inputs: list[int] = []
        self._read(args, inputs, start_ns)
        if kwargs:
            self._read(kwargs.values(), inputs, start_ns)
        outputs: list[tuple[int, str, str]] = []
        if out is not None:
            self._write((out,), inputs, outputs)
        cost = operator_cost(func, args, kwargs, out, self._log.uncounted)
        if self.names_nodes and place.phase != "backward":
            # Autograd makes an operator's node just before it runs; what runs next without one is not its.
            self._operator_of_node.setdefault(_get_sequence_nr(), known.name)
        draws = known.is_random and not is_without_dropout(known.dropout_position, args, kwargs)
        self._calls += (start_ns, end_ns, known.name, place, tuple(inputs), tuple(outputs), *cost, draws)

    def _read(self, values: Iterable[Any], inputs: list[int], now_ns: int) -> None:
        """Add the addresses of tensors among an operator's arguments: flat, or in lists one or two levels deep."""
        for value in values:
            kind = type(value)
            if kind in NO_TENSORS:
                continue
            if kind in PLAIN_TENSORS or isinstance(value, torch.Tensor):
                address = self.address(value)
                if address and address not in inputs:
                    inputs.append(address)
                    if address not in self._sightings:
                        self._sight(value, address, now_ns)
            elif isinstance(value, (list, tuple)):
                self._read(value, inputs, now_ns)

    def _write(self, values: Iterable[Any], inputs: list[int], outputs: list[tuple[int, str, str]]) -> None:
        """Add what is known of the results that are no inputs."""
        for value in values:
            kind = type(value)
            if kind in PLAIN_TENSORS or isinstance(value, torch.Tensor):
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
        if type(tensor) in PLAIN_TENSORS:
            try:
                return tensor.untyped_storage().data_ptr()
            except (RuntimeError, NotImplementedError):  # sparse
                return 0
        return storage_address(tensor)

    def _sight(self, tensor: torch.Tensor, address: int, now_ns: int) -> None:
        if address not in self._sightings:
            storage = tensor.untyped_storage()
            if storage.resizable() and not is_shared(tensor):  # else census.py has asked the allocator
                self._sightings[address] = Sighting(now_ns, storage.nbytes(), *self.describe(tensor))
