"""Joining the two layers: the allocator's events say when and how much, the labels say what.

Pure Python, no torch. What only the allocator saw is a temporary inside the operator that ran;
bytes that were there before the step and that nobody knows are "unexplained".
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from types import MappingProxyType

from memadvisor.capture.label_log import LabelLog, Named, OperatorCall, Place, SavedTensor
from memadvisor.capture.truth import AllocatorEvent
from memadvisor.run.records import Residual, Saved, Storage

# The allocator's and Python's clocks agree to far less than this.
_CLOCK_SLACK_NS = 20_000
# The first category wins where several people named one storage.
_PRIORITY = (
    "parameter",
    "gradient",
    "optimizer_state",
    "communication",
    "input",
    "activation",
    "other",
    "temporary",
)
_NO_OPERATOR = "(no operator)"
_BASELINE = Place("baseline", "", "", 0)


@dataclass(frozen=True, slots=True)
class Resident:
    """A storage that was alive when the step began, and what the census knows of it."""

    address: int
    size_bytes: int
    category: str
    unit: str
    dtype: str
    shape: str
    operator: str = ""  # what it is for, where no tensor says so


@dataclass(slots=True, eq=False)
class _Block:
    """One allocation on its way to becoming a Storage row."""

    address: int
    size_bytes: int
    birth_ns: int
    death_ns: int | None
    place: Place
    operator: str
    categories: set[str] = field(default_factory=set)
    unit: str | None = None
    dtype: str = ""
    shape: str = ""
    is_result: bool = False  # an operator returned it; otherwise it never left the operator
    last_use_ns: int | None = None
    last_forward_use_ns: int | None = None
    last_held_ns: int | None = None
    number: int = -1


_birth_ns = attrgetter("birth_ns")


@dataclass(frozen=True, slots=True)
class Account:
    """The rows of one traced step; times in nanoseconds have become seconds by `to_s`."""

    storages: list[Storage]
    saved: list[Saved]
    residuals: list[Residual]
    peak_allocated_bytes: int | None
    peak_reserved_bytes: int | None
    storage_at: Callable[[int, int], int | None]  # id of what lived at an address at a time in nanoseconds


class Ledger:
    """All blocks of a step, found by address and time.

    `given_bytes`: of what was alive when the step began, what the allocator gave for it, where it gives more than it is asked for.
    """

    def __init__(self, residents: Iterable[Resident], given_bytes: Mapping[int, int], start_ns: int) -> None:
        self.blocks: list[_Block] = []
        self._given_bytes = given_bytes
        self._by_address: dict[int, list[_Block]] = {}  # in order of birth
        self._start_ns = start_ns
        for resident in residents:
            block = self._add(resident.address, resident.size_bytes, start_ns, _BASELINE, resident.operator)
            block.categories.add(resident.category)
            block.unit, block.dtype, block.shape = resident.unit, resident.dtype, resident.shape

    def _add(self, address: int, size_bytes: int, birth_ns: int, place: Place, operator: str) -> _Block:
        block = _Block(address, size_bytes, birth_ns, None, place, operator)
        self.blocks.append(block)
        if place is _BASELINE:
            self._by_address.setdefault(address, []).insert(0, block)
        else:
            self._by_address.setdefault(address, []).append(block)
        return block

    def play(self, events: Sequence[AllocatorEvent], places: Sequence[tuple[int, Place]]) -> None:
        """Births and deaths, as the allocator saw them."""
        times = [time_ns for time_ns, _ in places]
        for event in events:
            if event.delta_bytes > 0:
                position = bisect_right(times, event.time_ns) - 1
                place = places[position][1] if position >= 0 else Place("outside", "", "", 0)
                self._add(event.address, event.delta_bytes, event.time_ns, place, event.operator)
                continue
            living = self._by_address.get(event.address)
            if living and living[-1].death_ns is None:
                living[-1].death_ns = event.time_ns
            else:  # it was there before the step, and nobody knew it
                block = self._add(event.address, -event.delta_bytes, self._start_ns, _BASELINE, "")
                block.death_ns = event.time_ns

    def at(self, address: int, time_ns: int) -> _Block | None:
        """The block that lived at this address at this time."""
        lived = self._by_address.get(address)
        if lived is None:
            return None
        position = bisect_right(lived, time_ns + _CLOCK_SLACK_NS, key=_birth_ns)
        if not position:
            return None
        block = lived[position - 1]
        alive = block.death_ns is None or block.death_ns >= time_ns - _CLOCK_SLACK_NS
        return block if alive else None

    def gone_before(self, size_bytes: int) -> int:
        """Such a thread as `freed_elsewhere` tells of freed this much between the census and the profiler's start.

        Taken for it are residents that nobody has named and the step neither used nor freed, if their sizes add up.
        Returns their bytes, which are no part of the step; else 0, and nothing changes.
        """
        unused = (
            block
            for block in self.blocks
            if block.categories == {"other"} and block.death_ns is None and block.last_use_ns is None
        )
        gone, left_bytes = [], size_bytes
        for block in sorted(unused, key=lambda block: -block.size_bytes):
            if block.size_bytes <= left_bytes:
                gone.append(block)
                left_bytes -= block.size_bytes
        if left_bytes:
            return 0
        for block in gone:
            self.blocks.remove(block)
            self._by_address[block.address].remove(block)
        return size_bytes

    def freed_elsewhere(self, size_bytes: int, time_ns: int) -> int:
        """A thread that no profiler sees (a backend's own) freed this much; its size tells which block it was.

        Returns the bytes of the block that is taken for it; 0 where none fits, and they stay unexplained.
        """
        for block in reversed(self.blocks):
            if (
                block.size_bytes == size_bytes
                and block.death_ns is None
                and block.birth_ns < time_ns
                and not block.categories & {"parameter", "gradient", "optimizer_state", "input", "other"}
            ):
                block.death_ns = time_ns
                return size_bytes
        return 0

    def sight(self, address: int, time_ns: int, size_bytes: int, dtype: str, shape: str) -> None:
        """A storage that the step used; if the allocator never saw its birth, it was there before."""
        block = self.at(address, time_ns)
        lived = self._by_address.get(address)
        if block is None and not (lived and lived[0].birth_ns <= time_ns):
            size_bytes = self._given_bytes.get(address, size_bytes)
            block = self._add(address, size_bytes, self._start_ns, _BASELINE, "")
        if block is not None and not block.dtype:
            block.dtype, block.shape = dtype, shape


def make_account(
    *,
    residents: Iterable[Resident],
    given_bytes: Mapping[int, int] = MappingProxyType({}),
    events: Sequence[AllocatorEvent],
    log: LabelLog,
    final: Iterable[Named],
    start_ns: int,
    end_ns: int,
    start_allocated_bytes: int | None,
    offset_ns: int,
    device: str,
) -> Account:
    """The rows of a traced step.

    `offset_ns` turns the layers' wall clock into the journal's monotonic clock. `final` names storages
    as they are at the end of the step; `start_allocated_bytes` is the allocator's total at its start.
    """

    ledger = Ledger(residents, given_bytes, start_ns)
    ledger.play(events, sorted(log.places, key=lambda entry: entry[0]))
    saved_blocks = _apply_log(ledger, log, final)
    residuals, peak_bytes, peak_reserved_bytes = _residuals(
        ledger, events, start_allocated_bytes, start_ns, offset_ns
    )

    def seconds(time_ns: int | None) -> float | None:
        return None if time_ns is None else (time_ns + offset_ns) / 1e9

    storages = []
    for number, block in enumerate(sorted(ledger.blocks, key=lambda b: b.birth_ns)):
        block.number = number
        storages.append(_storage_row(block, seconds, device))

    def storage_at(address: int, time_ns: int) -> int | None:
        block = ledger.at(address, time_ns)
        return None if block is None else block.number

    saved = [
        Saved(
            storage_id=block.number,
            module=row.place.module,
            unit=row.place.unit,
            micro_batch=row.place.micro_batch,
            size_bytes=row.size_bytes,
            shape=row.shape,
            saved_s=(row.saved_ns + offset_ns) / 1e9,
            unpacked_s=seconds(row.unpacked_ns),
            released_s=seconds(row.released_ns if row.released_ns and row.released_ns <= end_ns else None),
            operator=log.operator_of_node.get(row.node_number or 0, ""),
            needs_gradient=row.needs_gradient,
            copy_of=None if row.copy_of is None else storage_at(*row.copy_of),
            original_bytes=row.original_bytes,
        )
        for row, block in saved_blocks
    ]

    return Account(storages, saved, residuals, peak_bytes, peak_reserved_bytes, storage_at)


def _apply_log(ledger: Ledger, log: LabelLog, final: Iterable[Named]) -> list[tuple[SavedTensor, _Block]]:
    """All that the labels know of the blocks; what autograd saved, beside the block that it is in."""
    for address, sighting in log.sightings.items():
        ledger.sight(address, sighting.time_ns, sighting.size_bytes, sighting.dtype, sighting.shape)
    for call in log.calls:
        _apply_call(ledger, call)
    saved_blocks = _apply_saved(ledger, log.saved)
    for held in log.held:
        block = ledger.at(held.address, held.time_ns)
        if block is not None:
            block.last_held_ns = max(held.time_ns, block.last_held_ns or held.time_ns)
    for named in (*log.named, *final):
        block = ledger.at(named.address, named.time_ns)
        if block is not None:
            block.categories.add(named.category)
            block.unit = named.unit or block.unit
    _apply_positions(ledger, log)
    _name_operators(ledger, log.calls)
    return saved_blocks


def _apply_call(ledger: Ledger, call: OperatorCall) -> None:
    for address, dtype, shape in call.outputs:
        block = ledger.at(address, call.end_ns)
        if block is not None and block.birth_ns >= call.start_ns - _CLOCK_SLACK_NS:
            block.dtype, block.shape, block.is_result = dtype, shape, True
            block.place, block.operator = call.place, call.name
            block.last_use_ns = block.last_use_ns or call.end_ns
            if call.place.phase == "forward":
                block.last_forward_use_ns = block.last_forward_use_ns or call.end_ns
    for address in call.inputs:
        block = ledger.at(address, call.start_ns)
        if block is not None:
            block.last_use_ns = call.end_ns
            if call.place.phase in ("forward", "outside"):
                block.last_forward_use_ns = call.end_ns


def _apply_saved(ledger: Ledger, rows: Iterable[SavedTensor]) -> list[tuple[SavedTensor, _Block]]:
    found = []
    for row in rows:
        block = ledger.at(row.address, row.saved_ns)
        if block is not None:
            found.append((row, block))
            block.categories.add("activation")
    return found


def _apply_positions(ledger: Ledger, log: LabelLog) -> None:
    """What follows from where in the step a block was born, and how long it lived."""
    for block in ledger.blocks:
        if block.place.phase == "outside" and _alive_at_any(block, log.forward_starts_ns):
            block.categories.add("input")
        elif block.place.phase == "recompute" and _alive_at_any(block, log.recompute_ends_ns):
            block.categories.add("activation")


def _name_operators(ledger: Ledger, calls: Sequence[OperatorCall]) -> None:
    """What was born between two operators belongs to the one that it was made for, what was born in one to that one.

    `x / 8` makes a tensor of the number before the division is called.
    """
    calls = sorted(calls, key=lambda call: call.start_ns)
    starts = [call.start_ns for call in calls]
    for block in ledger.blocks:
        if block.operator or block.place.phase == "baseline":
            continue
        position = bisect_right(starts, block.birth_ns)
        if position and block.birth_ns <= calls[position - 1].end_ns:
            block.operator = calls[position - 1].name
            continue
        user = calls[position] if position < len(calls) else None
        if user is not None and (block.death_ns is None or block.death_ns >= user.start_ns):
            block.operator = user.name
        else:
            block.operator = _NO_OPERATOR


def _alive_at_any(block: _Block, times_ns: Sequence[int]) -> bool:
    """Whether the block was alive at the first of these moments after its birth."""
    position = bisect_right(times_ns, block.birth_ns)
    return position < len(times_ns) and (block.death_ns is None or block.death_ns > times_ns[position])


def _storage_row(block: _Block, seconds: Callable[[int | None], float | None], device: str) -> Storage:
    category = next((name for name in _PRIORITY if name in block.categories), None)
    if category is None:
        category = "other" if block.place.phase == "baseline" else "temporary"
    if category == "activation" and block.place.phase == "baseline":
        category = "other"  # saved by autograd, but it was there before and stays
    operator = block.operator
    if not block.is_result and operator not in ("", _NO_OPERATOR) and category == "temporary":
        operator = f"inside {operator}"
    return Storage(
        storage_id=block.number,
        birth_s=seconds(block.birth_ns) or 0.0,
        death_s=seconds(block.death_ns),
        size_bytes=block.size_bytes,
        category=category,
        dtype=block.dtype,
        shape=block.shape,
        module=block.place.module or block.unit or "",
        unit=block.unit if block.unit is not None else block.place.unit,
        phase=block.place.phase,
        micro_batch=block.place.micro_batch,
        operator=operator,
        device=device,
        last_use_s=seconds(block.last_use_ns),
        last_forward_use_s=seconds(block.last_forward_use_ns),
        address=None if device == "cpu" else block.address,
        last_held_s=seconds(block.last_held_ns),
    )


def _residuals(
    ledger: Ledger,
    events: Sequence[AllocatorEvent],
    start_allocated_bytes: int | None,
    start_ns: int,
    offset_ns: int,
) -> tuple[list[Residual], int | None, int | None]:
    """Allocator's total minus what the blocks explain, wherever it changes; and the allocator's peaks."""
    if start_allocated_bytes is None:
        return [], None, None
    explained = sum(block.size_bytes for block in ledger.blocks if block.place.phase == "baseline")
    if explained > start_allocated_bytes:
        explained -= ledger.gone_before(explained - start_allocated_bytes)
    rows = [Residual((start_ns + offset_ns) / 1e9, start_allocated_bytes - explained)]
    peak_bytes, peak_reserved_bytes = start_allocated_bytes, 0
    for event in events:
        explained += event.delta_bytes
        unexplained = event.allocated_bytes - explained
        if unexplained < rows[-1].unexplained_bytes:
            freed = ledger.freed_elsewhere(rows[-1].unexplained_bytes - unexplained, event.time_ns)
            explained -= freed
            unexplained += freed
        if unexplained != rows[-1].unexplained_bytes:
            rows.append(Residual((event.time_ns + offset_ns) / 1e9, unexplained))
        peak_bytes = max(peak_bytes, event.allocated_bytes)
        peak_reserved_bytes = max(peak_reserved_bytes, event.reserved_bytes)
    return rows, peak_bytes, peak_reserved_bytes or None
