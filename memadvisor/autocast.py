"""Forwards under torch.autocast: what a plan says of it. Pure data.

Operators that autocast lists (products, convolutions, attention) run on copies in 16 bits of what they are given, weights
among them. Parameters, gradients and optimizer state stay as they are. The script's own loss is outside: what the model
returns in 16 bits is given back as float32, as accelerate gives it back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass

from memadvisor.errors import MemadvisorError, PlanError
from memadvisor.plan import Plan
from memadvisor.precision import Precision

AUTOCAST_DTYPES = {"bf16": "bfloat16"}


@dataclass(frozen=True, slots=True)
class NarrowProduct:
    """Factors of a product of matrices in 16 bits, of a batch of them with three sizes each; `is_turned`: the first lies in
    memory by columns, as in the gradient of a layer's weight."""

    left: tuple[int, ...]
    right: tuple[int, ...]
    is_turned: bool


@dataclass(frozen=True, slots=True)
class NarrowConvolution:
    """One in 16 bits, or its backward: (samples, channels, sides) of what it is given and of its result, its filters, and how
    they are laid on, by side. `gives`: of a backward, whether it gives gradients of what it was given, and of its filters."""

    images: tuple[int, ...]
    filters: tuple[int, ...]
    result: tuple[int, ...]
    strides: tuple[int, ...]
    paddings: tuple[int, ...]
    dilations: tuple[int, ...]
    is_transposed: bool = False
    num_groups: int = 1
    gives: tuple[bool, bool] | None = None


NarrowWork = NarrowProduct | NarrowConvolution
# Bytes that products and convolutions take for themselves while they run, as far as they are known.
WorkspacesOf = Callable[[Set[NarrowWork]], Mapping[NarrowWork, int]]


def check_autocast(
    autocast: str | None,
    excluded: Mapping[str, tuple[bool, str]],
    source: str,
    error: type[MemadvisorError] = PlanError,
) -> None:
    """Raise `error`, naming `source`, for a dtype that is not done, and beside what is excluded: by what it is, whether
    it is so, and what to do then."""
    if autocast is None:
        return
    if autocast not in AUTOCAST_DTYPES:
        raise error(f"{source} has autocast {autocast!r}{_why_not(autocast)}.", hint="use bf16.")
    for what, (is_so, hint) in excluded.items():
        if is_so:
            raise error(f"{source} has autocast {autocast}, and {what}.", hint=hint)


def other_dtypes(
    precision: Precision, *, is_fsdp2: bool, named: Callable[[str], str] = str
) -> dict[str, tuple[bool, str]]:
    """What computes in a dtype of its own: `excluded` of `check_autocast`. `named`: what a field of a precision is called."""
    return {
        f"{named('param_dtype')}, which computes in another dtype by itself": (
            precision.param_dtype is not None,
            "leave one of them out.",
        ),
        f"{named('optimizer_dtype')}, which is for a model of 16 bits": (
            precision.has_masters,
            "leave one of them out: autocast is for a model of float32.",
        ),
        "the script's FSDP2, which computes in another dtype by its own policy": (
            is_fsdp2,
            "give its fully_shard an mp_policy, and leave autocast out.",
        ),
    }


def check_autocast_of(plan: Plan, source: str) -> None:
    """Raise PlanError for a plan that has it beside what it cannot be done with.

    autocast keeps its copies of weights until the forward of the model ends: those of a unit that is freed after its own
    forward would stay when it goes.
    """
    freed = next((repr(unit.name) for unit in plan.units if unit.stage_on(plan.num_ranks) == 3), None)
    if not plan.units and plan.num_ranks > 1 and plan.zero_stage == 3:
        freed = "all units"
    check_autocast(
        plan.autocast,
        {
            **other_dtypes(plan.precision, is_fsdp2=plan.executor == "fsdp2"),
            "parameters on host or disk, whose copies would stay when they go": (
                plan.parameter_tiers != {"device"},
                "leave parameters on the device, or autocast out.",
            ),
            f"ZeRO stage 3 of {freed}, where weights' copies would stay when it frees them": (
                freed is not None,
                "use --param-dtype bf16 there, which gathers weights in it; or stage 2 or lower.",
            ),
            "ranks that have parts of layers, or of the model, alone": (
                bool(plan.ranks),
                "have the script compute under autocast itself.",
            ),
        },
        source,
    )


def wrong_autocast(text: str) -> str:
    """What is wrong with an option's value, in words; nothing where it is right."""
    return "" if text in AUTOCAST_DTYPES else f"{text!r} is not done{_why_not(text)}; use bf16"


def _why_not(text: str) -> str:
    if text in ("fp16", "float16"):
        return ", which needs a loss scaler that a script in float32 does not have"
    return ""


def autocast_text(autocast: str | None) -> str:
    """In a few words that follow others, after a comma: `, forwards under autocast to bfloat16`; else nothing."""
    return "" if autocast is None else f", forwards under autocast to {AUTOCAST_DTYPES[autocast]}"


def autocast_loss_text(autocast: str) -> str:
    """What is rounded, in words."""
    return (
        f"forwards of the model run under torch.autocast to {AUTOCAST_DTYPES[autocast]}, and what they return is given back "
        "as float32; parameters, gradients and what the optimizer keeps stay float32. Losses will differ from those without it."
    )
