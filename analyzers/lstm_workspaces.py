"""What an LSTM's layer keeps on a CPU for its backward, as bytes without a shape, with fewer samples.

oneDNN lays it out as six arrays (src/cpu/rnn/rnn_utils.cpp, `set_workspace_sizes` and `set_offsets`), each of whole pages,
whose rows it fills up to whole lines of the cache. Where that does not make the recorded bytes, nothing is said.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Set
from fractions import Fraction
from operator import attrgetter

from memadvisor.analyzers.inner_workspaces import FLOAT_BYTES
from memadvisor.analyzers.shapes import given_and_weight
from memadvisor.run.run import RankRun

LSTM = "aten::mkldnn_rnn_layer"
_GATES = 4
_PAGE_BYTES = 4096
# In numbers: of a line of the cache, and how far apart rows share its sets.
_LINE, _CONFLICT = 16, 256


def workspace_bytes(length: int, num_samples: int, given: int, width: int) -> int:
    """Of one layer in one direction: gates, states that layers hand on, states and cells that steps hand on, and the products
    of the gates. Of states oneDNN has two layers' and a step before the first."""
    states = 2 * (length + 1) * num_samples
    arrays = (
        length * num_samples * _row(_GATES * width),
        *(states * _row(max(given, width)),) * 3,
        *(states * width,) * 2,
        length * num_samples * _row(width),
    )
    return sum(-(-count * FLOAT_BYTES // _PAGE_BYTES) * _PAGE_BYTES for count in arrays)


def lstm_workspaces(rank: RankRun, divisor: int | Fraction, sizes: Set[int]) -> dict[int, int]:
    """New sizes, by storage, with micro-batches of 1/divisor of their size. `sizes`: which dimensions shrink with them."""
    rows = sorted((r for r in rank.storages if r.operator == LSTM), key=attrgetter("birth_s"))
    births = [row.birth_s for row in rows]
    found: dict[int, int] = {}
    for operator in rank.operators:
        shapes = given_and_weight(operator) if operator.name == LSTM else None
        if shapes is None or len(shapes[0]) != 3 or shapes[0][1] not in sizes or shapes[0][1] % divisor:
            continue
        (length, num_samples, given), (gates, *_) = shapes
        known_bytes = workspace_bytes(length, num_samples, given, gates // _GATES)
        for row in rows[bisect_left(births, operator.start_s) : bisect_right(births, operator.end_s)]:
            if row.dtype == "uint8" and row.size_bytes == known_bytes:
                part = int(num_samples / divisor)
                found[row.storage_id] = workspace_bytes(length, part, given, gates // _GATES)
    return found


def _row(width: int) -> int:
    """Numbers from one row to the next."""
    filled = -(-width // _LINE) * _LINE
    return filled + (0 if filled % _CONFLICT else _LINE)
