"""Share of the hardware's peak arithmetic that training uses: MFU and HFU."""

from __future__ import annotations

from dataclasses import dataclass

from memadvisor.analyzers.step_time import StepTime

from memadvisor.hardware.hardware import Hardware
from memadvisor.run.run import RankRun


@dataclass(frozen=True, slots=True, kw_only=True)
class Utilization:
    """FLOPs of one step of one rank against what its device could do in that time, as fractions of 1.

    Convention "exact": MFU counts the FLOPs of the matrix products and convolutions that the model needs
    (causal attention as its T(T+1)/2 pairs, head in, embedding look-up out), HFU those that ran,
    recomputation too. Convention "palm": (6N + 12 L H Q T) FLOPs a token (PaLM, arXiv:2204.02311,
    appendix B), with N all parameters. FLOPs are the traced step's; the time is the steady steps' median.
    Fractions are None where the peak for `dtype`, the FLOPs or the step time is not known.
    """

    mfu: float | None
    hfu: float | None
    convention: str  # of mfu and hfu: "exact"
    mfu_palm: float | None
    model_flops_per_step: int | None
    executed_flops_per_step: int | None
    palm_flops_per_step: int | None
    step_time_s: float | None
    dtype: str | None  # in which the matrix products run: that of most of their output bytes
    peak_flops_per_s: float | None
    hardware_name: str | None
    hardware_kind: str | None  # "datasheet", "measured" or "given"


def utilization(rank: RankRun, time: StepTime | None, hardware: Hardware | None) -> Utilization:
    """MFU and HFU; what cannot be worked out is None."""
    raise NotImplementedError
