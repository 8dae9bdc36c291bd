"""Whether torch.compile has been at work in this process: capture and engines ask it, and neither needs torch for it."""

from __future__ import annotations

import sys


def has_compiled() -> bool:
    """Whether Dynamo has compiled anything. From then on its guards look at modules, their hooks and their parameters
    without asking them, so these stay as they were when it looked."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and bool(dynamo.counters["stats"])
