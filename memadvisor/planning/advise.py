"""From a recorded run and a memory budget to ranked plans, each with a prediction and its reasons."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from memadvisor.analyzers.planned_models import check_trained
from memadvisor.analyzers.script_changes.change import ScriptChange
from memadvisor.analyzers.script_changes.found import changes_of
from memadvisor.analyzers.segments import RecordedStep
from memadvisor.asked import Asked
from memadvisor.autocast import WorkspacesOf, check_autocast, other_dtypes
from memadvisor.chunked_loss import ChunkedLoss, check_chunked_loss
from memadvisor.compression import UNCOMPRESSED, Compression, check_compression
from memadvisor.cost.step import CapturedStep
from memadvisor.errors import UsageError
from memadvisor.hardware.hardware import Hardware
from memadvisor.hardware.load import named_hardware
from memadvisor.local_sgd import LocalSgd, check_local_sgd
from memadvisor.plan import PlainRun, Plan
from memadvisor.planning.advice_notes import chunk_notes, fused_notes, notes
from memadvisor.planning.collecting import collecting_seldom
from memadvisor.planning.compiled_models import check_calls_are_seen
from memadvisor.planning.last_stage import last_stage, why_no_stages
from memadvisor.planning.learn import Learnt, learn
from memadvisor.planning.lossy import LossyAlternative, check_asked_bits, lossy_alternatives
from memadvisor.planning.machine import Machine, machine_for
from memadvisor.planning.micro_batches import split_notes, splits, step_with
from memadvisor.planning.named import check_policy, named_plan
from memadvisor.planning.own_updates import check_own_updates
from memadvisor.planning.plays import Plays
from memadvisor.planning.ranked import FrontPoint, RankedPlan, front_of, order, seconds_for
from memadvisor.planning.reasons import explain
from memadvisor.planning.search import Search
from memadvisor.planning.second_copies import check_near_ranks
from memadvisor.planning.several_models import check_single, updates_apart
from memadvisor.precision import FULL_PRECISION, Precision
from memadvisor.run.run import Run
from memadvisor.unit_ranges import unit_ranges
from memadvisor.units import GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """Plans from best to worst, those that fit first.

    `measured_peak_bytes` and `measured_step_time_s` are the plain run's own. `smallest_budget_bytes` is the lowest
    predicted peak over all plans searched, `smallest_unchanged_bytes` over those that leave the script alone. `front`:
    what less and more memory would give, with the best plan's way of sharding and the script left alone. `next_gib_s`:
    how much faster a step gets with a GiB beyond the budget; None where no plan that leaves the script alone fits.
    `lossy`: what the first such plan would give if it were lossy. `learnt`: what runs that were named have taught.
    `policy` and `named`: a policy that was asked for by name, and its plan, which fits. `micro_batch`: samples of one
    that were asked about, where they were; `recorded_micro_batch`: those of the run, where they are known.
    `script_changes`: what to change in the script itself, beside any plan. `notes` are assumptions that the reader should
    know.
    """

    budget_bytes: int
    num_ranks: int
    plans: tuple[RankedPlan, ...]
    smallest_budget_bytes: int
    smallest_unchanged_bytes: int
    measured_peak_bytes: int
    measured_step_time_s: float
    notes: tuple[str, ...]
    front: tuple[FrontPoint, ...]
    next_gib_s: float | None
    lossy: tuple[LossyAlternative, ...]
    policy: str | None
    named: RankedPlan | None
    learnt: Learnt | None = None
    micro_batch: int | None = None
    recorded_micro_batch: int | None = None
    script_changes: tuple[ScriptChange, ...] = ()

    @property
    def best(self) -> Plan | None:
        """The first plan that fits; None where none does."""
        return next((ranked.plan for ranked in self.plans if ranked.fits), None)


@collecting_seldom()
def advise(
    run: Run,
    *,
    memory_bytes: int,
    num_ranks: int | None = None,
    hardware: Hardware | None = None,
    precision: Precision = FULL_PRECISION,
    compression: Compression = UNCOMPRESSED,
    local_sgd: LocalSgd | None = None,
    optimizer_bits: int | None = None,
    fused_updates: bool = False,
    chunked_loss: ChunkedLoss | None = None,
    autocast: str | None = None,
    policy: str | None = None,
    learn_from: Sequence[Run] = (),
    near_ranks: int | None = None,
    micro_batch: int | None = None,
    workspaces_of: WorkspacesOf | None = None,
) -> Advice:
    """Rank plans over ZeRO stage, recomputed units and micro-batch split for a budget per rank.

    `num_ranks` defaults to the run's. All plans have the `precision`, the `compression`, `local_sgd` and the
    `optimizer_bits` and `autocast`, which are never chosen: they are lossy. So have they `fused_updates` and
    `chunked_loss`, whose results are not bit for bit the same.
    `policy`: one whose plan is shown beside them (planning/named.py). `learn_from`: runs of plans whose measured times correct those predicted (learn.py).
    `near_ranks`: how many ranks that follow each other are of one node, and may share second copies
    (second_copies.py). `micro_batch`: samples of each, in place of the recorded ones (micro_batches.py). `workspaces_of`: of products under autocast on the run's device. Raises
    UsageError where the run has no traced step, or where nothing is known of the collectives that several ranks need.
    """
    ranks = run.manifest.world_size if num_ranks is None else num_ranks
    asked = Asked(
        precision=precision,
        compression=compression,
        local_sgd=local_sgd,
        optimizer_bits=optimizer_bits,
        fused_updates=fused_updates,
        chunked_loss=chunked_loss,
        autocast=autocast,
    )
    _check_options(ranks, asked, policy)
    rates = () if hardware is None else hardware.optimizers
    recorded = RecordedStep(run, asked, num_ranks=ranks, optimizer_rates=rates, workspaces_of=workspaces_of)
    plain, recorded_size = step_with(recorded, micro_batch)
    asked = replace(asked, chunked_loss=recorded.chunked_loss)
    _check_model(run, plain, ranks, asked)
    machine = machine_for(run, plain, ranks, hardware)
    learnt = learn(run, learn_from, machine.times, machine.transfers, rates) if learn_from else None
    plain = plain if learnt is None else replace(plain, time_factors=learnt.factors)
    check_near_ranks(near_ranks, ranks, bool(plain.shard_groups))
    check_asked_bits(optimizer_bits, machine.transfers)
    plays = _plays(run, ranks, memory_bytes, asked, recorded.chunked_units, machine)
    search = Search(plays, near_ranks, last_stage=last_stage(run, plain))
    if not search.stages:
        raise _no_stage(why_no_stages(run, plain))
    measured = PlainRun(
        peak_bytes=plain.peak_bytes,
        step_time_s=recorded.measured_step_time_s,
        num_ranks=run.manifest.world_size,
        micro_batch_size=recorded_size,
    )
    whole = measured if micro_batch in (None, recorded_size) else None
    found = _found(search, splits(recorded, plain, recorded_size, search.may_show))
    first = next(ranked for ranked in found if not ranked.changes_script)
    named = None if policy is None else _explained([named_plan(plays, plain, policy, first)], plays, whole)[0]
    return Advice(
        budget_bytes=memory_bytes,
        num_ranks=ranks,
        plans=_explained(found, plays, whole),
        smallest_budget_bytes=min(search.needs),
        smallest_unchanged_bytes=min(search.needs_unchanged),
        measured_peak_bytes=plain.peak_bytes,
        measured_step_time_s=recorded.measured_step_time_s,
        front=front_of(search.best_kind, memory_bytes),
        next_gib_s=seconds_for(search.best_kind, memory_bytes, GIB),
        lossy=lossy_alternatives(plain, first.plan, machine.times, machine.transfers),
        policy=policy,
        named=named,
        learnt=learnt,
        micro_batch=micro_batch,
        recorded_micro_batch=recorded_size,
        script_changes=_script_changes(run, plain, hardware, asked.script_changes),
        notes=(
            *notes(run, plays, plain, found),
            *(fused_notes(plain, bool(rates)) if fused_updates else ()),
            *chunk_notes(asked.chunked_loss, recorded.chunks_again_s),
            *split_notes(recorded, recorded_size, (one.plan.micro_batch_size for one in found)),
        ),
    )


def _no_stage(why: str | None) -> UsageError:
    """No stage can have what is asked for; `why` the script's plans have none."""
    if why is None:
        return UsageError(
            "No ZeRO stage can have both this precision and this compression.", hint="leave one of them out."
        )
    return UsageError(f"What is asked for needs ZeRO stage 1, 2 or 3. {why}", hint="advise without it.")


