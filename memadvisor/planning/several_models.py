"""What of a script with several models plans can be about, and what is not planned for them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from memadvisor.analyzers.planned_models import models_of
from memadvisor.cost.step import CapturedStep
from memadvisor.errors import UsageError
from memadvisor.plan import PlannedModel
from memadvisor.run.run import RankRun

_MOST_NAMED = 4


def updates_apart(step: CapturedStep) -> bool:
    """Whether forwards or backwards run between optimizer steps, as where two models train against each other.

    Updates that fetch their state are played, and predicted, where the first optimizer steps.
    """
    places = step.optimizer_at
    between = step.segments[places[0] : places[-1]] if places else ()
    return any(segment.phase in ("forward", "backward", "recompute") for segment in between)


def check_single(rank: RankRun, what: str) -> None:
    """Raise UsageError where the script has several models, which `what` is not worked out for."""
    models = models_of(rank)
    if len(models) > 1:
        raise UsageError(
            f"The script calls {len(models)} models by themselves ({', '.join(models.values())}), and {what} for one alone.",
            hint="advise on its own machine, with --gpus N.",
        )


def model_notes(
    rank: RankRun, planned: Sequence[PlannedModel], step: CapturedStep, *, knows_tier: bool
) -> Iterator[str]:
    """Which models the plans are about, and what no plan does with several."""
    models = models_of(rank)
    if len(models) < 2 or not planned:
        return
    names = {model.name for model in planned}
    others = [_word(name, kind) for name, kind in models.items() if name not in names]
    about = _listed([_word(name, kind) for name, kind in models.items() if name in names])
    left = f"; {_listed(others)} stay{'s' * (len(others) == 1)} as recorded" if others else ""
    yield f"The script calls {len(models)} models by themselves: plans are about {about}{left}."
    if not knows_tier:
        return
    if len(planned) > 1:
        yield "No plan has parameters of several models on another tier."
    if updates_apart(step):
        yield "Optimizer state stays in memory: forwards run between the steps of the script's optimizers."


def _word(name: str, kind: str) -> str:
    return f"{name} ({kind})" if name else f"the first ({kind})"


def _listed(words: Sequence[str]) -> str:
    """A, B and C; of many (each layer of Keras's is a model) the first ones, and how many more."""
    more = len(words) - _MOST_NAMED
    shown = [*words[:_MOST_NAMED], f"{more} more"] if more > 1 else list(words)
    return " and ".join(filter(None, (", ".join(shown[:-1]), shown[-1])))
