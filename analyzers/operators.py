"""What each operator of the traced step cost: calls, time, FLOPs and bytes, by operator and by module.

The recorder sees an operator that calls others as one row, and does not see those it calls; so rows never hold
each other, and every sum counts a moment, a FLOP and a byte once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from memadvisor.run.records import Operator
from memadvisor.run.run import RankRun


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorTotal:
    """All calls of one operator, or all that ran in one module (the innermost one), in the traced step.

    `time_fraction` is of all operators' time. Bytes are what must be read and written (capture/traffic.py);
    None where a call did not tell, as collectives do not.
    """

    name: str
    num_calls: int
    time_s: float
    time_fraction: float | None
    executed_flops: int
    model_flops: int
    read_bytes: int | None
    written_bytes: int | None

    @property
    def moved_bytes(self) -> int | None:
        if self.read_bytes is None or self.written_bytes is None:
            return None
        return self.read_bytes + self.written_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorTable:
    """Totals, longest first. `time_is_launch`: on an accelerator the times are those of launching, for the device
    runs operators later; they say nothing about what it takes."""

    time_s: float
    time_is_launch: bool
    by_operator: tuple[OperatorTotal, ...]
    by_module: tuple[OperatorTotal, ...]


def operator_table(rank: RankRun) -> OperatorTable | None:
    """None when no operators were recorded. Evaluation passes inside the traced step are in it."""
    if rank.traced_step is None or not rank.operators:
        return None
    time_s = sum(row.end_s - row.start_s for row in rank.operators)
    return OperatorTable(
        time_s=time_s,
        time_is_launch=rank.process.device != "cpu",
        by_operator=_totals(rank.operators, lambda row: row.name, time_s),
        by_module=_totals(rank.operators, lambda row: row.module, time_s),
    )


def _totals(
    rows: Iterable[Operator], key: Callable[[Operator], str], all_s: float
) -> tuple[OperatorTotal, ...]:
    groups: dict[str, list[Operator]] = defaultdict(list)
    for row in rows:
        groups[key(row)].append(row)
    totals = (_total(name, group, all_s) for name, group in groups.items())
    return tuple(sorted(totals, key=lambda total: -total.time_s))


def _total(name: str, rows: list[Operator], all_s: float) -> OperatorTotal:
    time_s = sum(row.end_s - row.start_s for row in rows)
    return OperatorTotal(
        name=name,
        num_calls=len(rows),
        time_s=time_s,
        time_fraction=time_s / all_s if all_s > 0 else None,
        executed_flops=sum(row.executed_flops for row in rows),
        model_flops=sum(row.model_flops for row in rows),
        read_bytes=known_sum(row.read_bytes for row in rows),
        written_bytes=known_sum(row.written_bytes for row in rows),
    )


def known_sum(values: Iterable[int | None]) -> int | None:
    """None where one of them is not known."""
    total = 0
    for value in values:
        if value is None:
            return None
        total += value
    return total
