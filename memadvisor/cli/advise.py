"""`memadvisor advise`: rank plans for a memory budget, show them, write the best one."""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from memadvisor.analyzers.captured_pipeline import is_pipeline
from memadvisor.autocast_workspaces import workspaces_for
from memadvisor.cli.advise_by_rank import others_given
from memadvisor.cli.advise_front import front_table, recomputed_text
from memadvisor.cli.advise_json import advice_to_json
from memadvisor.cli.apply_command import NOT_WRITTEN, apply_command
from memadvisor.cli.compression import add_compression_options, compression_of, local_sgd_of
from memadvisor.cli.precision import (
    add_autocast,
    add_chunked_loss,
    add_fused_updates,
    add_optimizer_bits,
    add_precision_options,
    precision_of,
)
from memadvisor.cli.printing import stdout_console
from memadvisor.cli.summary_script import script_changes
from memadvisor.cli.tables import printable
from memadvisor.errors import UsageError
from memadvisor.hardware.load import load_hardware
from memadvisor.plan import Plan
from memadvisor.plan_file import save_plan
from memadvisor.plan_words import parts_text
from memadvisor.planning.advise import Advice, advise
from memadvisor.planning.budget import budget_bytes
from memadvisor.planning.learn import Learnt
from memadvisor.planning.machine import UnknownCollectivesError
from memadvisor.planning.named import POLICIES
from memadvisor.planning.own_updates import own_updates
from memadvisor.planning.ranked import RankedPlan
from memadvisor.planning.tensor_parallel import (
    UnlikeRanksError,
    is_of_its_own,
    is_tensor_parallel,
    none_applies,
)
from memadvisor.run.run import Run
from memadvisor.run.store import load_run
from memadvisor.unit_ranges import unit_ranges
from memadvisor.units import counted, format_bytes, format_seconds

# Changes of the script that plans make where they are asked to.
_ASKED = {
    "autocast": "--autocast bf16",
    "chunked_loss": "--chunked-loss auto",
    "fused_updates": "--fused-updates",
}


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="RUN", help="the directory that `memadvisor profile` wrote")
    parser.add_argument(
        "--memory",
        metavar="SIZE",
        help="budget of one rank: 24GiB, or 60%% of the run's own peak; without it what each budget would cost is printed",
    )
    parser.add_argument(
        "--gpus",
        metavar="N|8xH100[,nodes=4]",
        help="ranks to plan for (default: those of the run); or accelerators, or a file of calibrate (2xhardware.json), "
        "to search layouts for (docs/captured-layouts.md)",
    )
    parser.add_argument(
        "--batch",
        type=int,
        metavar="N",
        help="with accelerators: samples of a step over all (default: the run's)",
    )
    parser.add_argument(
        "--micro-batch",
        type=int,
        metavar="N",
        help="plan for micro-batches of N samples, more than were recorded: for those that do not fit yet",
    )
    parser.add_argument(
        "--hardware", metavar="FILE|NAME", help="a file of `memadvisor calibrate`, or a device"
    )
    parser.add_argument(
        "--policy", metavar="NAME", help=f"show, and write, the plan of a policy too: {', '.join(POLICIES)}"
    )
    parser.add_argument(
        "--learn",
        nargs="+",
        action="extend",
        default=[],
        metavar="RUN",
        help="correct predicted times by these runs of plans, of this model on this machine",
    )
    parser.add_argument(
        "--near-ranks",
        type=int,
        metavar="N",
        help="N ranks that follow each other are of one node: offer second copies among them (hpZ)",
    )
    add_precision_options(parser)
    add_autocast(parser)
    add_optimizer_bits(parser)
    add_fused_updates(parser)
    add_chunked_loss(parser)
    add_compression_options(parser)
    parser.add_argument("-o", "--output", metavar="FILE", help="write the best plan that fits")
    parser.add_argument("--json", action="store_true", help="print JSON with stable keys")


