"""What the label layer saw of one step: plain facts in order of time, without torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple


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
    is_random: bool = False
    # The sequence number after that of the node that autograd has made for it, or another operator before it; in the
    # backward, after that of the node that runs. None: not known.
    node: int | None = None


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


# A traced step takes some 15 kB an operator until it is written, nearly all of it the profiler's; one that is known to be
# long, of which the profiler remembers memory and autograd's nodes alone, takes 3 kB.
MOST_OPERATORS = 100_000
MOST_OF_LONG_STEP = 400_000


@dataclass(slots=True, eq=False)
class SavedTensor:
    """A tensor that autograd packed. `released_ns`: when autograd let go of it, or an engine had moved it off the device.

    `copy_of`: where an engine keeps another storage for it, or the bytes have been moved and are back, an address in
    the storage that was saved, and when it was there. `original_bytes`: of that one, where the other is not as large.
    """

    address: int
    size_bytes: int
    shape: str
    place: Place
    saved_ns: int
    unpacked_ns: int | None = None
    released_ns: int | None = None
    node_number: int | None = None  # sequence number of the autograd node that keeps it
    needs_gradient: bool = False
    copy_of: tuple[int, int] | None = None
    original_bytes: int | None = None


@dataclass(slots=True, eq=False)
class HeldStorage:
    """What autograd keeps and somebody else held too, at the last moment that anybody did."""

    address: int
    time_ns: int


@dataclass(slots=True)
class LabelLog:
    """Everything that the label layer saw of one step, in order of time.

    `calls` are there after `gather`. Until then what was seen of them stands in `flat`, one call after the other: start
    and end, name, place, node (as `OperatorCall` has it), arithmetic (executed and needed FLOPs, shapes), bytes read and
    written, whether it drew random numbers, how many values its inputs and its results take, the addresses of the inputs,
    and each result's address and (dtype, shape). A tuple or list of each call would bring on Python's garbage collector
    again and again, in the midst of the step, and names take longer to make than all the rest.
    """

    calls: list[OperatorCall] = field(default_factory=list)
    flat: list[Any] = field(default_factory=list)
    places: list[tuple[int, Place]] = field(default_factory=list)
    named: list[Named] = field(default_factory=list)
    saved: list[SavedTensor] = field(default_factory=list)
    held: list[HeldStorage] = field(default_factory=list)
    sightings: dict[int, Sighting] = field(default_factory=dict)
    forward_starts_ns: list[int] = field(default_factory=list)
    recompute_ends_ns: list[int] = field(default_factory=list)
    operator_of_node: dict[int, str] = field(default_factory=dict)  # by sequence number, forwards alone
    # (start, end, address of the first) of additions that autograd would have done in place without our mode
    added_aside: list[tuple[int, int, int]] = field(default_factory=list)
    # (when, address) of what autograd came to add to a parameter's gradient, or to make it
    accumulated: list[tuple[int, int]] = field(default_factory=list)
    nestings: list[tuple[int, int]] = field(
        default_factory=list
    )  # (when, how many autocasts were open since)
    uncounted: set[str] = field(default_factory=set)  # operators whose FLOPs could not be worked out

    def gather(self) -> None:
        """Make calls of what was seen of them."""
        values = iter(self.flat)
        for start in values:
            end, name, place, node, arithmetic, read, written, is_random, num_inputs, num_outputs = islice(
                values, 10
            )
            if node is not None and place.phase != "backward":
                self.operator_of_node.setdefault(node, name)
            inputs, outputs = tuple(islice(values, num_inputs)), islice(values, num_outputs)
            results = tuple((address, *what) for address, what in zip(outputs, outputs, strict=True))
            fields = (start, end, name, place, inputs, results, *arithmetic, read, written, is_random, node)
            self.calls.append(OperatorCall._make(fields))
        self.flat.clear()
