"""What the reader of an advice should know: what every plan changes, and what its predictions rest on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from memadvisor.analyzers.checkpointing import predicted_checkpoints
from memadvisor.analyzers.derivatives import differentiated_backwards, units_differentiated, units_repeated
from memadvisor.analyzers.larger_steps import larger_steps
from memadvisor.analyzers.left_alone import modules_transformed
from memadvisor.analyzers.model_states import model_states
from memadvisor.analyzers.own_checkpoints import own_checkpoints
from memadvisor.analyzers.step_time import step_time
from memadvisor.autocast import autocast_loss_text
from memadvisor.chunked_loss import ChunkedLoss, chunked_loss_text
from memadvisor.coded_states import optimizer_bits_text
from memadvisor.compression import Compression, compression_loss_text
from memadvisor.cost.allocator_settings import AllocatorSettings, settings_text
from memadvisor.cost.collectives import CollectiveTimes
from memadvisor.cost.step import CapturedStep
from memadvisor.cost.transfers import TransferTimes
from memadvisor.fused_updates import fused_updates_text
from memadvisor.local_sgd import LocalSgd, local_sgd_loss_text
from memadvisor.planning.algorithms import algorithms_notes
from memadvisor.planning.budget import card_notes
from memadvisor.planning.compiled_models import no_unit_ran, units_that_ran
from memadvisor.planning.extrapolation import extrapolation_notes
from memadvisor.planning.last_stage import stage_notes
from memadvisor.planning.plays import Plays
from memadvisor.planning.ranked import RankedPlan
from memadvisor.planning.several_models import model_notes
from memadvisor.precision import Precision, loss_text, masters_text
from memadvisor.run.run import RankRun, Run
from memadvisor.units import counted, format_bytes, format_seconds

_WORTH_NAMING = 0.2  # of the peak: states that could lie elsewhere
_COUNTED_AS_NOTHING = (
    " What they and compute slow each other at the same time, and how far ranks get out of step, is not known and counted as "
    "nothing, so that steps are rather predicted too short: `memadvisor calibrate -o hardware.json` measures it, for "
    "`--hardware hardware.json`."
)


def notes(run: Run, plays: Plays, plain: CapturedStep, found: list[RankedPlan]) -> Iterator[str]:
    """Of the plans that a search has found for the step `plain`, from best to worst."""
    yield from size_notes(run)
    yield from _time_notes(run, plain)
    yield from _precision_notes(plays.asked.precision)
    yield from _autocast_notes(plays.asked.autocast, plain, found)
    yield from _compression_notes(plays.asked.compression)
    yield from _local_sgd_notes(plays.asked.local_sgd)
    yield from algorithms_notes(found[0].plan.algorithms)
    yield from _coding_notes(plays.asked.optimizer_bits, plays.transfers)
    yield from model_notes(run.ranks[0], plays.models, plain, knows_tier=plays.transfers is not None)
    yield from _unit_notes(run, plain, plays.num_ranks)
    yield from _derivative_notes(run, plain)
    yield from _repeat_notes(run, plain)
    yield from _checkpoint_notes(run, plain, plays.budget_bytes)
    yield from _run_notes(run, plays.num_ranks, plays.times)
    yield from _start_notes(plain, plays, found)
    yield from _outside_notes(run, plain, plays.num_ranks)
    yield from extrapolation_notes(found, plain, plays.times)
    yield from _transfer_notes(found, plays.transfers)
    yield from _tier_notes(plain, plays)
    yield from _allocator_notes(plain, plays.settings)
    yield from card_notes(run, plays.budget_bytes)


def size_notes(run: Run) -> Iterator[str]:
    """Plans are for steps as large as the traced one."""
    larger = larger_steps(run.ranks)
    if larger is not None:
        yield f"{larger.in_words} What fits here may not fit there."


def _time_notes(run: Run, plain: CapturedStep) -> Iterator[str]:
    """Predicted times are made of measured ones."""
    time = step_time(run.rank(plain.rank))
    if time is not None and time.unsteady is not None:
        yield (
            f"All step times rest on that of {time.unsteady}: no step was steady. They may be far too long; profile the script "
            "for more steps where they matter."
        )


def _unit_notes(run: Run, plain: CapturedStep, num_ranks: int) -> Iterator[str]:
    yield from stage_notes(run, plain, num_ranks)
    if no_unit_ran(plain):
        yield (
            "No unit of the model was seen to run by itself, so no plan recomputes any. Where torch.compile or torch.export makes "
            "one graph of them all, there may be plans without it that need far less memory; where the script works on "
            "parameters without calling the modules that hold them, or calls these by other methods than `forward` (a flow's "
            "inverse), there is no call that could be repeated."
        )
    rank = run.rank(plain.rank)
    blocks = {unit.name for unit in plain.units if unit.is_block} & units_that_ran(plain)
    own = [module.name for module in rank.modules if module.is_own_forward and module.name in blocks]
    if own:
        more = f" and {len(own) - 1} more" if len(own) > 1 else ""
        yield (
            f"The script has put a forward of its own in place of that of {own[0] or 'the model'}{more}, or compiles it in place: no "
            "plan recomputes what it has changed so."
        )
    transformed = sorted(blocks & modules_transformed(rank))
    if transformed:
        more = f" and {len(transformed) - 1} more" if len(transformed) > 1 else ""
        yield (
            f"The script calls {transformed[0] or 'the model'}{more} inside a transform of torch.func (vmap, grad), where nothing runs "
            "again by itself: no plan recomputes that."
        )


def _derivative_notes(run: Run, plain: CapturedStep) -> Iterator[str]:
    """Why units are not recomputed that autograd goes through for a derivative and for the loss, and what is left to do."""
    rank = run.rank(plain.rank)
    units = [unit for unit in units_differentiated(rank) if unit not in plain.recomputable]
    if not units:
        return
    more = f" and {len(units) - 1} more" if len(units) > 1 else ""
    yield (
        f"The loss is made of a derivative (create_graph=True): what {units[0] or 'the model'}{more} keep{'s' * (not more)} is asked "
        "for by that and again by the loss's backward, and no plan here recomputes it: what more than two backwards ask for, "
        "what one asks for that enters a unit in its middle, and what several ranks or a GPU hold meanwhile, is not predicted. "
        f"{_checkpoints_text(rank)} `memadvisor run "
        "--policy every-layer` recomputes every block without a change of the script, and measures what that brings."
    )


def _repeat_notes(run: Run, plain: CapturedStep) -> Iterator[str]:
    """Why units are not recomputed that several backwards of one graph go through, and what is left to do."""
    rank = run.rank(plain.rank)
    units = [unit for unit in units_repeated(rank) if unit not in plain.recomputable]
    if not units or units_differentiated(rank):
        return
    more = f" and {len(units) - 1} more" if len(units) > 1 else ""
    yield (
        f"Several backwards go through one graph (retain_graph=True): what {units[0] or 'the model'}{more} keep{'s' * (not more)} is "
        "asked for by each, and no plan here recomputes it: what several ranks or a GPU hold meanwhile, and units that not all of them up "
        f"to the last go through, is not predicted. {_checkpoints_text(rank)} `memadvisor run --policy every-layer` recomputes "
        "every block without a change of the script, and measures what that brings."
    )


def _checkpoints_text(rank: RankRun) -> str:
    """What `show` says of the script's own checkpoints."""
    found = predicted_checkpoints(rank)
    best = found.best(1) if found is not None else ()
    if found is not None and best and best[0].peak_bytes is not None:
        row, count = best[0], len(best[0].modules)
        what = f"{row.name} ({count} {row.type_name})" if count > 1 else row.name or "the model"
        return (
            f"Checkpoints written into the script, of {what}, are predicted to lower the peak from "
            f"{format_bytes(found.peak_bytes)} to {format_bytes(row.peak_bytes)} (`memadvisor show`, If checkpointed)."
        )
    if len(differentiated_backwards(rank)) > 1:
        return "What checkpoints written into the script would do is not predicted where there are several derivatives."
    return (
        "Checkpoints written into the script are not predicted to lower the peak either (`memadvisor show`)."
    )


