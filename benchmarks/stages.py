"""Each ZeRO stage, predicted from a plain run and measured under its plan: step time, waiting and peak.

The sample GPT is profiled under DDP; a plan is made of each way of sharding, with what the simulator says of it, and
run. In every round each of them trains anew, the plain one too, in an order that rotates; the table gives medians over
rounds of the slowest rank's. Predictions start from the plain run of the first round; where the machine has become
faster or slower since, so has the plain run, which is shown too. Waiting is that of the traced step, which is slower.

    python benchmarks/stages.py [--rounds 3] [--hardware hardware.json] [--sample-options "--layers 6 --dim 256"]

Without --hardware the machine is calibrated first. Nothing else should run meanwhile.
"""

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import memadvisor
from memadvisor.analyzers.segments import captured_step
from memadvisor.cost.collectives import times_from_curves
from memadvisor.cost.simulate import simulate
from memadvisor.hardware.load import load_hardware
from memadvisor.plan import Plan, UnitPlan, fingerprint
from memadvisor.plan_file import save_plan
from memadvisor.write_schedule import write_schedule

SCRIPT = Path(__file__).resolve().parents[1] / "samples" / "train_gpt.py"
# Name: stage, whether reductions and gathers overlap, gather depth, whether the update is in the backward.
WAYS = {
    "0": (0, False, 0, False),
    "1": (1, False, 0, False),
    "1 overlap": (1, True, 0, False),
    "2": (2, False, 0, False),
    "2 overlap": (2, True, 0, False),
    "3": (3, False, 0, False),
    "3 overlap": (3, True, 1, False),
    "3 early": (3, True, 1, True),
}


def command(*words):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "memadvisor", *map(str, words)],
        capture_output=True,
        text=True,
        env=environment,
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    return done.stdout


def plan_of(run, step, times, way):
    stage, overlap, depth, early = way
    plan = Plan(
        fingerprint=fingerprint((p.name, p.shape, p.dtype) for p in run.ranks[0].parameters),
        num_ranks=run.manifest.world_size,
        zero_stage=stage,
        policy="chosen",
        units=tuple(UnitPlan(name=unit.name, zero_stage=stage, recompute=False) for unit in step.units),
        micro_batch_size=step.micro_batch_size,
        grad_accum=step.num_micro_batches,
        overlap=overlap,
        gather_depth=depth,
        update_in_backward=early,
    )
    return replace(plan, prediction=simulate(step, write_schedule(plan, step.units), times).prediction())


def measured(directory):
    """Step time, waiting and peak of the rank that has most of each."""
    ranks = json.loads(command("show", directory, "--json"))["ranks"]
    return (
        max(rank["step_time_s"] for rank in ranks),
        max(rank["communication"]["exposed_s"] for rank in ranks),
        max(rank["peak"]["allocated_bytes"] for rank in ranks),
    )


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--hardware", type=Path)
    parser.add_argument("--sample-options", default="--layers 6 --dim 256 --steps 14", type=shlex.split)
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        scratch = Path(scratch)
        script = (SCRIPT, *args.sample_options)
        plain = scratch / "plain"
        hardware = args.hardware or scratch / "hardware.json"
        if args.hardware is None:
            command("calibrate", "--ranks", args.nproc, "-o", hardware)
        command("profile", "--nproc", args.nproc, "--out", plain, *script)
        run = memadvisor.load(plain)
        step = captured_step(run)
        loaded = load_hardware(str(hardware))
        times = times_from_curves(
            loaded.collectives, args.nproc, loaded.source, loaded.overlap, engine=loaded.engine
        )
        plans = {name: plan_of(run, step, times, WAYS[name]) for name in args.ways}
        for name, plan in plans.items():
            save_plan(plan, scratch / f"{name}.json")
        found = {name: [] for name in ("plain", *plans)}
        for number in range(args.rounds):
            names = list(found)
            for name in names[number % len(names) :] + names[: number % len(names)]:
                out = scratch / f"{name} {number}"
                how = ("profile",) if name == "plain" else ("run", "--plan", scratch / f"{name}.json")
                command(*how, "--nproc", args.nproc, "--out", out, *script)
                found[name].append(measured(out))
        report(step, plans, found, args)


def report(step, plans, found, args):
    medians = {
        name: [statistics.median(column) for column in zip(*rows, strict=True)]
        for name, rows in found.items()
    }
    print(f"{args.nproc} ranks, {args.rounds} rounds, {shlex.join(args.sample_options)}")
    print(
        f"plain: {1e3 * step.step_time_s:.0f} ms when planned from, {1e3 * medians['plain'][0]:.0f} ms in the rounds"
    )
    print(
        f"{'way':<10} {'step ms':>8} {'measured':>9} {'error':>8} {'waiting ms':>11} {'measured':>9} {'peak bytes':>12} {'error':>7}"
    )
    for name, plan in plans.items():
        step_s, waiting_s, peak_bytes = medians[name]
        told = plan.prediction
        print(
            f"{name:<10} {1e3 * told.step_time_s:>8.0f} {1e3 * step_s:>9.0f} "
            f"{100 * (told.step_time_s / step_s - 1):>+6.1f} % {1e3 * told.exposed_communication_s:>11.0f} "
            f"{1e3 * waiting_s:>9.0f} {peak_bytes:>12.0f} {told.peak_bytes - peak_bytes:>+7.0f}"
        )


if __name__ == "__main__":
    main()
