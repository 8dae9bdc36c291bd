"""Of a script that calls several models by themselves, those that a plan can be about.

What a plan does, it does to what a backward needs or an optimizer updates: a teacher under `torch.no_grad`, or a copy that
follows a model, is left as it is, and its bytes and seconds stay what they were.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence

from memadvisor.analyzers.placement import Stretch
from memadvisor.errors import UsageError
from memadvisor.plan import PlannedModel, fingerprint
from memadvisor.run.cut import innermost
from memadvisor.run.records import Step
from memadvisor.run.run import RankRun

_LOOSE = "("  # names of what is trained and no module's begin so


def fingerprint_of(rank: RankRun) -> str:
    """Of all parameters that there are."""
    return fingerprint((parameter.name, parameter.shape, parameter.dtype) for parameter in rank.parameters)


def models_of(rank: RankRun) -> Mapping[str, str]:
    """The class of each model that has parameters, by its name, in the order of their first calls; empty in older runs."""
    names = {unit.model for unit in rank.units} - {None}
    return {row.name: row.type_name for row in rank.modules if row.name in names}


def planned_models(rank: RankRun, num_ranks: int) -> tuple[PlannedModel, ...]:
    """In the order of their first calls with gradients in the traced step. Empty where the script has one model, or none
    of several is trained: a plan is then about all units there are.

    Ranks share only what they train: on several of them, a frozen model that others are trained through is left as it is.
    """
    models = models_of(rank)
    if len(models) < 2:
        return ()
    of_unit = {unit.name: unit.model for unit in rank.units}
    step = rank.traced_step
    spans = [span for span in rank.spans if step is not None and span.step == step.index]
    trained = {of_unit.get(span.unit) for span in spans if span.kind == "unit_backward"}
    trained |= {innermost(state.parameter, models) for state in rank.optimizer_states}
    parameters = {name: [p for p in rank.parameters if innermost(p.name, models) == name] for name in models}
    called = [innermost(span.unit, models) for span in spans if span.kind == "forward"]
    found = [
        PlannedModel(
            name=name,
            fingerprint=fingerprint(
                (p.name.removeprefix(f"{name}." if name else ""), p.shape, p.dtype) for p in parameters[name]
            ),
            is_trainable=any(p.requires_grad for p in parameters[name]),
        )
        for name in dict.fromkeys([*(name for name in called if name is not None), *models])
        if name in trained
    ]
    return tuple(model for model in found if num_ranks == 1 or model.is_trainable)


def check_trained(rank: RankRun) -> None:
    """Raise UsageError where units ran, and neither a backward nor an optimizer was seen to touch a parameter of them."""
    step = rank.traced_step
    kinds = {span.kind for span in rank.spans if step is not None and span.step == step.index}
    names = {parameter.name for parameter in rank.parameters if not parameter.name.startswith(_LOOSE)}
    is_updated = any(state.parameter in names for state in rank.optimizer_states)
    if "unit_forward" in kinds and "unit_backward" not in kinds and not is_updated:
        why = (
            "Nothing that the model has is trained: the script calls it with parameters from elsewhere "
            "(torch.func.functional_call), which no plan can be about."
            if "backward" in kinds
            else "The traced step had no backward pass (derivatives that go forward keep nothing for one): there is nothing that "
            "a plan could free."
        )
        raise UsageError(why, hint="the run's report says what fills the memory.")


def is_each_called_once(rank: RankRun, step: Step) -> bool:
    """Whether a micro-batch is one batch of all models that are called with gradients: each is called in each of them, once.

    Else, as where one model judges what another has made, and then judges again, nobody knows what half a micro-batch is.
    """
    models = models_of(rank)
    calls = Counter(
        (innermost(span.unit, models), span.micro_batch)
        for span in rank.spans
        if span.step == step.index and span.kind == "forward"
    )
    names = {name for name, _ in calls}
    once = len(names) * max(1, step.num_micro_batches)
    return len(names) < 2 or (len(calls) == once and set(calls.values()) == {1})


def live_gradients(rank: RankRun, pieces: Sequence[Stretch]) -> list[frozenset[str] | None]:
    """Those models that have gradients when each piece of the traced step begins. None for one model, where the memory of
    its gradients tells, unless it is known to have none though that memory is there, as a bucket of DDP's may be."""
    models = models_of(rank)
    without = _without_gradients(rank, pieces, frozenset(models))
    if len(models) < 2:
        return [frozenset() if gone else None for gone in without]
    of_unit = {unit.name: unit.model for unit in rank.units}
    starts = [piece.start_s for piece in pieces]
    found: list[set[str]] = [set() for _ in pieces]
    for row in rank.storages:
        model = of_unit.get(row.unit)
        if row.category != "gradient" or model is None:
            continue
        last = len(pieces) if row.death_s is None else bisect_left(starts, row.death_s)
        for alive in found[bisect_left(starts, row.birth_s) : last]:
            alive.add(model)
    return [frozenset(alive - gone) for alive, gone in zip(found, without, strict=True)]


def _without_gradients(
    rank: RankRun, pieces: Sequence[Stretch], models: frozenset[str]
) -> list[frozenset[str]]:
    """By piece, models that had no gradient when the forward began that it is in; all where a backward begins with none."""
    starts = [piece.start_s for piece in pieces]
    found: list[frozenset[str]] = [frozenset() for _ in pieces]
    step = rank.traced_step
    for span in rank.spans:
        if step is None or span.step != step.index or span.has_gradients is not False:
            continue
        first = bisect_left(starts, span.start_s)
        last = bisect_left(starts, span.end_s) if span.kind == "forward" else first + 1
        own = models & {innermost(span.unit, models) or ""} if span.kind == "forward" else models
        for position in range(first, min(last, len(pieces))):
            found[position] |= own
    return found