def _checkpoint_notes(run: Run, plain: CapturedStep, budget_bytes: int) -> Iterator[str]:
    """What checkpoints of the script's own cost, and whether it needs them."""
    own = own_checkpoints(run.rank(plain.rank))
    if own is None or not own.units:
        return
    more = f" and {len(own.units) - 1} more" if len(own.units) > 1 else ""
    then = (
        "which this memory holds: turn them off."
        if own.peak_bytes <= budget_bytes
        else "and of a run that is profiled so, a plan recomputes no more than the memory asks for."
    )
    yield (
        f"The script checkpoints units itself ({own.units[0] or 'the model'}{more}), which takes {format_seconds(own.again_s)} "
        f"of the step and which no plan undoes. Without that the step is predicted to peak at about "
        f"{format_bytes(own.peak_bytes)}, {then}"
    )


def _start_notes(plain: CapturedStep, plays: Plays, found: list[RankedPlan]) -> Iterator[str]:
    """Where steps may hold less than the model."""
    whole_bytes = sum(states.parameter_bytes for states in plain.states.values())
    is_shared = plays.num_ranks > 1 and not plain.shard_groups
    if is_shared and whole_bytes > plays.budget_bytes and any(each.fits for each in found):
        yield (
            f"What fits is said of steps. Until the script wraps its model, or first calls it, each rank has all "
            f"{format_bytes(whole_bytes)} of its parameters, over the budget."
        )