def run(arguments: argparse.Namespace) -> int:
    """Exit code 0 where a plan fits, or no budget is given, 1 where none does; then nothing is written."""
    recorded = load_run(arguments.path)
    if is_pipeline(recorded):
        from memadvisor.cli.advise_pipeline import run_pipeline  # another question, too

        return run_pipeline(arguments, recorded)
    if is_tensor_parallel(recorded):
        from memadvisor.cli.advise_tensor_parallel import run_tensor_parallel  # and another

        return run_tensor_parallel(arguments, recorded)
    if is_of_its_own(recorded) and not others_given(arguments):
        from memadvisor.cli.advise_tensor_parallel import run_of_its_own

        try:
            return run_of_its_own(arguments, recorded)
        except UsageError as error:
            if recorded.missing_ranks:  # which is no fault of the script's
                raise
            if own_updates(recorded.ranks[0]) is not None or isinstance(error, UnlikeRanksError):
                raise none_applies(error) from None
            # What plans would give is said, and that none applies; a measurement for that is not asked for.
            try:
                return _run_ranked(arguments, recorded)
            except UnknownCollectivesError:
                raise none_applies(error) from None
    return _run_ranked(arguments, recorded)


def _run_ranked(arguments: argparse.Namespace, recorded: Run) -> int:
    """The same of plans for replicas, or for one rank."""
    num_ranks = _num_ranks(arguments.gpus)
    if num_ranks is None and arguments.gpus is not None:
        from memadvisor.cli.advise_layouts import run_layouts  # another question, with modules of its own

        return run_layouts(arguments)
    if arguments.batch is not None:
        raise UsageError(
            "--batch goes with accelerators to search layouts for.",
            hint="write --gpus 8xH100, or --micro-batch N for the samples of a micro-batch.",
        )
    has_budget = arguments.memory is not None or not _may_go_without(arguments, recorded)
    advice = advise(
        recorded,
        memory_bytes=budget_bytes(arguments.memory if has_budget else "100%", recorded),
        num_ranks=num_ranks,
        hardware=None if arguments.hardware is None else load_hardware(arguments.hardware),
        precision=precision_of(arguments),
        compression=compression_of(arguments),
        local_sgd=local_sgd_of(arguments),
        optimizer_bits=arguments.optimizer_bits,
        fused_updates=bool(arguments.fused_updates),
        chunked_loss=arguments.chunked_loss,
        autocast=arguments.autocast,
        policy=arguments.policy,
        learn_from=[load_run(path) for path in arguments.learn],
        near_ranks=arguments.near_ranks,
        micro_batch=arguments.micro_batch,
        workspaces_of=workspaces_for(recorded),
    )
    if not has_budget:
        _print_prices(advice, recorded, stdout_console())
        return 0
    chosen = advice.best if advice.named is None else advice.named.plan
    if chosen is not None and arguments.output is not None:
        save_plan(chosen, Path(arguments.output))
    if arguments.json:
        print(json.dumps(advice_to_json(advice), indent=1))
    else:
        _print(advice, recorded, stdout_console(), arguments.output)
    return 0 if chosen is not None else 1


def _may_go_without(arguments: argparse.Namespace, run: Run) -> bool:
    """Whether no budget is needed: what other options ask for, and plans of ranks that are no replicas, depends on one."""
    return not is_of_its_own(run) and not (
        arguments.output or arguments.json or arguments.policy or arguments.micro_batch
    )


def _num_ranks(text: str | None) -> int | None:
    """None where it is no number."""
    try:
        return None if text is None else int(text)
    except ValueError:
        return None


