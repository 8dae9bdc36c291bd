"""Buffers of the script that a forward changes, of which an engine keeps copies where that forward runs again.

A run does not say what is a buffer: of what was there before the step and is no parameter, state or input, those storages
are taken that an operator in place writes into, and those that a batch norm saves, which changes its running statistics
without telling (an engine copies those of all norms). What a compiler has made of a block tells of no operator in it: there
they are taken to be as wide as the norm's weight, in float32, beside its count of batches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from memadvisor.run.records import Operator, Saved
from memadvisor.run.run import RankRun


class Copies:
    """Of a rank's traced step."""

    def __init__(self, rank: RankRun) -> None:
        device = rank.process.device
        self._sizes = {
            row.storage_id: row.size_bytes
            for row in rank.storages
            if row.phase == "baseline" and row.category in ("other", "weight_copy") and row.device == device
        }

    def __call__(self, operators: Iterable[Operator], saved: Iterable[Saved]) -> tuple[int, int]:
        """Bytes of those that these operators of a forward change, and of those among them that autograd saves."""
        kept = {row.storage_id for row in saved if _is_of_norm(row)}
        changed = {operator.changes for operator in operators if operator.changes is not None}
        return self._bytes(kept | changed), self._bytes(kept)

    def saved(self, rows: Iterable[Saved]) -> Iterator[tuple[int, Saved]]:
        """Of these, those that autograd saves, with their bytes."""
        for row in rows:
            if _is_of_norm(row) and row.storage_id in self._sizes:
                yield self._sizes[row.storage_id], row

    def _bytes(self, storages: Iterable[int]) -> int:
        return sum(self._sizes.get(storage_id, 0) for storage_id in storages)


_NORMS = {*(f"BatchNorm{n}d" for n in (1, 2, 3)), "SyncBatchNorm"}
_STATISTICS_BYTES = 2 * 4  # of each channel
_COUNT_BYTES = 8


def compiled_statistics(rank: RankRun) -> dict[str, int]:
    """Bytes of batch norms' running statistics by unit, inside of what a compiler has made."""
    channels = {parameter.name: parameter.num_elements for parameter in rank.parameters}
    found: Counter[str] = Counter()
    for module in rank.modules:
        num_channels = channels.get(f"{module.name}.weight")
        if module.is_own_forward and module.type_name in _NORMS and num_channels is not None:
            found[module.unit] += _STATISTICS_BYTES * num_channels + _COUNT_BYTES
    return found


def _is_of_norm(row: Saved) -> bool:
    return "batch_norm" in (row.operator or "")
