"""How long a rank's training waits for its DataLoaders, and how these are set up."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from statistics import median

from memadvisor.run.loader_records import DataWait
from memadvisor.run.records import Step
from memadvisor.run.run import RankRun


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderUse:
    """One DataLoader, as `run.loader_records.LoaderInfo` has it, and what the finished timed steps had of it.

    Its batches for training and for evaluations are apart; `wait_s` is the wait for the former, in whichever phase.
    """

    num_workers: int
    prefetch_factor: int | None
    pin_memory: bool
    persistent_workers: bool
    batch_size: int | None
    num_batches: int
    wait_s: float
    num_evaluation_batches: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Starts:
    """Passes over a loader for training that began in timed steps, mostly an epoch's.

    Each holds the making of the iterator, with its workers, the first batch, and the word that the pass before was over.
    `median_s` and `longest_s` are of the `num_steps` steps that have such a wait, all of it in a step together.
    """

    num_steps: int
    median_s: float
    longest_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationWaits:
    """Waiting for evaluations' batches, in `num_steps` of the timed steps; part of `outside`, and of no training's wait."""

    num_batches: int
    num_steps: int
    time_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DataWaits:
    """The training thread's waits for DataLoaders, beside the part of them that `StepTime.data_wait_s` is.

    Plain medians of the steps that StepTime's phases are of, where StepTime scales its own to sum to the step; None where no
    batch for training came from a DataLoader in the steady steps: the script has none, or another thread reads it.
    `thread_s`: what the thread itself waited outside the phases; on a device more than what that stands idle, where it still
    has work meanwhile. `inside_phases_s`: more, in forward, backward or optimizer, whose time it is part of. `loaders`: that
    which the training waited for longest comes first.
    """

    thread_s: float | None
    inside_phases_s: float | None
    starts: Starts | None
    evaluation: EvaluationWaits | None
    loaders: tuple[LoaderUse, ...]

    @property
    def of_training(self) -> tuple[LoaderUse, ...]:
        return tuple(loader for loader in self.loaders if loader.num_batches)


def data_waits(rank: RankRun) -> DataWaits | None:
    """None where nothing is recorded."""
    if not rank.data_waits:
        return None
    steps = _recorded(rank)
    timed = {step.index for step in rank.steps if not step.traced}
    rows = [row for row in rank.data_waits if row.step in timed]
    own = [row for row in rows if not row.is_evaluation]
    is_known = _is_known(rank)
    return DataWaits(
        thread_s=_median_of(steps, [(row, row.thread_s) for row in own if row.phase == "outside"])
        if is_known
        else None,
        inside_phases_s=_median_of(steps, [(row, row.wait_s) for row in own if row.phase != "outside"])
        if is_known
        else None,
        starts=_starts(own),
        evaluation=_evaluation([row for row in rows if row.is_evaluation]),
        loaders=_loaders(rank, rows),
    )


def training_waits_s(rank: RankRun) -> float | None:
    """Median over the steps with phases of the wait outside all of them for batches to train on; None: not recorded."""
    if not _is_known(rank):
        return None
    rows = [row for row in rank.data_waits if not row.is_evaluation and row.phase == "outside"]
    return _median_of(_recorded(rank), [(row, row.wait_s) for row in rows])


def _is_known(rank: RankRun) -> bool:
    steady = {step.index for step in rank.steady_steps()}
    has_batch = any(
        row.num_batches and not row.is_evaluation and row.step in steady for row in rank.data_waits
    )
    return has_batch and bool(_recorded(rank))


def _recorded(rank: RankRun) -> tuple[Step, ...]:
    """The steps whose phases are known, without those from which on only steps are recorded."""
    recorded = {span.step for span in rank.spans} | {row.step for row in rank.data_waits}
    return tuple(step for step in rank.steps_with_units() if step.index in recorded)


def _median_of(steps: Collection[Step], waits: list[tuple[DataWait, float]]) -> float:
    """Of each step's sum; a step without a wait counts as 0."""
    sums_s = dict.fromkeys((step.index for step in steps), 0.0)
    for row, wait_s in waits:
        if row.step in sums_s:
            sums_s[row.step] += wait_s
    return median(sums_s.values())


def _starts(rows: list[DataWait]) -> Starts | None:
    by_step: dict[int, float] = {}
    begun = {row.step for row in rows if row.num_starts}
    for row in rows:
        if row.step in begun:
            by_step[row.step] = by_step.get(row.step, 0.0) + row.start_s
    if not by_step:
        return None
    return Starts(num_steps=len(by_step), median_s=median(by_step.values()), longest_s=max(by_step.values()))


def _evaluation(rows: list[DataWait]) -> EvaluationWaits | None:
    if not rows:
        return None
    return EvaluationWaits(
        num_batches=sum(row.num_batches for row in rows),
        num_steps=len({row.step for row in rows}),
        time_s=sum(row.wait_s for row in rows),
    )


def _loaders(rank: RankRun, rows: list[DataWait]) -> tuple[LoaderUse, ...]:
    uses = []
    for info in rank.data_loaders:
        of_it = [row for row in rows if row.loader == info.loader]
        own = [row for row in of_it if not row.is_evaluation]
        uses.append(
            LoaderUse(
                num_workers=info.num_workers,
                prefetch_factor=info.prefetch_factor,
                pin_memory=info.pin_memory,
                persistent_workers=info.persistent_workers,
                batch_size=info.batch_size,
                num_batches=sum(row.num_batches for row in own),
                wait_s=sum((row.wait_s for row in own), 0.0),
                num_evaluation_batches=sum(row.num_batches for row in of_it if row.is_evaluation),
            )
        )
    return tuple(sorted(uses, key=lambda use: (-use.wait_s, -use.num_batches)))