def _print(advice: Advice, run: Run, console: Console, output: str | None) -> None:
    ranks = counted(advice.num_ranks, "rank")
    console.print(
        Text(
            f"Budget {format_bytes(advice.budget_bytes)} a rank, {ranks}{_fitting(advice)}. Measured without a plan"
            f"{_recorded_size(advice)}: peak {format_bytes(advice.measured_peak_bytes)}, step "
            f"{format_seconds(advice.measured_step_time_s)}. Everything below is predicted{_asked_size(advice)}."
        )
    )
    console.print(_table(advice))
    changing = [str(order) for order, ranked in enumerate(advice.plans, start=1) if ranked.changes_script]
    if changing:
        plans = f"Plans {', '.join(changing)} need" if len(changing) > 1 else f"Plan {changing[0]} needs"
        console.print(
            f"{plans} another micro-batch, which you set in your script; of those that fit, such plans come last. What is "
            "worked out over a whole micro-batch (a contrastive loss, batch norm) then sees fewer samples, and such a "
            "script trains differently."
        )
    for order, ranked in enumerate(advice.plans[:3], start=1):
        console.print(printable(f"{order}. {ranked.plan.why}"))
        if ranked.plan.recomputed_units:
            console.print(printable(f"   recomputed: {unit_ranges(ranked.plan.recomputed_units)}"))
        if ranked.plan.parted_units:
            console.print(printable(f"   in parts: {parts_text(ranked.plan)}"))
        if ranked.changes_script:
            console.print(
                printable(
                    f"   set in your script: a micro-batch of {ranked.plan.micro_batch_size} (rows of the model's first "
                    f"tensor), gradient accumulation {ranked.plan.grad_accum}"
                )
            )
    if len(advice.front) > 1:
        console.print(front_table(advice))
    if advice.named is not None:
        console.print(printable(_policy_text(advice, advice.named)))
    _print_beside(advice, console)
    _print_ending(advice, run, console, output)


def _print_prices(advice: Advice, run: Run, console: Console) -> None:
    """What every budget would cost, for who has none in mind yet; the run's own peak stands in place of one."""
    ranks = counted(advice.num_ranks, "rank")
    console.print(
        f"No budget is given, {ranks}. Measured without a plan: peak {format_bytes(advice.measured_peak_bytes)}, step "
        f"{format_seconds(advice.measured_step_time_s)}. Everything below is predicted."
    )
    console.print(front_table(advice, has_budget=False))
    _print_beside(advice, console)
    where = shlex.quote(str(run.path))
    console.print("Choose a peak, and have a plan for it written with", soft_wrap=True)
    console.print(printable(f"  memadvisor advise {where} --memory SIZE -o plan.json"), soft_wrap=True)


def _print_beside(advice: Advice, console: Console) -> None:
    """What is no plan, but stands beside plans."""
    alike: dict[tuple[int, float | None], list[str]] = {}
    for each in advice.lossy:
        alike.setdefault((each.peak_bytes, each.step_time_s), []).append(each.option)
    if alike:
        console.print(
            "Lossy, and so never chosen; with one of these the first plan that leaves the script alone would take"
        )
    for (peak_bytes, step_time_s), options in alike.items():
        time = "not known (see calibrate)" if step_time_s is None else format_seconds(step_time_s)
        over = " (over the budget)" if peak_bytes > advice.budget_bytes else ""
        console.print(
            printable(f"   {' or '.join(options)}: peak {format_bytes(peak_bytes)}{over}, step time {time}")
        )
    if advice.script_changes:
        console.print(script_changes(advice.script_changes))
    if advice.learnt is not None:
        console.print(printable(_learnt_text(advice.learnt)))
    for note in advice.notes:
        console.print(printable(f"Note: {note}"))


def _fitting(advice: Advice) -> str:
    """Where nothing fits that is the answer; what would be enough stands at the end."""
    return ": nothing fits" if advice.best is None and advice.named is None else ""


def _recorded_size(advice: Advice) -> str:
    return "" if advice.micro_batch is None else f", with a micro-batch of {advice.recorded_micro_batch}"


def _asked_size(advice: Advice) -> str:
    return "" if advice.micro_batch is None else f", for a micro-batch of {advice.micro_batch}"


def _learnt_text(learnt: Learnt) -> str:
    factors = ", ".join(f"{name.replace('_', ' ')} {factor:.2f}" for name, factor in learnt.factors.items())
    runs = f"{learnt.num_runs} run{'s' * (learnt.num_runs != 1)}"
    return (
        f"Learnt from {runs}: predicted times are multiplied by these factors, kept near 1 where runs are few: {factors}. "
        f"Of these runs' step times the predictions were off by {100 * learnt.error_before:.1f} %, and are by "
        f"{100 * learnt.error_after:.1f} %."
    )


