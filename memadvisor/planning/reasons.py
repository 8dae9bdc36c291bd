"""Why a plan stands where it does, in two or three plain sentences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from memadvisor.autocast import AUTOCAST_DTYPES
from memadvisor.category_words import category_plural
from memadvisor.compression import compression_text
from memadvisor.local_sgd import local_sgd_text
from memadvisor.plan import Plan, Prediction, UnitPlan
from memadvisor.plan_words import behind_text, kept_calls_text
from memadvisor.precision import precision_text
from memadvisor.stretches import stretches_text
from memadvisor.units import format_bytes, format_fraction, format_seconds


def explain(
    plan: Plan, prediction: Prediction, following: tuple[Plan, Prediction] | None, budget_bytes: int
) -> str:
    """What the plan does, where its peak is and what fills it, and how the next plan compares."""
    sentences = [*_sharding(plan), _deed(plan, prediction), _limit(prediction, budget_bytes)]
    if following is not None:
        sentences.append(_comparison(prediction, *following))
    return " ".join(sentences)


def _sharding(plan: Plan) -> Iterator[str]:
    """What several ranks share, and what of their messages compute hides."""
    if plan.num_ranks == 1:
        return
    sharding = f"ZeRO {stages_text(plan)}" if plan.zero_stage else "no sharding"
    if plan.executor == "fsdp2":
        sharding = f"the script's own FSDP2, as {sharding},"
    yield (
        f"{sharding[0].upper()}{sharding[1:]} on {plan.num_ranks} ranks{_groups(plan)}{_second_copies(plan)}{precision_text(plan.precision)}"
        f"{compression_text(plan.compression)}{local_sgd_text(plan.local_sgd)}."
    )
    if deeds := _transfers(plan):
        yield _sentence(deeds)


def _sentence(deeds: Sequence[str]) -> str:
    """Of what the plan does: `Gathers 1 unit ahead, recomputes nothing and updates in fused kernels.`"""
    text = " and ".join(filter(None, (", ".join(deeds[:-1]), deeds[-1])))
    return f"{text[0].upper()}{text[1:]}."


def _deed(plan: Plan, prediction: Prediction) -> str:
    num_recomputed = len(plan.recomputed_units)
    parts = []
    with_parts = len(plan.parted_units)
    parts.append(
        f"recomputes {num_recomputed} unit{'s' * (num_recomputed != 1)} of {len(plan.units)}"
        + (f" ({stretches_text(plan.unit_stretches)})" if plan.stretches else "")
        + _keeping(plan)
        + _calls(plan)
        if num_recomputed
        else "recomputes no whole unit"
        if with_parts
        else "recomputes nothing"
    )
    if with_parts:
        parts.append(
            f"runs parts of {with_parts} unit{'s' * (with_parts != 1)} again by themselves before their own backward"
        )
    tiers = sorted({unit.optimizer_tier for unit in plan.units} - {"device"})
    num_paged = sum(unit.parameter_tier != "device" for unit in plan.units)
    if num_paged:
        parts.append(
            f"keeps parameters and gradients of {num_paged} unit{'s' * (num_paged != 1)} of {len(plan.units)}, and "
            f"optimizer state, on the {' and the '.join(tiers)} between their uses ({_waiting(prediction)})"
        )
    elif tiers:
        parts.append(f"keeps optimizer state on the {' and the '.join(tiers)} between updates")
    if plan.autocast is not None:
        parts.append(f"computes forwards under autocast to {AUTOCAST_DTYPES[plan.autocast]}")
    if plan.fused_updates:
        parts.append("updates in fused kernels")
    if plan.update_by_unit:
        behind = ", and gathers each behind its own update" if plan.gathers_updated_later else ""
        if plan.may_gather_before_forward and not plan.gathers_updated_later:
            behind = ", and gathers what the next forward begins with behind its update"
        parts.append(f"updates units one after another{behind}")
    if plan.chunked_loss is not None:
        parts.append(
            f"makes the output of {plan.chunked_loss.layer!r}, and the loss, {plan.chunked_loss.rows} rows at a time"
        )
    if plan.optimizer_codes:
        parts.append("keeps optimizer state in 8 bits between updates")
    if away := [unit for unit in plan.units if unit.activation_tier != "device"]:
        parts.append(
            f"keeps what {len(away)} unit{'s' * (len(away) != 1)} save{'s' * (len(away) == 1)} for the backward on the "
            f"{' and the '.join(sorted({unit.activation_tier for unit in away}))} meanwhile ({_waiting(prediction)})"
        )
    return _sentence(parts)


def _waiting(prediction: Prediction) -> str:
    """How far compute hides transfers."""
    exposed_s = prediction.exposed_transfer_s or 0.0
    if exposed_s <= 1e-3 * prediction.step_time_s:
        return "compute hides the transfers"
    return f"a step waits {format_seconds(exposed_s)} for transfers"


def _keeping(plan: Plan) -> str:
    keeping = [unit for unit in plan.units if unit.kept]
    if not keeping:
        return ""
    num_outputs = sum(len(unit.kept) for unit in keeping)
    return f", of which {len(keeping)} keep the outputs of some operators ({num_outputs} in all), which do not run again"


def _calls(plan: Plan) -> str:
    texts = [f"{unit.name or '(model)'} {text}" for unit in plan.units if (text := kept_calls_text(unit))]
    return (
        f" ({', '.join(texts[:3])}{f' and {len(texts) - 3} more so' if len(texts) > 3 else ''})"
        if texts
        else ""
    )


def _second_copies(plan: Plan) -> str:
    ranks = plan.secondary_ranks
    return "" if ranks is None else f", gathering for the backward among {ranks} near ones"


def _groups(plan: Plan) -> str:
    is_hybrid = plan.zero_stage > 0 and plan.group_ranks < plan.num_ranks
    return f" in groups of {plan.group_ranks}" if is_hybrid else ""


def _transfers(plan: Plan) -> list[str]:
    words = []
    if plan.gather_depth and any(unit.zero_stage == 3 for unit in plan.units):
        words.append(f"gathers {plan.gather_depth} unit{'s' * (plan.gather_depth > 1)} ahead")
    if plan.overlap and any(unit.zero_stage >= 2 for unit in plan.units):
        words.append(f"reduces gradients {behind_text(plan)}")
    if plan.overlap and any(unit.zero_stage in (1, 2) for unit in plan.units):
        words.append("gathers updated parameters under the next forward")
    if plan.update_in_backward:
        words.append(
            "updates units in the backward, since the recorded step left gradients alone until its update"
        )
    return words


def _limit(prediction: Prediction, budget_bytes: int) -> str:
    category, size_bytes = max(prediction.by_category_bytes.items(), key=lambda item: item[1])
    share = format_fraction(size_bytes / prediction.peak_bytes)
    room_bytes = budget_bytes - prediction.needed_bytes
    room = (
        f"{format_bytes(room_bytes)} under the budget"
        if room_bytes >= 0
        else f"{format_bytes(-room_bytes)} over the budget"
    )
    if prediction.reserved_bytes is not None:
        room = f"for which {format_bytes(prediction.reserved_bytes)} are reserved, {room}"
    return (
        f"Its peak of {format_bytes(prediction.peak_bytes)} is in the {prediction.peak_position}, "
        f"{room}; {share} of it is {category_plural(category)}."
    )


def _comparison(prediction: Prediction, other_plan: Plan, other: Prediction) -> str:
    """The next plan's time and memory against this one's."""
    seconds = other.step_time_s - prediction.step_time_s
    size_bytes = other.needed_bytes - prediction.needed_bytes
    time = (
        "takes as long"
        if abs(seconds) < 5e-4 * prediction.step_time_s
        else f"takes {format_seconds(abs(seconds))} {'more' if seconds > 0 else 'less'}"
    )
    memory = (
        "needs as much memory"
        if size_bytes == 0
        else f"needs {format_bytes(abs(size_bytes))} {'more' if size_bytes > 0 else 'less'}"
    )
    return f"The next plan ({_short(other_plan)}) {time} a step and {memory}."


def _short(plan: Plan) -> str:
    ranks = f"{_groups(plan)}{_second_copies(plan)}"
    words = [f"ZeRO {plan.zero_stage}{ranks}" if plan.num_ranks > 1 else "one rank"]
    words.append(f"{len(plan.recomputed_units)} recomputed")
    if plan.parted_units:
        words.append(f"parts of {len(plan.parted_units)}")
    if num_away := sum(unit.activation_tier != "device" for unit in plan.units):
        words.append(f"{num_away} offloaded")
    if plan.micro_batch_size is not None and plan.grad_accum is not None:
        words.append(f"micro-batch {plan.micro_batch_size} x {plan.grad_accum}")
    return ", ".join(words)


def stages_text(plan: Plan) -> str:
    """The stages in words: `2`; `3 for tokens and 4 units blocks.0 to blocks.3, 0 for head`."""
    if not plan.is_mixed:
        kept = " (parameters kept until the backward)" if plan.units and plan.units[0].is_kept else ""
        return f"{plan.units[0].zero_stage if plan.units else plan.zero_stage}{kept}"
    groups: dict[tuple[int, bool], list[UnitPlan]] = {}
    for unit in plan.units:
        groups.setdefault((unit.zero_stage, unit.is_kept), []).append(unit)
    return ", ".join(
        f"{stage}{' with parameters kept until the backward' if kept else ''} for {_names_text(units, plan)}"
        for (stage, kept), units in sorted(groups.items(), reverse=True)
    )


def _names_text(units: Sequence[UnitPlan], plan: Plan) -> str:
    """Names in order of execution; three and more that follow each other as the first and the last of them."""
    positions = [plan.units.index(unit) for unit in units]
    runs: list[list[str]] = []
    for place, unit in enumerate(units):
        if place and positions[place] == positions[place - 1] + 1:
            runs[-1].append(unit.name or "(model)")
        else:
            runs.append([unit.name or "(model)"])
    words = []
    for run in runs:
        words += run if len(run) < 3 else [f"{len(run)} units {run[0]} to {run[-1]}"]
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