def _plays(
    run: Run,
    num_ranks: int,
    memory_bytes: int,
    asked: Asked,
    chunked_units: Collection[str],
    machine: Machine,
) -> Plays:
    return Plays(
        run,
        machine.times,
        num_ranks,
        memory_bytes,
        machine.settings,
        asked=asked,
        chunked_units=chunked_units,
        transfers=machine.transfers,
        paged_transfers=machine.paged_transfers,
        algorithms=machine.algorithms,
    )


def _script_changes(
    run: Run, plain: CapturedStep, hardware: Hardware | None, done: Collection[str]
) -> tuple[ScriptChange, ...]:
    """All but those kinds that are done by the plans."""
    rank = run.rank(plain.rank)
    found = changes_of(run, rank, hardware or named_hardware(rank.process.device_name))
    return tuple(change for change in found if change.kind not in done)


def _check_options(num_ranks: int, asked: Asked, policy: str | None) -> None:
    """Raise UsageError for options that no run could be advised with."""
    check_policy(policy)
    if num_ranks < 1:
        raise UsageError(f"--gpus {num_ranks} is no number of ranks.", hint="give 1 or more.")
    if num_ranks == 1 and asked.precision != FULL_PRECISION:
        raise UsageError(
            "Another precision needs shards, and one rank has none.", hint="advise for --gpus 2 or more."
        )
    check_compression(
        asked.compression, num_ranks, asked.compression.stages, "This advice", asked.precision.reduce_dtype
    )
    beside = {
        "compressed gradients": asked.compression.is_lossy,
        "another precision": asked.precision != FULL_PRECISION,
    }
    check_local_sgd(asked.local_sgd, num_ranks, {0}, beside, "This advice")