def _print_ending(advice: Advice, run: Run, console: Console, output: str | None) -> None:
    if advice.best is None and advice.named is None:
        console.print(printable(_nothing_fits(advice)))
    elif output is not None:
        what = "Plan 1" if advice.named is None else f"The plan of policy {advice.policy}"
        first = (
            f"set a micro-batch of {advice.micro_batch} in your script, and " if advice.micro_batch else ""
        )
        console.print(printable(f"{what} is written to {output}; {first}apply it with"))
        chosen = advice.best if advice.named is None else advice.named.plan
        num_ranks = chosen.num_ranks if chosen is not None else 1
        console.print(printable("  " + apply_command(run, output, num_ranks)), soft_wrap=True)
    else:
        console.print(NOT_WRITTEN)


def _nothing_fits(advice: Advice) -> str:
    smallest, unchanged = advice.smallest_budget_bytes, advice.smallest_unchanged_bytes
    text = (
        f"Nothing fits {format_bytes(advice.budget_bytes)}. The smallest budget that would is {format_bytes(smallest)} "
        f"({smallest} bytes)"
    )
    if smallest != unchanged:
        text += (
            f", of a plan with smaller micro-batches; with micro-batches as they are {format_bytes(unchanged)} "
            f"({unchanged} bytes)"
        )
    saving = {each.kind for each in advice.script_changes if each.peak_saved_bytes}
    options = [option for kind, option in _ASKED.items() if kind in saving]
    return f"{text}. With {' and '.join(options)} it may be less." if options else f"{text}."


def _policy_text(advice: Advice, named: RankedPlan) -> str:
    """What a policy gives, beside the best plan."""
    ours = named.prediction
    text = f"Policy {advice.policy}: {named.plan.why}"
    if advice.best is None or advice.best.prediction is None:
        return text
    best = advice.best.prediction
    ratio = ours.step_time_s / best.step_time_s if best.step_time_s else 1.0
    return (
        f"{text} A step takes {format_seconds(ours.step_time_s)}, {ratio:.2f} times that of plan 1 "
        f"({format_seconds(best.step_time_s)}, peak {format_bytes(best.peak_bytes)})."
    )


def _table(advice: Advice) -> Table:
    table = Table()
    reserves = any(ranked.prediction.reserved_bytes is not None for ranked in advice.plans)
    headings = ["", "fits", "peak", "step time", "waiting", "recomputed", "micro-\nbatches"]
    shards = advice.num_ranks > 1
    if shards:
        headings.insert(5, "ZeRO")
    if reserves:
        headings.insert(3, "reserved")
    offloads = any(ranked.plan.activation_tiers != {"device"} for ranked in advice.plans)
    if offloads:
        headings.insert(-1, "offloaded")
    for heading in headings:
        table.add_column(heading, justify="left" if heading in ("", "fits") else "right")
    for order, ranked in enumerate(advice.plans, start=1):
        plan, prediction = ranked.plan, ranked.prediction
        batch = "as it is" if plan.micro_batch_size is None else str(plan.micro_batch_size)
        table.add_row(
            str(order),
            "yes" if ranked.fits else "no",
            format_bytes(prediction.peak_bytes),
            *([format_bytes(prediction.reserved_bytes)] if reserves else []),
            format_seconds(prediction.step_time_s),
            format_seconds(prediction.exposed_communication_s + (prediction.exposed_transfer_s or 0.0)),
            *([_stages(plan)] if shards else []),
            f"{recomputed_text(len(plan.recomputed_units), len(plan.parted_units))} of {len(plan.units)}",
            *([str(sum(u.activation_tier != "device" for u in plan.units))] if offloads else []),
            f"{batch} x {plan.grad_accum}",
        )
    return table


def _stages(plan: Plan) -> str:
    """`3`, or `0+3` for several; `3 by 2` where groups of two ranks share. The sentence below says more."""
    stages = sorted({unit.zero_stage for unit in plan.units} or {plan.zero_stage})
    groups = f" by {plan.group_ranks}" if stages[-1] and plan.group_ranks < plan.num_ranks else ""
    return "+".join(map(str, stages)) + groups