def _outside_notes(run: Run, plain: CapturedStep, num_ranks: int) -> Iterator[str]:
    """Memory that the process has and no peak: as weights that transformers maps from a file. The engine of several ranks has
    parameters in buffers of its own, which are the allocator's."""
    states = model_states(run.rank(plain.rank), run.plan) if num_ranks == 1 else None
    if states is not None and states.outside_text is not None:
        yield f"{states.outside_text} No budget and no plan's peak has them, either."


def _coding_notes(optimizer_bits: int | None, transfers: TransferTimes | None) -> Iterator[str]:
    if optimizer_bits is not None and transfers is not None:
        yield f"Every plan is lossy: {optimizer_bits_text(optimizer_bits)}"
        yield f"What coding takes is predicted from its measured throughput ({transfers.source})."


def chunk_notes(chunked: ChunkedLoss | None, again_s: float) -> Iterator[str]:
    """Of plans with a loss in chunks. again_s: what the layer's product takes once more."""
    if chunked is None:
        return
    yield f"Results of every plan are not bit for bit the same: {chunked_loss_text()}"
    yield (
        f"The output of {chunked.layer!r} is made {chunked.rows} rows at a time, and once more in the backward, which takes "
        f"{format_seconds(again_s)} of a step, as recorded for all rows at once. Its weights must be there until the loss: their "
        "unit is of ZeRO stage 2 where others are of stage 3, and plans with parameters elsewhere are left out."
    )


def fused_notes(plain: CapturedStep, is_timed: bool) -> Iterator[str]:
    """Of plans with fused updates. is_timed: whether this machine's rate of them was measured."""
    yield f"Results of every plan are not bit for bit the same: {fused_updates_text()}"
    updates_s = sum(s.duration_s for s in plain.segments if s.phase == "optimizer")
    yield (
        f"A whole update is taken for {format_seconds(updates_s)}: as recorded, or as its bytes take at the measured rate of a "
        "fused AdamW where that is less."
        if is_timed
        else f"Their time is taken for that of the recorded updates, {format_seconds(updates_s)}, which is longer. `memadvisor "
        "calibrate -o hardware.json` measures it, for --hardware hardware.json."
    )


def _transfer_notes(found: list[RankedPlan], transfers: TransferTimes | None) -> Iterator[str]:
    units = [unit for ranked in found for unit in ranked.plan.units]
    tiers = {
        "parameters and gradients": {unit.parameter_tier for unit in units} - {"device"},
        "optimizer state": {unit.optimizer_tier for unit in units} - {"device"},
        "activations": {unit.activation_tier for unit in units} - {"device"},
    }
    moved = [what for what, where in tiers.items() if where]
    if not moved or transfers is None:
        return
    to_host = any("host" in where for where in tiers.values())
    yield f"Transfers of {' and '.join(moved)} are predicted from {rates_text(transfers, to_host=to_host)}."
    if any("disk" in where for where in tiers.values()):
        yield (
            "The page cache is taken to hold what is on disk: where others need that memory, transfers are as slow as the "
            "disk."
            if transfers.is_cached
            else "The page cache is taken to hold nothing of what is on disk, and may make transfers faster."
        )


def rates_text(transfers: TransferTimes, *, to_host: bool) -> str:
    """Where the rates of transfers are from: measured, or a data sheet's."""
    if to_host and transfers.sheet:
        return (
            f"a data sheet's rate ({transfers.sheet}), which none quite reaches; `memadvisor calibrate -o hardware.json` "
            "measures it, for --hardware"
        )
    return f"measured bandwidths ({transfers.source})"