def _check_chunks(asked: Asked, step: CapturedStep) -> None:
    excluded = {
        "the script's FSDP2 takes them back after the forward": bool(step.shard_groups),
        "--param-dtype has them in another dtype": asked.precision.param_dtype is not None,
    }
    check_chunked_loss(asked.chunked_loss, excluded, "This advice", UsageError)


def _option(field: str) -> str:
    return f"--{field.replace('_', '-')}"


def _check_autocast(asked: Asked, step: CapturedStep) -> None:
    excluded = {
        **other_dtypes(asked.precision, is_fsdp2=bool(step.shard_groups), named=_option),
        "messages that ZeRO stage 3 alone has": (
            min(asked.compression.stages, default=0) == 3,
            "leave one of them out: stage 3 cannot have autocast.",
        ),
    }
    check_autocast(asked.autocast, excluded, "This advice", UsageError)


def _check_one_update(optimizer_bits: int | None, step: CapturedStep) -> None:
    if optimizer_bits is not None and updates_apart(step):
        raise UsageError(
            "Forwards run between the steps of the script's optimizers, and plans with state in few bits are worked out for "
            "one update a step.",
            hint="advise without --optimizer-bits.",
        )


def _found(search: Search, splits: Iterable[tuple[CapturedStep, bool]]) -> list[RankedPlan]:
    """Plans worth showing of the step and its splits, each with whether it is the last, from best to worst."""
    steps: list[CapturedStep] = []
    found: list[RankedPlan] = []
    for step, is_last in splits:
        steps.append(step)
        found += search.plans(step, splits_further=not is_last)
    found += search.moved_splits(tuple(found))
    if not any(ranked.fits for ranked in found):
        found += search.paged_splits(steps)
    return sorted(_worth_showing(found), key=order)


