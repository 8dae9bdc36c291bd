"""Plans of `advise` at budgets below the plain peak, beside every-layer, sqrt and selective: predicted and measured peak
and time. At each budget the fastest plan of whole units, that with parts of units, and that which keeps outputs of operators.

A plain profile of a few steps is what `advise` plans from. Each plan is applied to a fresh model and profiled, which
gives its measured peak. Then all of them take steps in turn, round after round, without the recorder: measured time
is CPU seconds of the fastest step, as a multiple of the plain one's; predicted time is as a multiple of the plain one
too. "by hand" is torch.utils.checkpoint around each block. Losses are compared with the plain ones, all of them.
"sac_ilp" is torch's own planner (benchmarks/torch_sac.py), where pulp and pwlf are installed.

With `--hardware`, what `memadvisor calibrate --disk DIR` has written, the first plan of each budget that may move things to
the disk and, where nothing else fits, split the micro-batch; times are then those of the clock on the wall. Losses of a
split are compared with those of the split training.

    python benchmarks/recomputation.py [--rounds 5] [--models gpt resnet lstm unet sample-gpt sample-cnn]
        [--budgets 80 60 40 30 20] [--hardware hardware.json]
"""

import argparse
import gc
import multiprocessing
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import memadvisor
from benchmarks.recomputation_models import MODELS, batch
from benchmarks.torch_sac import TorchPlan, missing_packages, plans_of_torch, put_in
from memadvisor.engines.apply import apply
from memadvisor.hardware.load import load_hardware
from memadvisor.plan import Plan
from memadvisor.planning.advise import advise
from memadvisor.policies import blocks_of
from samples import train_gpt
from tests.analyzers.checkpointed import Again, loss_of

STEPS = 10
# With each of their modules to choose from, sac_ilp's solver stops at its limit of 3 minutes a budget.
BLOCKS_ALONE = ("gpt", "sample-gpt")


def policy(name):
    return Plan(num_ranks=1, zero_stage=0, policy=name)


def loss_on(model, x, target):
    return model(x, target) if isinstance(model, train_gpt.GPT) else loss_of(model, x, target)


def num_parts(plan):
    """Of a batch, one micro-batch each."""
    return (plan.grad_accum or 1) if isinstance(plan, Plan) else 1


def micro_batches(given, parts):
    """Pieces of a batch, in memory that is not torch's, as what a data loader has not handed out yet."""
    return list(zip(*([piece.numpy().copy() for piece in t.chunk(parts)] for t in given), strict=True))


def stepped(model, optimizer, pieces):
    """The loss of one step; each micro-batch is let go of when it has been used."""
    parts, total = len(pieces), 0.0
    while pieces:
        loss = loss_on(model, *map(torch.tensor, pieces.pop(0))) / parts
        loss.backward()
        total += float(loss.detach())
        del loss
    optimizer.step()
    optimizer.zero_grad()
    return total


def trained(make, plan, steps, parts=None, clock=time.process_time):
    """Losses and seconds of the fastest step: with a plan applied, or with these blocks checkpointed by hand."""
    torch.manual_seed(0)
    model = make()
    if isinstance(plan, TorchPlan):
        put_in(plan, model)
    if isinstance(plan, tuple):
        for name in plan:
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, Again(model.get_submodule(name)))
    applied = apply(plan, model) if isinstance(plan, Plan) else None
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    try:
        taken, losses = [], []
        for step in range(steps):
            pieces = micro_batches(batch(model, step), parts or num_parts(plan))
            start_s = clock()
            losses.append(stepped(model, optimizer, pieces))
            taken.append(clock() - start_s)
    finally:
        if applied is not None:
            applied.remove()
    return losses, min(taken)


def recorded(make, plan, steps):
    gc.collect()  # models of plans before this one, which would count towards every peak
    with tempfile.TemporaryDirectory() as scratch:
        with memadvisor.profile(Path(scratch) / "run", trace_step=1):
            trained(make, plan, steps)
        return memadvisor.load(Path(scratch) / "run")


