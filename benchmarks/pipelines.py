"""Plans for a pipeline, predicted from its plain run and measured: each rank's peak, and the step.

The sample pipeline, or another script, is profiled, and run with the plans for shares of its first rank's peak, and with
all blocks of all ranks recomputed; in every round each of them trains anew, the plain one too, in turn. Steps are the
slowest rank's median, of the fastest round, and predictions are made from the fastest plain run: what disturbs only
slows. Peaks are those of all rounds, and losses are compared with the plain run's.

    python benchmarks/pipelines.py --nproc 2 [--rounds 1] [--shares 80 60 40] [--script samples/train_pipeline_conv.py]
        [--sample-options "--schedule gpipe"]

Nothing else should run meanwhile, and there should be a processor for each rank: else ranks share them, which no
prediction knows.
"""

import argparse
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
from memadvisor.hardware.load import load_hardware
from memadvisor.plan import Plan
from memadvisor.plan_file import save_plan
from memadvisor.planning.pipelines import advise_pipeline, pipeline_search
from memadvisor.planning.stage_choice import Chosen

SAMPLES = Path(__file__).resolve().parents[1] / "samples"


def trained(arguments, directory, plan=None):
    """The run, and the losses that it has printed."""
    words = ["profile"] if plan is None else ["run", "--plan", plan]
    words += ["--nproc", arguments.nproc, "--out", directory, arguments.script]
    done = subprocess.run(
        [sys.executable, "-m", "memadvisor", *map(str, words), *shlex.split(arguments.sample_options)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    return memadvisor.load(directory), done.stdout


def step_s(run):
    return max(statistics.median(s.duration_s for s in rank.steady_steps()) for rank in run.ranks)


def peaks(run):
    return [rank.traced_step.peak_allocated_bytes for rank in run.ranks]


def plans_for(run, shares, hardware):
    """By name: what each rank recomputes, the predicted peaks, and the plan."""
    search = pipeline_search(run, hardware)
    found = {}
    for share in shares:
        budget_bytes = search.places[0].step.peak_bytes * share // 100
        advice = advise_pipeline(run, memory_bytes=budget_bytes, hardware=hardware)
        if advice.plan is None:
            print(f"{share} %: {budget_bytes:,} bytes; the smallest is {advice.smallest_budget_bytes:,}")
            continue
        choices = [Chosen(frozenset(r.recomputed), frozenset(r.moved)) for r in advice.ranks]
        found[f"{share} %: {budget_bytes:,}"] = choices, search.peaks(choices), advice.plan
    blocks = [Chosen(frozenset(u.name for u in place.step.units if u.is_block)) for place in search.places]
    ranks = tuple(
        replace(own, units=rank.units_of(units))
        for own, rank, units in zip(advice_ranks(run), search.ranks, blocks, strict=True)
    )
    plan = Plan(num_ranks=len(ranks), zero_stage=0, policy="chosen", ranks=ranks)
    found["all blocks"] = blocks, search.peaks(blocks), plan
    return found


def advice_ranks(run):
    """What each rank would do with all the memory that it has."""
    most = max(peaks(run))
    return advise_pipeline(run, memory_bytes=most).plan.ranks


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--script", type=Path, default=SAMPLES / "train_pipeline.py")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--shares", type=int, nargs="+", default=[80, 60, 40])
    parser.add_argument(
        "--hardware", help="a file of `memadvisor calibrate`: activations may wait on disk, too"
    )
    parser.add_argument("--sample-options", default="")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        first, losses = trained(arguments, place / "plain")
        hardware = None if arguments.hardware is None else load_hardware(arguments.hardware)
        plans = plans_for(first, arguments.shares, hardware)
        plain = [first]
        measured = {name: [] for name in plans}
        for number in range(arguments.rounds):
            plain += [trained(arguments, place / f"plain-{number}")[0]] if number else []
            for name, (_, _, plan) in plans.items():
                save_plan(plan, place / "plan.json")
                out = place / f"{name.split()[0]}-{number}"
                run, own = trained(arguments, out, place / "plan.json")
                measured[name].append((step_s(run), peaks(run), own == losses))
        fastest = min(plain, key=step_s)
        sizes = ", ".join(f"{size:,}" for size in peaks(fastest))
        print(f"| plain | | | {sizes} | | {step_s(fastest) * 1e3:.0f} ms of {all_ms(map(step_s, plain))} | |")
        search = pipeline_search(fastest, hardware)
        for name, rows in measured.items():
            tell(name, rows, plans[name], search)


def all_ms(seconds):
    return ", ".join(f"{each * 1e3:.0f}" for each in sorted(seconds))


def tell(name, rows, planned, search):
    choices, predicted, _ = planned
    point = search.point(choices)
    fastest_s = min(seconds for seconds, _, _ in rows)
    same = "equal" if all(same for *_, same in rows) else "OTHER LOSSES"
    held = "to the byte" if all(sizes == predicted for _, sizes, _ in rows) else f"measured {rows[0][1]}"
    error = 100 * (point.step_time_s / fastest_s - 1)
    print(
        f"| {name} | {', '.join(map(str, point.num_recomputed))} | {', '.join(map(str, point.num_moved))} | {', '.join(f'{s:,}' for s in predicted)} | {held} "
        f"| {point.step_time_s * 1e3:.0f} ms | {fastest_s * 1e3:.0f} of {all_ms(s for s, _, _ in rows)} "
        f"({error:+.0f} %) | {same} |"
    )


if __name__ == "__main__":
    main()
