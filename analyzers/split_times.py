"""What the pieces of the step take with micro-batches of another size.

An operator's call takes as long however little it works on: in a forward Python, the module's calls and the graph that
autograd makes, in a backward autograd's engine. What is left of a piece's time goes with the samples. On a device that
runs behind the CPU these calls are hidden as long as it is busy, and all of the time goes with the samples: when it
begins to wait for them is not predicted.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from fractions import Fraction

from memadvisor.analyzers.placement import Stretch
from memadvisor.run.run import RankRun

# On common processors (docs/planning.md, "Splits of the micro-batch").
FORWARD_CALL_S = 1e-5
BACKWARD_CALL_S = 3e-6


def split_durations(
    rank: RankRun, pieces: Sequence[Stretch], durations: Sequence[float], divisor: int | Fraction
) -> list[float]:
    """Seconds of each piece with micro-batches of 1/divisor of their size; what belongs to none stays as it is."""
    if divisor == 1:
        return list(durations)
    starts = sorted(operator.start_s for operator in rank.operators)
    is_cpu = rank.process.device.startswith("cpu")
    found = []
    for piece, duration_s in zip(pieces, durations, strict=True):
        if piece.micro_batch is None:
            found.append(duration_s)
            continue
        num_calls = bisect_right(starts, piece.end_s) - bisect_left(starts, piece.start_s)
        call_s = FORWARD_CALL_S if piece.phase == "forward" else BACKWARD_CALL_S
        calls_s = min(duration_s, num_calls * call_s) if is_cpu else 0.0
        found.append(calls_s + (duration_s - calls_s) / float(divisor))
    return found
