"""All blocks of memory of a traced step, found by address and time: births, deaths, and deaths that nobody reported.

Pure Python, no torch.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from memadvisor.capture.ddp_buckets import name_buckets
from memadvisor.capture.label_log import Place
from memadvisor.capture.truth import AllocatorEvent

# The allocator's and Python's clocks agree to far less than this.
CLOCK_SLACK_NS = 20_000
BASELINE = Place("baseline", "", "", 0)
_OUTSIDE = Place("outside", "", "", 0)
_OTHER_THREAD = "(another thread)"
_OF_THE_SCRIPT = {"parameter", "gradient", "optimizer_state", "input", "weight_copy", "other"}


@dataclass(frozen=True, slots=True)
class Resident:
    """A storage that was alive when the step began, or ended, and what the census knows of it."""

    address: int
    size_bytes: int
    category: str
    unit: str
    dtype: str
    shape: str
    operator: str = ""  # what it is for, where no tensor says so
    holder: str = ""  # what module has it, where it is of no model of the training


@dataclass(slots=True, eq=False)
class Block:
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
    holder: str = ""
    is_result: bool = False  # an operator returned it; otherwise it never left the operator
    last_use_ns: int | None = None
    last_forward_use_ns: int | None = None
    last_held_ns: int | None = None
    accumulated_ns: int | None = None
    number: int = -1


_birth_ns = attrgetter("birth_ns")


def _is_the_scripts(block: Block) -> bool:
    """No backend's thread is the last to let go of it. What is sent may be called input, too: it is there as a forward begins."""
    unsent = {"input"} if "communication" in block.categories else set()
    return bool(block.categories & (_OF_THE_SCRIPT - unsent))


