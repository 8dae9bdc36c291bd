"""What the script's tensors are: a lean dispatch mode, active in a traced step alone.

It only appends plain values to a list; label_log.py and account.py make sense of them afterwards. Nothing here keeps
a tensor alive beyond the call that it is seen in, and nothing changes what an operator computes. It runs at every
operator, so it makes no strings, no names and no Python object of a storage, asks a tensor once for each fact, and goes one
way for the usual kinds of operators (operator_kinds.py) and another for all else, which must find the same. It asks for a
value's exact type before anything else: `isinstance` of a tensor's class is slow for whatever is none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from time import time_ns
from typing import Any

import torch
from torch._C import _current_autograd_node
from torch._C._autograd import _get_sequence_nr
from torch._ops import OpOverload
from torch.utils._python_dispatch import _get_current_dispatch_mode

from memadvisor.capture.collectives import CollectiveLog
from memadvisor.capture.flops import NO_ARITHMETIC
from memadvisor.capture.label_log import MOST_OF_LONG_STEP, MOST_OPERATORS, LabelLog, Named, Place, Sighting
from memadvisor.capture.meeting_gradients import may_be_overwritten
from memadvisor.capture.node_places import LEAST_OF_LEAVES, NodePlaces
from memadvisor.capture.open_autocasts import OpenAutocasts
from memadvisor.capture.operator_cost import arithmetic_of, known_product, traffic_of
from memadvisor.capture.operator_kinds import OperatorKind, kinds, learn
from memadvisor.capture.own_mode import OwnMode
from memadvisor.capture.position import Position
from memadvisor.capture.script_shards import named_tensors
from memadvisor.capture.tensor_storage import (
    NO_TENSORS,
    PLAIN_TENSORS,
    data_address,
    describe,
    has_wrapper,
    plain_tensors,
    presence,
    storage_address,
)
from memadvisor.capture.traffic import stored_bytes
from memadvisor.never_compiled import never_compiled
from memadvisor.operator_calls import is_without_dropout
from memadvisor.own_hooks import own_hooks_aside

_SEVERAL = (tuple, list)
_NOT_YET, _NOTHING_ASIDE = object(), nullcontext()
# With which a node that accumulates a gradient takes it as it is, or adds it to the one before; hooks of others run there too.
_ACCUMULATING = {"aten::detach", "aten::add_", "aten::add"}
_NO_WRAPPERS = ((torch.Tensor,), (torch.nn.Parameter,))  # what autograd names where it detaches

# Addresses of inputs, results as `LabelLog.flat` has them, bytes read and written.
_Found = tuple[list[int], list[Any], int | None, int | None]


class LabelMode(OwnMode):
    """Sees every operator of the step, its place, and which storages it reads and makes. `fail` is told of what of ours
    raises; the operator runs all the same."""

    def __init__(
        self,
        log: LabelLog,
        collectives: CollectiveLog,
        position: Position,
        device: torch.device,
        fail: Callable[[BaseException], None],
        *,
        is_long: bool = False,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._log = log
        self._flat, self.sightings = log.flat, log.sightings
        self._collectives = collectives
        self._tell, self._position = fail, position
        self._is_here = presence(device)
        self._may_be_shared = device.type == "cpu"
        self._nodes = NodePlaces()
        self._described: dict[tuple[torch.dtype, torch.Size], tuple[str, str]] = {}
        self._is_alone = _get_current_dispatch_mode() is None  # under another's mode every step adds aside
        self.here = self.live_place()
        self._in_backward = self.here.phase == "backward"
        self._last_place: Place | None = None
        self._large_bytes = 0  # half of the most that was written at once since a unit began or ended
        self.look_who_holds: Callable[[list[int]], None] | None = None
        self._count_autocasts = OpenAutocasts(log.nestings).count
        self._is_at_leaf = False  # in the backward: whether the node that runs accumulates a gradient
        self._node: int | None = None  # and what would stand beside the operator whose node it is
        self.most_operators = self._num_left = MOST_OF_LONG_STEP if is_long else MOST_OPERATORS
        self.names_nodes = True  # whether autograd may have a node for what runs now
        self.is_active, self.is_full = True, False  # full: of what follows nothing can be remembered

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # torch would wrap __torch_dispatch__ so, and import Dynamo for it; `never_compiled` does the same for less.
        return False

    supports_higher_order_operators = True  # else torch refuses flex_attention, cond ... under a mode

    @never_compiled
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kind, flat = kinds.get(id(func)), self._flat
        if (
            kind is None
            or kind.is_general
            or not self.is_active
            or (types and types not in _NO_WRAPPERS)
            or self._num_left <= 0
            or (self._in_backward and kind.may_meet)
        ):
            return self._see_any(func, types, args, kwargs or {})
        out: Any = _NOT_YET
        is_ours = True  # what runs now
        try:
            place, node = self.here, None
            if self._in_backward:
                place, node = self._place_of_node(place), self._node
            else:
                self._count_autocasts()
            self._last_place = place
            start_ns = time_ns()
            is_ours = False
            out = kind.call(*args, **kwargs) if kwargs else kind.call(*args)
            is_ours = True
            end_ns = time_ns()
            arithmetic = NO_ARITHMETIC
            if kind.is_view:
                found = self._glance_at_view(args[0], start_ns)
            else:
                found = None if kwargs and kind.keywords_may_hold else self._glance(kind, args, out, start_ns)
            if kind.has_arithmetic:
                products = None if found is None or kwargs else kind.products
                known = None if products is None else known_product(products, args)
                arithmetic = known or arithmetic_of(kind.counted_by, args, kwargs, out, self._log.uncounted)
            if found is None:
                found = self._look(kind, args, kwargs or {}, out, start_ns)
            if self.names_nodes and not self._in_backward:
                node = _get_sequence_nr()
            draws = kind.is_random and not is_without_dropout(kind.dropout_position, args, kwargs or {})
            inputs, outputs, read_bytes, written_bytes = found
            if written_bytes and written_bytes >= self._large_bytes:
                self._see_large(written_bytes, inputs)
            if self._is_at_leaf and self._in_backward and kind.name in _ACCUMULATING and inputs:
                self._log.accumulated.append((start_ns, inputs[-1]))
            flat += (
                start_ns, end_ns, kind.name, place, node, arithmetic, read_bytes, written_bytes, draws,
                len(inputs), len(outputs), *inputs, *outputs,
            )  # fmt: skip
            self._num_left -= 1
        except Exception as error:
            if not is_ours:
                raise
            self._fail(error)
            if out is _NOT_YET:
                return func(*args, **(kwargs or {}))
        return out

    def _see_any(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The way of every operator that is of no usual kind, or is called at an unusual moment."""
        if self._num_left <= 0:
            self.is_full, self.is_active = True, False
        if not self.is_active:
            return func(*args, **kwargs)
        kind = kinds.get(id(func)) or self._learnt(func)
        if kind is None:
            return func(*args, **kwargs)
        if types and has_wrapper(types):
            return NotImplemented
        out: Any = _NOT_YET
        is_ours = True
        try:
            place, node = self.here, None
            if self._in_backward:
                place, node = self._place_of_node(place), self._node
            else:
                self._count_autocasts()
            self._last_place = place
            start_mark = self._collectives.mark() if kind.is_collective else None
            is_aside = kind.may_meet and self._in_backward and self._is_alone and may_be_overwritten(*args)
            start_ns = time_ns()
            is_ours = False
            with own_hooks_aside() if kind.is_collective else _NOTHING_ASIDE:
                out = func(*args, **kwargs)
            is_ours = True
            if is_aside:
                self._log.added_aside.append((start_ns, time_ns(), self.address(args[0])))
            end_ns = time_ns()
            if kind.is_collective:
                for tensor in self._collectives.record(func, args, kwargs, out, start_ns, place, start_mark):
                    self.name(tensor, "communication", "")
            if kind.is_sharding:
                for tensor, category in named_tensors(kind.name, args, kwargs):
                    self.name(tensor, category, "")  # of the unit that it was made for
            # Autograd makes an operator's node just before it runs; what runs next without one is not its.
            if self.names_nodes and not self._in_backward:
                node = _get_sequence_nr()
            arithmetic = NO_ARITHMETIC
            if kind.has_arithmetic:
                arithmetic = arithmetic_of(kind.counted_by, args, kwargs, out, self._log.uncounted)
            draws = kind.is_random and not is_without_dropout(kind.dropout_position, args, kwargs)
            inputs, outputs, read_bytes, written_bytes = self._look(kind, args, kwargs, out, start_ns)
            if written_bytes and written_bytes >= self._large_bytes:
                self._see_large(written_bytes, inputs)
            if self._is_at_leaf and self._in_backward and kind.name in _ACCUMULATING and inputs:
                self._log.accumulated.append((start_ns, inputs[-1]))
            self._flat += (
                start_ns, end_ns, kind.name, place, node, arithmetic, read_bytes, written_bytes, draws,
                len(inputs), len(outputs), *inputs, *outputs,
            )  # fmt: skip
            self._num_left -= 1
        except Exception as error:
            if not is_ours:
                raise
            self._fail(error)
            if out is _NOT_YET:
                return func(*args, **kwargs)
        return out

    def _learnt(self, func: Any) -> OperatorKind | None:
        """The kind of an operator that is met for the first time; None where it cannot be told."""
        if not isinstance(func, OpOverload):  # without a schema it runs operators where no mode sees them
            self._log.uncounted.add(str(func))
            return None
        try:
            return learn(func)
        except Exception as error:
            self._fail(error)
            return None

    def _fail(self, error: BaseException) -> None:
        self.is_active = False
        self._tell(error)

    def _see_large(self, written_bytes: int, inputs: list[int]) -> None:
        """Where the peak may be. The operator itself holds what it is given, a backward's node more than its operators are."""
        self._large_bytes = max(self._large_bytes, written_bytes // 2)
        if self.look_who_holds is not None and self.here.phase in ("forward", "outside"):
            self.look_who_holds(inputs)

    def _glance_at_view(self, value: Any, now_ns: int) -> _Found | None:
        """What `_glance` finds of an operator whose results share the storage of its only tensor."""
        if type(value) not in PLAIN_TENSORS or not (self._is_here is None or self._is_here(value)):
            return None
        try:
            address = data_address(value)
        except (RuntimeError, NotImplementedError):  # without a storage
            return None
        if not address:
            return None
        if address not in self.sightings:
            self.sight(value, address, now_ns)
        return [address], [], 0, 0

    def _glance(self, kind: OperatorKind, args: tuple[Any, ...], out: Any, now_ns: int) -> _Found | None:
        """What an operator of a usual kind reads and makes, in one pass; None where its tensors are not plain."""
        moves, sightings, is_here = kind.moves, self.sightings, self._is_here
        inputs: list[int] = []
        outputs: list[Any] = []
        read_bytes = written_bytes = 0
        try:
            for position, value in enumerate(args[: kind.num_examined]):
                cls = type(value)
                if cls in PLAIN_TENSORS:
                    address = data_address(value)
                    if not address or (is_here is not None and not is_here(value)):
                        return None
                    if address not in inputs:
                        if address not in sightings:
                            self.sight(value, address, now_ns)
                        inputs.append(address)
                    elif any(value is other for other in args[:position]):  # `x * x` reads it once
                        continue
                    if moves:
                        read_bytes += value.nbytes if value.is_contiguous() else stored_bytes(value)
                        if not written_bytes:  # of the first
                            written_bytes = read_bytes
                elif cls not in NO_TENSORS and cls is not list:
                    return None
            if kind.is_in_place:
                return (inputs, outputs, read_bytes, written_bytes) if out is args[0] else None
            written_bytes = 0
            for value in out if type(out) in _SEVERAL else (out,):
                cls = type(value)
                if cls in PLAIN_TENSORS:
                    address = data_address(value)
                    if not address or (is_here is not None and not is_here(value)):
                        return None
                    if moves:
                        written_bytes += value.nbytes if value.is_contiguous() else stored_bytes(value)
                    if address not in inputs:
                        outputs += (address, self.describe(value))
                elif cls not in NO_TENSORS:
                    return None
        except (RuntimeError, NotImplementedError):  # a tensor without a storage
            return None
        return inputs, outputs, read_bytes, written_bytes

    def _look(
        self, kind: OperatorKind, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, now_ns: int
    ) -> _Found:
        """What any operator reads and makes."""
        inputs: list[int] = []
        self._read(args, inputs, now_ns)
        self._read(kwargs.values(), inputs, now_ns)
        outputs: list[Any] = []
        self._write((out,), inputs, outputs)
        return inputs, outputs, *traffic_of(kind.counted_by, args, kwargs, out)

    def _read(self, values: Iterable[Any], inputs: list[int], now_ns: int) -> None:
        """Add the addresses of tensors among an operator's arguments: flat, or in lists one or two levels deep."""
        for value in values:
            cls = type(value)
            if cls in NO_TENSORS:
                continue
            if cls in PLAIN_TENSORS or isinstance(value, torch.Tensor):
                address = self.address(value)
                if address and address not in inputs:
                    inputs.append(address)
                    if address not in self.sightings:
                        self.sight(value, address, now_ns)
            elif isinstance(value, (list, tuple)):
                self._read(value, inputs, now_ns)

    def _write(self, values: Iterable[Any], inputs: list[int], outputs: list[Any]) -> None:
        """Add what is known of the results that are no inputs."""
        for value in values:
            cls = type(value)
            if cls in PLAIN_TENSORS or isinstance(value, torch.Tensor):
                address = self.address(value)
                if address and address not in inputs:
                    outputs += (address, self.describe(value))
            elif isinstance(value, (list, tuple)):
                self._write(value, inputs, outputs)

    def describe(self, tensor: torch.Tensor) -> tuple[str, str]:
        try:
            key = (tensor.dtype, tensor.shape)
        except RuntimeError:  # nested, of strided ones
            return describe(tensor)
        known = self._described.get(key)
        if known is None:
            known = self._described[key] = describe(tensor)
        return known

    def name(self, tensor: torch.Tensor, category: str, unit: str) -> None:
        for plain in plain_tensors(tensor):
            address = self.address(plain)
            if address:
                now_ns = time_ns()
                self.sight(plain, address, now_ns)
                self._log.named.append(Named(now_ns, address, category, unit))

    def note_place(self) -> None:
        """A module was entered or left, or the phase changed."""
        self._count_autocasts()
        before, place = self.here, self.live_place()
        self.here, self._in_backward = place, place.phase == "backward"
        if place.unit != before.unit:  # another may write far more at a time, and have its peak elsewhere
            self._large_bytes = 0
        self._log.places.append((time_ns(), place))
        if place.phase != "backward":  # what the script does between modules is of none of them
            self._nodes.mark(place)  # the backward finds its modules by them

    def live_place(self) -> Place:
        position = self._position
        return Place(position.phase, position.module, position.unit, position.micro_batch)

    def _place_of_node(self, place: Place) -> Place:
        """In the backward: the module whose forward made the node that runs, by the node's sequence number."""
        node = _current_autograd_node()
        self._is_at_leaf, self._node = False, None
        if node is not None:
            number = node._sequence_nr()
            self._is_at_leaf = number >= LEAST_OF_LEAVES
            if not self._is_at_leaf:
                self._node = number + 1  # an operator sees the number that the next node will have
            known = self._nodes.known.get(number)
            if known is None or known.micro_batch != place.micro_batch:
                known = self._nodes.of_node(number, place)
            place = known
        if place is not self._last_place and place != self._last_place:
            self._log.places.append((time_ns(), place))
            if torch.is_grad_enabled():
                self._nodes.mark(place)  # a second backward goes through the nodes made in this one
        return place

    def address(self, tensor: torch.Tensor) -> int:
        """Address of the tensor's storage on the traced device, 0 where it has none there."""
        return storage_address(tensor) if self._is_here is None or self._is_here(tensor) else 0

    def sight(self, tensor: torch.Tensor, address: int, now_ns: int) -> None:
        if address not in self.sightings:
            storage = tensor.untyped_storage()
            # Else census.py has asked the allocator.
            if storage.resizable() and not (self._may_be_shared and storage.is_shared()):
                self.sightings[address] = Sighting(now_ns, storage.nbytes(), *self.describe(tensor))
