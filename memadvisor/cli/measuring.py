"""What a recorder has measured that knows no engine: engines are imported once the script has imported torch."""

from __future__ import annotations


def measure_second_runs() -> tuple[float, float, float]:
    """What recomputation takes here beside a forward: seconds of a call, of each tensor that it saves, and of each
    operator where outputs are kept."""
    from memadvisor.engines import second_run_cost

    return second_run_cost.measure_second_runs()
