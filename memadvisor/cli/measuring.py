"""What a recorder has measured that knows no engine: engines are imported once the script has imported torch."""

from __future__ import annotations

from typing import Any


def measure_engines() -> tuple[float, ...]:
    """What recomputation takes here beside a forward: seconds of a call, of each tensor that it saves, and of each
    operator where outputs are kept; of rounding an activation and each of its elements, and of bringing it back."""
    from memadvisor.engines.activations import rounding_cost, second_run_cost

    return *second_run_cost.measure_second_runs(), *rounding_cost.measure_rounding()


def why_not_shared_out(optimizer: Any) -> str | None:
    """Why ZeRO stages 1 to 3 would refuse it, in a sentence; None where nothing is known against it."""
    from memadvisor.engines.updates import independence

    return independence.why_not_shared_out(optimizer)
