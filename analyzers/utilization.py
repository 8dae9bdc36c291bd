"""Share of the hardware's peak arithmetic that training uses: MFU and HFU."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

from memadvisor.analyzers.intervals import holds, union
from memadvisor.analyzers.step_time import StepTime
from memadvisor.hardware.hardware import Hardware
from memadvisor.run.run import RankRun

# Parts of the names of operators that are, or hold, matrix products.
_PRODUCTS = ("mm", "matmul", "linear", "conv", "attention", "rnn", "lstm", "gru", "einsum")


@dataclass(frozen=True, slots=True, kw_only=True)
class Utilization:
    """FLOPs of one step of one rank against what its device could do in that time, as fractions of 1.

    Convention "exact": MFU counts the FLOPs of the matrix products and convolutions that the model needs
    (causal attention as its T(T+1)/2 pairs, head in, embedding look-up out), HFU those that ran,
    recomputation too; evaluation passes count in neither. Convention "palm": (6N + 12 L H Q T) FLOPs a token (PaLM, arXiv:2204.02311,
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
    model_flops, executed_flops = _training_flops(rank)
    palm_flops = _palm_flops(rank)
    dtype = compute_dtype(rank)
    peak = hardware.peak_flops_per_s.get(dtype) if hardware is not None and dtype is not None else None
    step_time_s = time.median_s if time is not None else None

    def share(flops: int | None) -> float | None:
        if flops is None or not peak or not step_time_s:
            return None
        return flops / step_time_s / peak

    return Utilization(
        mfu=share(model_flops),
        hfu=share(executed_flops),
        convention="exact",
        mfu_palm=share(palm_flops),
        model_flops_per_step=model_flops,
        executed_flops_per_step=executed_flops,
        palm_flops_per_step=palm_flops,
        step_time_s=step_time_s,
        dtype=dtype,
        peak_flops_per_s=peak,
        hardware_name=None if hardware is None else hardware.name,
        hardware_kind=None if hardware is None else hardware.kind,
    )


def _training_flops(rank: RankRun) -> tuple[int | None, int | None]:
    """Needed and executed FLOPs of the traced step. None when no step was traced.

    What an optimizer multiplies (Muon's Newton-Schulz steps) is executed, but no need of the model.
    """
    step = rank.traced_step
    if step is None or not rank.operators:
        return None, None
    evaluations = union(
        (s.start_s, s.end_s) for s in rank.spans if s.step == step.index and s.kind == "evaluation"
    )
    training = [row for row in rank.operators if not holds(evaluations, row.start_s)]
    needed = sum(row.model_flops for row in training if row.phase != "optimizer")
    return needed, sum(row.executed_flops for row in training)


def compute_dtype(rank: RankRun) -> str | None:
    """The dtype that most output bytes of matrix products and convolutions have; else most parameters'.

    Under autocast the parameters are float32 and the products bfloat16: the products decide the peak.
    """
    products: Counter[str] = Counter()
    for storage in rank.storages:
        if _is_floating(storage.dtype) and any(word in storage.operator for word in _PRODUCTS):
            products[storage.dtype] += storage.size_bytes
    parameters: Counter[str] = Counter()
    for parameter in rank.parameters:
        parameters[parameter.dtype] += parameter.num_elements
    most = (products or parameters).most_common(1)
    return most[0][0] if most else None


def _palm_flops(rank: RankRun) -> int | None:
    """(6N + 12 L H Q T) times the tokens of the traced step; None for what is no plain transformer.

    L is the number of units that ran a fused attention, H Q the width that most dimensions of their
    weight matrices have, T the tokens of a sample.
    """
    step = rank.traced_step
    if step is None or not step.num_tokens or not step.num_samples:
        return None
    layers = {row.unit for row in rank.operators if "attention" in row.name and row.phase == "forward"}
    shapes = [dims for p in rank.parameters if p.unit in layers and len(dims := _dimensions(p.shape)) == 2]
    widths = Counter(width for dims in shapes for width in dims).most_common(1)
    if not widths or any(widths[0][0] not in dims for dims in shapes):
        return None
    num_parameters = sum(p.num_elements for p in rank.parameters if not p.tied_to)
    sequence = step.num_tokens / step.num_samples
    return round((6 * num_parameters + 12 * len(layers) * widths[0][0] * sequence) * step.num_tokens)


def _is_floating(dtype: str) -> bool:
    """Not the workspace that an operator keeps as bytes."""
    return dtype.startswith(("float", "bfloat", "complex"))


def _dimensions(shape: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"[0-9]+", shape))
