"""Products of float32 on a card that multiplies narrower numbers several times as fast.

How fast stands in the data sheet (memadvisor/hardware); how much of a step products take on a GPU is not recorded, so
nothing is said of how much shorter it would get: only how long products take at least.
"""

from __future__ import annotations

from memadvisor.analyzers.script_changes.change import LESS_PRECISION, Facts, ScriptChange
from memadvisor.units import format_fraction, format_seconds

_LEAST_SHARE = (
    0.1  # of a step that products take at float32's peak: below that, they are not what it waits for
)
_NARROW = ("bfloat16", "tf32")


def narrow_products(facts: Facts) -> ScriptChange | None:
    used, hardware, time = facts.utilization, facts.hardware, facts.time
    if used is None or hardware is None or time is None or not time.median_s:
        return None
    flops, peak = used.executed_flops_per_step, used.peak_flops_per_s
    if not facts.rank.process.device.startswith("cuda") or used.dtype != "float32" or not flops or not peak:
        return None
    least_s = flops / peak
    faster = {
        name: rate
        for name in _NARROW
        if (rate := hardware.peak_flops_per_s.get(name)) is not None and rate > 2 * peak
    }
    if not faster or least_s < _LEAST_SHARE * time.median_s:
        return None
    others = " or ".join(f"{format_seconds(flops / rate)} in {name}" for name, rate in faster.items())
    ways = ["`with torch.autocast('cuda', dtype=torch.bfloat16):` around forward and loss"] * (
        "bfloat16" in faster
    )
    ways += ["`torch.set_float32_matmul_precision('high')` (tf32)"] * ("tf32" in faster)
    return ScriptChange(
        kind="narrow_products",
        seen=f"Products run in float32, and take at least {format_seconds(least_s)} of a step "
        f"({format_fraction(least_s / time.median_s)}) at the peak of {hardware.name}; at its others at least {others} "
        f"({hardware.kind}).",
        change=f"{', or '.join(ways)}.",
        effect=LESS_PRECISION,
    )