class Ledger:
    """All blocks of a step, found by address and time.

    `given_bytes`: of what was alive when the step began, what the allocator gave for it, where it gives more than it is
    asked for.
    """

    def __init__(self, residents: Iterable[Resident], given_bytes: Mapping[int, int], start_ns: int) -> None:
        self.blocks: list[Block] = []
        self._given_bytes = given_bytes
        self._by_address: dict[int, list[Block]] = {}  # in order of birth
        self._start_ns = start_ns
        for resident in residents:
            self._add_resident(resident, start_ns, BASELINE, resident.operator)

    def _add_resident(self, resident: Resident, birth_ns: int, place: Place, operator: str) -> None:
        block = self._add(resident.address, resident.size_bytes, birth_ns, place, operator)
        block.categories.add(resident.category)
        block.unit, block.dtype, block.shape = resident.unit, resident.dtype, resident.shape
        block.holder = resident.holder

    def _add(self, address: int, size_bytes: int, birth_ns: int, place: Place, operator: str) -> Block:
        block = Block(address, size_bytes, birth_ns, None, place, operator)
        self.blocks.append(block)
        if place is BASELINE:
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
                place = places[position][1] if position >= 0 else _OUTSIDE
                self._add(event.address, event.delta_bytes, event.time_ns, place, event.operator)
                continue
            living = self._living(event.address)
            if living is not None:
                living.death_ns = event.time_ns
            else:  # it was there before the step, and nobody knew it
                block = self._add(event.address, -event.delta_bytes, self._start_ns, BASELINE, "")
                block.death_ns = event.time_ns

    def at(self, address: int, time_ns: int, slack_ns: int = CLOCK_SLACK_NS) -> Block | None:
        """The block that lived at this address at this time; by both clocks' word with no slack."""
        lived = self._by_address.get(address)
        if lived is None:
            return None
        position = bisect_right(lived, time_ns + slack_ns, key=_birth_ns)
        if not position:
            return None
        block = lived[position - 1]
        alive = block.death_ns is None or block.death_ns >= time_ns - slack_ns
        return block if alive else None

    def gone_before(self, size_bytes: int) -> int:
        """Such a thread as `freed_elsewhere` tells of freed this much between the census and the profiler's start.

        Returns the bytes of the residents that are taken for it, which are no part of the step; else 0.
        """
        gone = self._idle_from(self._start_ns, size_bytes)
        for block in gone:
            self.blocks.remove(block)
            self._by_address[block.address].remove(block)
        return sum(block.size_bytes for block in gone)

    def _idle_from(self, time_ns: int, size_bytes: int) -> list[Block]:
        """Residents that nobody has named, and that the step neither uses from then on nor frees, if sizes add up to this."""
        idle = (
            block
            for block in self.blocks
            if block.categories == {"other"}
            and block.death_ns is None
            and (block.last_use_ns is None or block.last_use_ns < time_ns)
        )
        found, left_bytes = [], size_bytes
        for block in sorted(idle, key=lambda block: -block.size_bytes):
            if block.size_bytes <= left_bytes:
                found.append(block)
                left_bytes -= block.size_bytes
        return [] if left_bytes else found

    def take_buckets(self, sizes: Sequence[int], allocated_bytes: int | None) -> None:
        """Name DDP's buckets among what was there before the step, and add those that the step did not touch."""
        there = [block for block in self.blocks if block.place.phase == "baseline"]
        unexplained_bytes = (allocated_bytes or 0) - sum(block.size_bytes for block in there)
        for size_bytes in name_buckets(there, sizes, unexplained_bytes):
            address = -1 - len(self.blocks)  # which is not known
            block = self._add(address, size_bytes, self._start_ns, BASELINE, "")
            block.categories.add("communication")

    def freed_elsewhere(self, size_bytes: int, time_ns: int, too_many_bytes: int) -> int:
        """A thread that no profiler sees (a backend's own) freed this much; its size tells which block it was.

        Where the blocks are by now larger than all that the allocator has given, by `too_many_bytes`, it may be idle
        residents that nobody has named: what the script sent before the step, and the backend held a while longer.
        Returns the bytes of what is taken for it; 0 where nothing fits, and they stay unexplained.
        """
        for block in reversed(self.blocks):
            if (
                block.size_bytes == size_bytes
                and block.death_ns is None
                and block.birth_ns < time_ns
                and not _is_the_scripts(block)
            ):
                block.death_ns = time_ns
                return size_bytes
        gone = self._idle_from(time_ns, too_many_bytes) if too_many_bytes > 0 else []
        for block in gone:
            block.death_ns = time_ns
        return sum(block.size_bytes for block in gone)

    def made_elsewhere(self, alive: Iterable[Resident], residuals: list[tuple[int, int]]) -> None:
        """Name what another thread made in the step and is `alive` at its end: `residuals`, the bytes that are unexplained
        from when on, shrink by it from where on they held as much to the end."""
        strangers = [each for each in alive if self._living(each.address) is None]
        for each in sorted(strangers, key=lambda each: -each.size_bytes):
            position = len(residuals)
            while position and residuals[position - 1][1] >= each.size_bytes:
                position -= 1
            if position == len(residuals):
                continue  # newer than the step, or none of what is unexplained
            place = _OUTSIDE if position else BASELINE
            self._add_resident(each, residuals[position][0], place, _OTHER_THREAD)
            residuals[position:] = [(time, left - each.size_bytes) for time, left in residuals[position:]]

    def _living(self, address: int) -> Block | None:
        """What lives there after all that has been played."""
        lived = self._by_address.get(address)
        return lived[-1] if lived and lived[-1].death_ns is None else None

    def sight(self, address: int, time_ns: int, size_bytes: int, dtype: str, shape: str) -> None:
        """A storage that the step used; if the allocator never saw its birth, it was there before."""
        block = self.at(address, time_ns)
        lived = self._by_address.get(address)
        if block is None and not (lived and lived[0].birth_ns <= time_ns):
            size_bytes = self._given_bytes.get(address, size_bytes)
            block = self._add(address, size_bytes, self._start_ns, BASELINE, "")
        if block is not None and not block.dtype:
            block.dtype, block.shape = dtype, shape