def plans_of(run, budgets, hardware):
    rank = run.ranks[0]
    plans = {"plain": None, "by hand": blocks_of(rank.units)}
    plans |= {name: policy(name) for name in ("every-layer", "sqrt", "selective")}
    for percent in budgets:
        advice = advise(run, memory_bytes=rank.traced_step.peak_allocated_bytes * percent // 100)
        found = [ranked.plan for ranked in advice.plans if ranked.fits and not ranked.changes_script]
        for plan in reversed(found):  # of each kind the first one stays
            kind = (
                "operators"
                if any(unit.kept for unit in plan.units)
                else "parts"
                if plan.parted_units
                else "units"
            )
            plans[f"{percent} %, {kind}"] = plan
        if hardware is not None:
            budget_bytes = rank.traced_step.peak_allocated_bytes * percent // 100
            if (plan := advise(run, memory_bytes=budget_bytes, hardware=hardware).best) is not None:
                plans[f"{percent} %, disk"] = plan
    return plans


def plans_of_torch_for(name, budgets_bytes, blocks):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return plans_of_torch(MODELS[name], lambda model: batch(model, 0), loss_on, budgets_bytes, blocks)


def torch_plans_of(name, run, budgets):
    """What sac_ilp decides for each budget; where there is nothing to measure, this is printed with the reason."""
    if missing := missing_packages():
        print(f"sac_ilp is left out: {' and '.join(missing)} not installed")
        return {}
    rank = run.ranks[0]
    budgets_bytes = {percent: rank.traced_step.peak_allocated_bytes * percent // 100 for percent in budgets}
    blocks = blocks_of(rank.units) if name in BLOCKS_ALONE else None
    # What its trackers leave behind would count towards every peak here.
    with multiprocessing.get_context("spawn").Pool(1) as elsewhere:
        found = elsewhere.apply(plans_of_torch_for, (name, budgets_bytes, blocks))
    plans = {}
    for percent, plan in found.items():
        if isinstance(plan, str):
            print(f"{percent} %, sac_ilp: {plan}")
        else:
            plans[f"{percent} %, sac_ilp"] = plan
    return plans


def peaks_of(make, plans):
    """Measured peaks. Plans of torch that do not run are taken out of `plans`, and printed."""
    peaks = {}
    for name, plan in list(plans.items()):
        try:
            peaks[name] = recorded(make, plan, 3).ranks[0].traced_step.peak_allocated_bytes
        except RuntimeError as error:
            if not isinstance(plan, TorchPlan):
                raise
            print(f"{name}: raises {error}")
            del plans[name]
    return peaks


def foretold(plan, plain_s):
    """(peak, time as a multiple of the plain step's, what is done) as predicted; None where nobody predicts."""
    if isinstance(plan, TorchPlan):
        operators = [keep for module in plan.kept.values() for _, keep in module]
        what = f"{len(plan.kept)} modules, {sum(operators)} of {len(operators)} operators kept; "
        return plan.peak_bytes, plan.step_time_ratio, what
    if (predicted := getattr(plan, "prediction", None)) is None:
        return None, None, ""
    kept = sum(len(unit.kept) for unit in plan.units)
    what = f"{len(plan.recomputed_units)} units, {len(plan.stretches)} stretches, parts of {len(plan.parted_units)}, "
    what += f"{kept} outputs kept; "
    away = [unit for unit in plan.units if unit.parameter_tier != "device"]
    moved = [unit for unit in plan.units if unit.activation_tier != "device"]
    if away or moved or num_parts(plan) > 1:
        what += f"parameters of {len(away)} and activations of {len(moved)} units on disk, {num_parts(plan)} parts; "
    return predicted.peak_bytes, predicted.step_time_s / plain_s, what


def compare(name, budgets, num_rounds, hardware):
    """Print the model's table; returns how far off our predicted times are, as fractions of the measured ones."""
    make = MODELS[name]
    run = recorded(make, None, STEPS)
    plans = plans_of(run, budgets, hardware) | torch_plans_of(name, run, budgets)
    peaks = peaks_of(make, plans)
    losses, fastest_s = {}, dict.fromkeys(plans, float("inf"))
    clock = time.process_time if hardware is None else time.perf_counter
    for _ in range(num_rounds):
        for plan_name, plan in plans.items():
            losses[plan_name], step_s = trained(make, plan, 3, clock=clock)
            fastest_s[plan_name] = min(fastest_s[plan_name], step_s)
    plain_losses = {parts: trained(make, None, 3, parts)[0] for parts in set(map(num_parts, plans.values()))}
    plain_s = advise(run, memory_bytes=2**60).measured_step_time_s
    print(f"{name}: plain peak {peaks['plain']} bytes, {1e3 * fastest_s['plain']:.1f} ms a step")
    print(
        f"{'plan':<16} {'predicted peak':>15} {'measured':>12} {'of plain':>9} {'predicted time':>15} "
        f"{'measured':>9}  recomputed"
    )
    errors = []
    for plan_name in [n for n in plans if n != "plain"]:
        peak_bytes, ratio, what = foretold(plans[plan_name], plain_s)
        measured = fastest_s[plan_name] / fastest_s["plain"]
        is_alike = losses[plan_name] == plain_losses[num_parts(plans[plan_name])]
        if ratio is not None and not isinstance(plans[plan_name], TorchPlan):
            errors.append(ratio / measured - 1)
        print(
            f"{plan_name:<16} {peak_bytes or '-':>15} {peaks[plan_name]:>12} "
            f"{100 * peaks[plan_name] / peaks['plain']:>7.1f} % "
            f"{f'{ratio:.3f}' if ratio else '-':>15} {measured:>9.3f}  "
            f"{what}losses {'equal' if is_alike else 'DIFFER'}",
            flush=True,
        )
    return errors


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--budgets", nargs="+", type=int, default=[80, 60, 40, 30, 20])
    parser.add_argument("--hardware", type=load_hardware)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, 1 thread, {args.rounds} rounds")
    errors = [
        error for name in args.models for error in compare(name, args.budgets, args.rounds, args.hardware)
    ]
    if errors:
        sizes = [abs(error) for error in errors]
        print(f"predicted times are off by {statistics.median(sizes):.1%} (median), {max(sizes):.1%} at most")


if __name__ == "__main__":
    main()
