"""Joining the two layers: the allocator's events say when and how much, the labels say what.

Pure Python, no torch. What only the allocator saw is a temporary inside the operator that ran;
bytes that were there before the step and that nobody knows are "unexplained".
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from memadvisor.capture.label_log import LabelLog, Named, OperatorCall, SavedTensor
from memadvisor.capture.ledger import CLOCK_SLACK_NS, Block, Ledger, Resident
from memadvisor.capture.truth import AllocatorEvent
from memadvisor.run.records import Residual, Saved, Storage

# The first category wins where several people named one storage.
_PRIORITY = (
    "parameter",
    "gradient",
    "optimizer_state",
    "communication",
    "weight_copy",
    "input",
    "activation",
    "other",
    "temporary",
)
_NO_OPERATOR = "(no operator)"
_OF_STATES = {"parameter", "gradient", "optimizer_state", "weight_copy"}


@dataclass(frozen=True, slots=True)
class Account:
    """The rows of one traced step; times in nanoseconds have become seconds by `to_s`."""

    storages: list[Storage]
    saved: list[Saved]
    residuals: list[Residual]
    peak_allocated_bytes: int | None
    peak_reserved_bytes: int | None
    storage_at: Callable[[int, int], int | None]  # id of what lived at an address at a time in nanoseconds
    given_at: Callable[[int, int], int | None]  # of what was there before it, for sure


def make_account(
    *,
    residents: Iterable[Resident],
    given_bytes: Mapping[int, int] = MappingProxyType({}),
    events: Sequence[AllocatorEvent],
    log: LabelLog,
    given: Iterable[tuple[int, int]] = (),
    final: Iterable[Named],
    alive: Callable[[], Iterable[Resident]] = tuple,
    start_ns: int,
    end_ns: int,
    start_allocated_bytes: int | None,
    offset_ns: int,
    device: str,
    buckets: Sequence[Sequence[int]] = (),
) -> Account:
    """The rows of a traced step.

    `offset_ns` turns the layers' wall clock into the journal's monotonic clock. `given`, (address, time), is what the
    script called models with; `final` names storages as they are at the end of the step, and `alive` finds all that are
    there then: it is asked where something is unexplained. `start_allocated_bytes` is the allocator's total at the step's
    start, `buckets` the sizes of those that DDP holds, in groups that are there as a whole or not at all.
    """

    ledger = Ledger(residents, given_bytes, start_ns)
    ledger.play(events, sorted(log.places, key=lambda entry: entry[0]))
    saved_blocks = _apply_log(ledger, log, final)
    _apply_given(ledger, given)
    for sizes in buckets:
        ledger.take_buckets(sizes, start_allocated_bytes)
    residuals, peak_bytes, peak_reserved_bytes = _residuals(ledger, events, start_allocated_bytes, start_ns)
    if residuals and residuals[-1][1] > 0:
        ledger.made_elsewhere(alive(), residuals)

    def seconds(time_ns: int | None) -> float | None:
        return None if time_ns is None else (time_ns + offset_ns) / 1e9

    storages = []
    for number, block in enumerate(sorted(ledger.blocks, key=lambda b: b.birth_ns)):
        block.number = number
        storages.append(_storage_row(block, seconds, device))

    def storage_at(address: int, time_ns: int) -> int | None:
        block = ledger.at(address, time_ns)
        return None if block is None else block.number

    def given_at(address: int, time_ns: int) -> int | None:
        block = ledger.at(address, time_ns, slack_ns=0)
        return storage_at(address, time_ns) if block is None else block.number

    saved = [_saved_row(row, block, log, storage_at, seconds, end_ns) for row, block in saved_blocks]
    rows = [Residual((time_ns + offset_ns) / 1e9, size_bytes) for time_ns, size_bytes in residuals]
    return Account(storages, saved, rows, peak_bytes, peak_reserved_bytes, storage_at, given_at)


def _saved_row(
    row: SavedTensor,
    block: Block,
    log: LabelLog,
    storage_at: Callable[[int, int], int | None],
    seconds: Callable[[int | None], float | None],
    end_ns: int,
) -> Saved:
    return Saved(
        storage_id=block.number,
        module=row.place.module,
        unit=row.place.unit,
        micro_batch=row.place.micro_batch,
        size_bytes=row.size_bytes,
        shape=row.shape,
        saved_s=seconds(row.saved_ns) or 0.0,
        unpacked_s=seconds(row.unpacked_ns),
        released_s=seconds(row.released_ns if row.released_ns and row.released_ns <= end_ns else None),
        operator=log.operator_of_node.get(row.node_number or 0, ""),
        needs_gradient=row.needs_gradient,
        copy_of=None if row.copy_of is None else storage_at(*row.copy_of),
        original_bytes=row.original_bytes,
        node=row.node_number,
    )


def _apply_log(ledger: Ledger, log: LabelLog, final: Iterable[Named]) -> list[tuple[SavedTensor, Block]]:
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
    for time_ns, address in log.accumulated:
        block = ledger.at(address, time_ns)
        if block is not None and block.accumulated_ns is None:
            block.accumulated_ns = time_ns
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
        if block is not None and block.birth_ns >= call.start_ns - CLOCK_SLACK_NS:
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


def _apply_saved(ledger: Ledger, rows: Iterable[SavedTensor]) -> list[tuple[SavedTensor, Block]]:
    found = []
    for row in rows:
        block = ledger.at(row.address, row.saved_ns)
        if block is not None:
            found.append((row, block))
            block.categories.add("activation")
    return found


def _apply_positions(ledger: Ledger, log: LabelLog) -> None:
    """What follows from where in the step a block was born, and how long it lived."""
    no_batch = _made_of_states(ledger, log.calls) | _made_for_autograd(ledger, log.calls)
    for block in ledger.blocks:
        if block.place.phase == "outside" and _alive_at_any(block, log.forward_starts_ns):
            if block not in no_batch:
                block.categories.add("input")
        elif block.place.phase == "recompute" and _alive_at_any(block, log.recompute_ends_ns):
            block.categories.add("activation")


def _made_of_states(ledger: Ledger, calls: Iterable[OperatorCall]) -> set[Block]:
    """What was made outside of parameters, gradients and optimizer state alone: the weights that a script keeps aside
    while it looks at the loss beside them (sharpness-aware updates) are no batch."""
    made: set[Block] = set()
    for call in calls:
        if call.place.phase == "outside" and call.inputs:
            sources = [ledger.at(address, call.start_ns) for address in call.inputs]
            if all(each is not None and (each in made or each.categories & _OF_STATES) for each in sources):
                results = (ledger.at(address, call.end_ns) for address, *_ in call.outputs)
                made.update(block for block in results if block is not None)
    return made


def _made_for_autograd(ledger: Ledger, calls: Iterable[OperatorCall]) -> set[Block]:
    """What the script worked out outside any module that autograd goes back through: between the parts of a model that it
    calls itself (a latent that a decoder is given), these are the model's results, no batch. Before such an operator
    runs, autograd has made a node, and numbers go up with each."""
    made: set[Block] = set()
    last: int | None = None
    for call in calls:
        if call.place.phase == "backward":
            last = None  # it may have made some itself, of what ran again or of a derivative
        elif call.node is not None:
            if call.place.phase == "outside" and last is not None and call.node > last:
                results = (ledger.at(address, call.end_ns) for address, *_ in call.outputs)
                made.update(block for block in results if block is not None)
            last = call.node
    return made


def _apply_given(ledger: Ledger, given: Iterable[tuple[int, int]]) -> None:
    """What models were called with and nobody else has named: a batch that was there before the step."""
    for address, time_ns in given:
        block = ledger.at(address, time_ns)
        if (
            block is not None
            and block.place.phase == "baseline"
            and block.categories <= {"other", "activation"}
        ):
            block.categories.add("input")


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


def _alive_at_any(block: Block, times_ns: Sequence[int]) -> bool:
    """Whether the block was alive at the first of these moments after its birth."""
    position = bisect_right(times_ns, block.birth_ns)
    return position < len(times_ns) and (block.death_ns is None or block.death_ns > times_ns[position])


def _storage_row(block: Block, seconds: Callable[[int | None], float | None], device: str) -> Storage:
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
        module=block.place.module or block.unit or block.holder,
        unit=block.unit if block.unit is not None else block.place.unit,
        phase=block.place.phase,
        micro_batch=block.place.micro_batch,
        operator=operator,
        device=device,
        last_use_s=seconds(block.last_use_ns),
        last_forward_use_s=seconds(block.last_forward_use_ns),
        address=None if device == "cpu" else block.address,
        last_held_s=seconds(block.last_held_ns),
        accumulated_s=seconds(block.accumulated_ns),
    )


def _residuals(
    ledger: Ledger, events: Sequence[AllocatorEvent], start_allocated_bytes: int | None, start_ns: int
) -> tuple[list[tuple[int, int]], int | None, int | None]:
    """Allocator's total minus what the blocks explain, from when on; and the allocator's peaks."""
    if start_allocated_bytes is None:
        return [], None, None
    explained = sum(block.size_bytes for block in ledger.blocks if block.place.phase == "baseline")
    if explained > start_allocated_bytes:
        explained -= ledger.gone_before(explained - start_allocated_bytes)
    last = start_allocated_bytes - explained
    rows = [(start_ns, last)]
    peak_bytes, peak_reserved_bytes = start_allocated_bytes, 0
    for event in events:
        explained += event.delta_bytes
        unexplained = event.allocated_bytes - explained
        if unexplained < last:
            freed = ledger.freed_elsewhere(last - unexplained, event.time_ns, -unexplained)
            explained -= freed
            unexplained += freed
        if unexplained != last:
            rows.append((event.time_ns, last := unexplained))
        peak_bytes = max(peak_bytes, event.allocated_bytes)
        peak_reserved_bytes = max(peak_reserved_bytes, event.reserved_bytes)
    return rows, peak_bytes, peak_reserved_bytes or None
