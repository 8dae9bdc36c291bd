"""Share of the hardware's peak arithmetic that training uses: MFU and HFU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from memadvisor.analyzers.conventions import CONVENTIONS, Convention, convention_flops
from memadvisor.analyzers.model_shape import TransformerShape, training_operators, transformer_shape
from memadvisor.analyzers.product_weights import NoTransformer
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
    recomputation too; evaluation passes count in neither. `conventions` has the MFU of all four conventions
    (conventions.py), or why one does not know this model; `shape` is what the formulas were given. FLOPs are the
    traced step's; the time is the steady steps' median. Fractions are None where the peak for `dtype`, the FLOPs
    or the step time is not known.
    """

    mfu: float | None
    hfu: float | None
    convention: str  # of mfu and hfu: "exact"
    mfu_palm: float | None
    model_flops_per_step: int | None
    executed_flops_per_step: int | None
    palm_flops_per_step: int | None
    step_time_s: float | None
    dtype: str | None  # in which the matrix products run: that of most of their output bytes, or tf32
    peak_flops_per_s: float | None
    hardware_name: str | None
    hardware_kind: str | None  # "datasheet", "measured" or "given"
    conventions: Mapping[str, Convention]
    shape: TransformerShape | None


def utilization(rank: RankRun, time: StepTime | None, hardware: Hardware | None) -> Utilization:
    """MFU and HFU; what cannot be worked out is None."""
    model_flops, executed_flops = _training_flops(rank)
    dtype = product_dtype(rank, hardware)
    peak = hardware.peak_flops_per_s.get(dtype) if hardware is not None and dtype is not None else None
    step_time_s = time.median_s if time is not None else None

    def share(flops: int | None) -> float | None:
        if flops is None or not peak or not step_time_s:
            return None
        return flops / step_time_s / peak

    shape, conventions = _conventions(rank, model_flops, share)
    palm = conventions["palm"]
    return Utilization(
        mfu=share(model_flops),
        hfu=share(executed_flops),
        convention="exact",
        mfu_palm=palm.mfu,
        model_flops_per_step=model_flops,
        executed_flops_per_step=executed_flops,
        palm_flops_per_step=palm.flops_per_step,
        step_time_s=step_time_s,
        dtype=dtype,
        peak_flops_per_s=peak,
        hardware_name=None if hardware is None else hardware.name,
        hardware_kind=None if hardware is None else hardware.kind,
        conventions=conventions,
        shape=shape,
    )


def _conventions(
    rank: RankRun, model_flops: int | None, share: Callable[[int | None], float | None]
) -> tuple[TransformerShape | None, dict[str, Convention]]:
    """The four conventions, by name; where a formula does not know the model, why."""
    shape, reason = None, ""
    try:
        shape = transformer_shape(rank)
    except NoTransformer as error:
        reason = str(error)
    conventions = {}
    for name in CONVENTIONS:
        flops, why = model_flops, None
        if name != "exact":
            flops, why = None, reason
            if shape is not None:
                try:
                    flops, why = convention_flops(name, shape), None
                except NoTransformer as error:
                    why = str(error)
        elif flops is None:
            why = "no step was traced" if rank.traced_step is None else "no product was seen"
            why = rank.why_untraced if rank.has_lost_trace else why
        conventions[name] = Convention(flops_per_step=flops, mfu=share(flops), reason=why)
    return shape, conventions


def _training_flops(rank: RankRun) -> tuple[int | None, int | None]:
    """Needed and executed FLOPs of the traced step. None when no step was traced, or no product was seen in it (of a
    replayed CUDA graph no operator is).

    What an optimizer multiplies (Muon's Newton-Schulz steps) is executed, but no need of the model.
    """
    if rank.traced_step is None or not rank.operators:
        return None, None
    training = training_operators(rank)
    needed = sum(row.model_flops for row in training if row.phase != "optimizer")
    executed = sum(row.executed_flops for row in training)
    return (needed, executed) if executed else (None, None)


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


def product_dtype(rank: RankRun, hardware: Hardware | None) -> str | None:
    """`compute_dtype`, or tf32 where the device multiplies float32 tensors so and has a peak for it.

    A GPU before Ampere has none, whatever the script allows.
    """
    dtype = compute_dtype(rank)
    if dtype != "float32" or hardware is None or "tf32" not in hardware.peak_flops_per_s:
        return dtype
    sizes: Counter[bool] = Counter()
    for row in rank.operators:
        sizes["conv" in row.name] += row.executed_flops
    process = rank.process
    precision = process.float32_convolution if sizes[True] > sizes[False] else process.float32_matmul
    return "tf32" if precision == "tf32" else dtype


def _is_floating(dtype: str) -> bool:
    """Not the workspace that an operator keeps as bytes."""
    return dtype.startswith(("float", "bfloat", "complex"))