def _tier_notes(plain: CapturedStep, plays: Plays) -> Iterator[str]:
    """Where states are much of the peak, and no tier's bandwidth is known."""
    held = sum(states.parameter_bytes + states.optimizer_bytes for states in plain.states.values())
    if plays.transfers is None and not plain.shard_groups and held >= _WORTH_NAMING * plain.peak_bytes:
        yield (
            "No plan keeps states on disk, since no bandwidth of one is known: `memadvisor calibrate -o hardware.json` measures "
            "it, and with `--hardware hardware.json` plans may."
        )


def _allocator_notes(step: CapturedStep, settings: AllocatorSettings | None) -> Iterator[str]:
    if settings is None:
        return
    yield (
        "A plan fits if what the CUDA caching allocator is predicted to reserve is within the budget"
        f"{f' (settings: {text})' if (text := settings_text(settings)) else ''}; "
        "the CUDA context and NCCL's buffers come on top."
    )
    if not step.device.startswith("cuda"):
        yield "Recorded on a CPU: what operators allocate inside themselves on a GPU may differ."


def _precision_notes(precision: Precision) -> Iterator[str]:
    if precision.has_masters:
        yield f"Every plan changes the updates: {masters_text(precision)}"
    if precision.is_lossy:
        yield f"Every plan is lossy: {loss_text(precision)}"
    if precision.param_dtype not in (None, "float32"):
        yield (
            f"Recorded activations of the model are taken to be in {precision.param_dtype}; times of compute are those "
            "recorded."
        )


def _autocast_notes(autocast: str | None, plain: CapturedStep, found: Sequence[RankedPlan]) -> Iterator[str]:
    if autocast is None:
        return
    yield f"Every plan is lossy: {autocast_loss_text(autocast)}"
    yield "Times of compute are those recorded: what bfloat16 makes faster, or slower, is not in them."
    for one in found:
        plan, peak_bytes = one.plan, one.prediction.peak_bytes
        runs_again = plan.recomputed_units or plan.parted_units
        is_plain = plan.num_ranks == 1 and not runs_again and not one.changes_script
        if is_plain and peak_bytes > plain.peak_bytes:
            yield (
                f"Autocast alone raises the peak from {format_bytes(plain.peak_bytes)} to {format_bytes(peak_bytes)}: its copies "
                "of weights are more than what activations lose."
            )
            return


def _compression_notes(compression: Compression) -> Iterator[str]:
    if compression.is_lossy:
        yield f"Every plan is lossy: {compression_loss_text(compression)}"
        yield "Making and reading compressed messages takes compute time that is not predicted."


def _local_sgd_notes(local_sgd: LocalSgd | None) -> Iterator[str]:
    if local_sgd is not None:
        yield f"Every plan is lossy: {local_sgd_loss_text(local_sgd)}"
        yield "Predicted times and bytes are those of the mean step between two averages; a single step has none, or all."


def _run_notes(run: Run, num_ranks: int, times: CollectiveTimes | None) -> Iterator[str]:
    recorded = run.manifest.world_size
    if num_ranks != recorded:
        yield (
            f"Recorded with {recorded} rank{'s' * (recorded != 1)}, planned for {num_ranks}: each rank is assumed to "
            "keep its own micro-batch, so the batch of a step grows or shrinks with the ranks."
        )
    rank = run.ranks[0]
    is_own = min(num_ranks, recorded) > 1 and rank.process.has_ddp is False and not rank.shard_groups
    if is_own and any(module.type_name == "FullyShardedDataParallel" for module in rank.modules):
        yield (
            "The script shards its model by FullyShardedDataParallel (FSDP1). `run` applies no plan of several ranks to it but what "
            "all of them recompute alike, chosen by hand (`run --policy every-layer`); to FSDP2 (`fully_shard`) it applies plans."
        )
    elif is_own:
        yield (
            "The script's ranks train without DistributedDataParallel and FSDP2. `run` applies plans for several ranks to scripts "
            "that wrap their model in either, and to others what all ranks recompute alike (`run --policy`)."
        )
    if run.missing_ranks:
        yield f"{counted(len(run.missing_ranks), 'rank')} left nothing readable; the plan rests on the others."
    if times is not None:
        yield f"Times of collectives: {times.kind} ({times.source}).{_COUNTED_AS_NOTHING if times.slowdown is None else ''}"