def _worth_showing(found: list[RankedPlan]) -> list[RankedPlan]:
    """All plans that leave the script alone; of the others, those that nothing beats.

    Splitting a micro-batch has a cost of which a part is not predicted (small operators are less efficient), so of
    two plans that fit and are predicted equally fast, the one that splits less is the better one.
    """
    return [ranked for ranked in found if not ranked.changes_script or not _is_beaten(ranked, found)]


def _is_beaten(ranked: RankedPlan, found: list[RankedPlan]) -> bool:
    if not ranked.fits:
        smallest = min(found, key=lambda other: other.prediction.needed_bytes)
        return ranked is not smallest
    limit_s = ranked.prediction.step_time_s * (1 + 1e-9)
    return any(
        other.fits and other.prediction.step_time_s <= limit_s and _effort(other) < _effort(ranked)
        for other in found
    )


def _effort(ranked: RankedPlan) -> tuple[int, float, int]:
    """Micro-batches a step, then time, then peak."""
    prediction = ranked.prediction
    return ranked.plan.grad_accum or 1, prediction.step_time_s, prediction.needed_bytes


def _explained(found: list[RankedPlan], plays: Plays, plain: PlainRun | None) -> tuple[RankedPlan, ...]:
    """With why, and with the lanes and the plain run that a run of them is laid beside."""
    explained = []
    for ranked, following in zip(found, [*found[1:], None], strict=True):
        why = explain(
            ranked.plan,
            ranked.prediction,
            None if following is None else (following.plan, following.prediction),
            plays.budget_bytes,
        )
        explained.append(replace(ranked, plan=replace(plays.with_timeline(ranked), why=why, plain=plain)))
    return tuple(explained)


def _check_model(
    run: Run,
    step: CapturedStep,
    num_ranks: int,
    asked: Asked,
) -> None:
    """Raise UsageError for what several models, a script that shards its model by FSDP2 itself, one that trains nothing of
    its model, or one whose ranks are no replicas of each other, or are so in parts of the model, cannot be given."""
    check_trained(run.ranks[0])
    check_calls_are_seen(run, step, num_ranks)
    _check_chunks(asked, step)
    _check_autocast(asked, step)
    _check_one_update(asked.optimizer_bits, step)
    replicas, recorded = run.ranks[0].process.ddp_ranks, run.manifest.world_size
    if replicas is not None and replicas < recorded:
        raise UsageError(
            f"The script's DistributedDataParallel is over {replicas} of {recorded} ranks: the others have something else, such "
            "as other parts of its layers, and no plan is worked out for that.",
            hint="a script that splits layers gets plans with FSDP2 over the other ranks, or with none beside it.",
        )
    wrapped = [m.name for m in run.ranks[0].modules if m.type_name == "DistributedDataParallel"]
    if wrapped and recorded > 1:
        raise UsageError(
            f"The script's DistributedDataParallel is around parts of the model ({unit_ranges(wrapped)}), and no plan is worked "
            "out for that.",
            hint="`memadvisor run --zero 1` (2, 3) shares out each of these parts by itself, without a plan.",
        )
    check_own_updates(run, num_ranks)
    if asked.local_sgd is not None:
        check_single(run.ranks[0], "local SGD is worked out")
    if not step.shard_groups:
        return
    what = (
        f"--gpus {num_ranks}"
        if num_ranks != recorded
        else "another precision"
        if asked.precision.is_lossy or asked.precision.has_masters
        else "compression"
        if asked.compression.is_lossy
        else "local SGD"
        if asked.local_sgd is not None
        else None
    )
    if what is not None:
        raise UsageError(
            f"The script shards its model among {recorded} ranks itself, with FSDP2, and {what} is asked for.",
            hint="advise without it, or change the script and profile it again.",
        )
