"""Is the plan that `advise` names the best one? All plans of a small space, advised and run on this machine.

    python benchmarks/regret.py --out DIR [--rounds 8] [--seconds 180]

`samples/train_gpt.py` on two Gloo ranks is profiled and the machine calibrated, once; from these alone come all
predictions and, for each budget, what `advise` picks. The space: ZeRO 0 to 3, each with no block, half of the blocks
and all of them recomputed, each with the script's micro-batch and with half of it twice (`--micro-batch`, `--accum`);
what `advise` picks joins it. Each of these plans is really run, by `memadvisor run --plan`.

Runs take turns: a batch of them is started, and stopped (SIGSTOP) when it has trained for a few steps; then each in turn
goes on for a moment, round after round, so that a machine that slows down meanwhile slows all of them. Only steps count
that lie between a going on and the stop after it, without the first one; a round's figure is their median, of the
slowest rank. One plan, the reference, is in every batch: a plan's measured step is the median over rounds of its time
over the reference's in the same round, times the reference's median. `spread` is half the distance of the ratios'
quartiles. `CPU`: seconds of the processor that a rank took for a step over all turns, which other load on the machine
changes less; waiting is not in it. Its measured peak is the largest rank's. Called again with the same --out the next batch is run, with
--rounds 0 nothing. `--again` runs a batch of those that were fastest in each budget, and the advised ones, in place of
what was known of them: the best of many noisy figures flatters itself.

Regret is the advised plan's measured step over the best measured one of the plans whose measured peak is within the
budget, less 1. A failed pick is an advised plan whose measured peak is over the budget. In each budget there are two
questions: with the script left alone, and with its micro-batch free. Nothing else should run meanwhile.
"""

import argparse
import dataclasses
import json
import signal
import sys
import time
from pathlib import Path
from statistics import median, quantiles

from regret_runs import RANKS, SCRIPT, Running, memadvisor_command

import memadvisor
from memadvisor.analyzers.segments import captured_step
from memadvisor.cost.collectives import times_from_curves
from memadvisor.hardware.load import load_hardware
from memadvisor.plan import UnitPlan
from memadvisor.plan_file import load_plan, save_plan
from memadvisor.planning.advise import advise
from memadvisor.planning.arrangement import Arrangement
from memadvisor.planning.plays import Plays
from memadvisor.planning.search import Search
from memadvisor.policies import blocks_of
from memadvisor.units import format_bytes, format_seconds

_STARTED_AT_ONCE = 4
REFERENCE = "ZeRO 1, 0 recomputed, 4 x 1"


def main():
    args = parse_args()
    out = Path(args.out)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("regret.py: ended"))  # so that stopped runs do not stay
    if not (out / "space.json").exists():
        prepare(out, args)
    space = json.loads((out / "space.json").read_text())
    results = out / "results.jsonl"
    done = read_results(results)
    if args.rounds:
        names = again(space, done, args.together) if args.again else missing(space, done, args.together)
        for row in batch_of(out, space, names, args):
            with results.open("a") as file:
                file.write(
                    json.dumps({"batch": max((r["batch"] for r in done), default=-1) + 1, **row}) + "\n"
                )
    print_tables(space, read_results(results))


def prepare(out, args):
    """Calibrate, profile, predict every plan of the space and let `advise` choose; all of it kept in `out`."""
    (out / "plans").mkdir(parents=True, exist_ok=True)
    shape = ["--layers", args.layers, "--dim", args.dim, "--heads", "4", "--seq", args.seq]
    space = {"shape": list(map(str, shape)), "micro_batch": args.micro_batch, "plans": {}, "budgets": []}
    if not (out / "hardware.json").exists():
        memadvisor_command(out, "calibrate", "--ranks", str(RANKS), "-o", str(out / "hardware.json"))
    if not (out / "plain").exists():
        batch = ["--micro-batch", str(args.micro_batch), "--steps", str(args.steps)]
        command = ["profile", "--nproc", str(RANKS), "--out", str(out / "plain"), str(SCRIPT)]
        memadvisor_command(out, *command, *space["shape"], *batch)
    run, hardware = memadvisor.load(out / "plain"), load_hardware(str(out / "hardware.json"))
    plain = captured_step(run)
    budgets = [plain.peak_bytes * percent // 100 for percent in args.budgets]
    for name, ranked in space_of(run, hardware, budgets[0]):
        add(out, space, name, ranked)
    for percent, budget_bytes in zip(args.budgets, budgets, strict=True):
        plans = advise(run, memory_bytes=budget_bytes, hardware=hardware).plans
        alone = next(ranked for ranked in plans if not ranked.changes_script)
        free = min((r for r in plans if r.fits), key=lambda r: r.prediction.step_time_s, default=plans[0])
        space["budgets"].append(
            {
                "percent": percent,
                "budget_bytes": budget_bytes,
                "alone": add(out, space, f"advised {percent} %", alone),
                "free": add(out, space, f"advised {percent} %, batch free", free),
            }
        )
    space["plain_peak_bytes"], space["plain_step_s"] = plain.peak_bytes, plain.step_time_s
    (out / "space.json").write_text(json.dumps(space, indent=1))


def space_of(run, hardware, budget_bytes):
    """(name, RankedPlan) of every plan of the space."""
    times = times_from_curves(
        hardware.collectives, RANKS, hardware.source, hardware.overlap, engine=hardware.engine
    )
    search = Search(Plays(run, times, RANKS, budget_bytes))
    for divisor in (1, 2):
        step = captured_step(run, micro_batch_divisor=divisor)
        blocks = blocks_of(step.units)
        for stage in range(4):
            for again in ([], blocks[: len(blocks) // 2], blocks):
                units = tuple(
                    UnitPlan(name=u.name, zero_stage=stage, recompute=u.name in again) for u in step.units
                )
                arrangement = Arrangement(units, stage > 0, int(stage > 1))
                prediction = search.plays.play(step, arrangement).prediction()
                name = f"ZeRO {stage}, {len(again)} recomputed, {step.micro_batch_size} x {divisor}"
                yield name, search.plays.ranked(step, arrangement, prediction)


def add(out, space, name, ranked):
    """Keep a plan under a name, or find it under another; returns the name."""
    plan = ranked.plan
    same = dataclasses.replace(plan, why="", prediction=None, budget_bytes=None)
    for known in space["plans"]:
        other = load_plan(out / "plans" / f"{known}.json")
        if dataclasses.replace(other, why="", prediction=None, budget_bytes=None) == same:
            return known
    save_plan(plan, out / "plans" / f"{name}.json")
    space["plans"][name] = {
        "micro_batch": plan.micro_batch_size,
        "accum": plan.grad_accum,
        "step_s": ranked.prediction.step_time_s,
        "peak_bytes": ranked.prediction.peak_bytes,
        "changes_script": ranked.changes_script,
        "why": plan.why,
    }
    return name


def missing(space, done, together):
    """The next plans that have not been run."""
    known = {row["name"] for row in done}
    return [name for name in space["plans"] if name not in known and name != REFERENCE][: together - 1]


def again(space, done, together):
    """What was advised, and then the fastest plans of each question in turn."""
    times = times_of(done)
    peaks = {name: size for name, size in peaks_of(done).items() if name in times}
    found = {budget[question]: None for budget in space["budgets"] for question in ("alone", "free")}
    ranks = [
        sorted(names, key=lambda name: times[name][0])
        for budget in space["budgets"]
        for is_free in (False, True)
        if (names := candidates(space, peaks, budget["budget_bytes"], is_free=is_free))
    ]
    for place in range(together):
        found |= {names[place]: None for names in ranks if place < len(names) and len(found) < together}
    return [name for name in found if name != REFERENCE][: together - 1]


def batch_of(out, space, names, args):
    """Start the runs of these plans and of the reference, let them go on in turn, and return what each gave."""
    runs = {}
    deadline_s = time.monotonic() + args.seconds
    try:
        for name in (REFERENCE, *names):
            runs[name] = Running(out, name, space)
        for some in batched(runs.values(), _STARTED_AT_ONCE):
            for running in some:
                running.start()
            cold = list(some)
            while cold := [running for running in cold if not running.stop_when_warm()]:
                time.sleep(0.3)
        for turn in range(args.rounds):
            order = list(runs)
            for name in order[turn % len(order) :] + order[: turn % len(order)]:
                if time.monotonic() < deadline_s:
                    runs[name].go_on(args.slice_s)
    finally:
        for running in runs.values():
            running.end()
    return [row for name, running in runs.items() for row in running.rows()]


def batched(items, size):
    items = list(items)
    return [items[start : start + size] for start in range(0, len(items), size)]


def read_results(path):
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def times_of(rows):
    """{name: (seconds, spread, number of rounds, CPU seconds)}, of a plan's last batch; the reference's of all."""
    base = {(row["batch"], row["round"]): row["step_s"] for row in rows if row["name"] == REFERENCE}
    rows = [row for row in rows if (row["batch"], row["round"]) in base]
    last = {row["name"]: row["batch"] for row in rows}
    ratios, of_name = {}, {}
    for row in rows:
        turn = row["batch"], row["round"]
        if row["batch"] == last[row["name"]]:
            ratios.setdefault(row["name"], []).append(row["step_s"] / base[turn])
            of_name.setdefault(row["name"], []).append(row)
    base_s = median(base.values()) if base else 0.0
    return {
        name: (
            median(found) * base_s,
            spread(found),
            len(found),
            sum(row["cpu_s"] for row in of_name[name]) / sum(row["num_steps"] for row in of_name[name]),
        )
        for name, found in ratios.items()
    }


def spread(found):
    """Half the distance of the quartiles, as a fraction of the median."""
    low, middle, high = quantiles(found, n=4, method="inclusive") if len(found) > 1 else [*found] * 3
    return (high - low) / 2 / middle


def peaks_of(rows):
    peaks = {}
    for row in rows:
        peaks[row["name"]] = max(peaks.get(row["name"], 0), row["peak_bytes"])
    return peaks


def candidates(space, peaks, budget_bytes, *, is_free):
    """Plans that may answer a question: measured within the budget, and the script left alone if so asked."""
    return [
        name
        for name, plan in space["plans"].items()
        if peaks.get(name, budget_bytes + 1) <= budget_bytes and (is_free or not plan["changes_script"])
    ]


def questions(space, times, peaks):
    """For each budget and question: what was advised, the best measured plan, the regret, and whether the pick failed."""
    for budget in space["budgets"]:
        for question, is_free in (("alone", False), ("free", True)):
            advised = budget[question]
            known_peaks = {name: size for name, size in peaks.items() if name in times}
            names = candidates(space, known_peaks, budget["budget_bytes"], is_free=is_free)
            best = min(names, key=lambda name: times[name][0], default=None)
            known = best is not None and advised in times
            yield {
                "percent": budget["percent"],
                "question": "script left alone" if question == "alone" else "micro-batch free",
                "advised": advised,
                "best": best,
                "regret": times[advised][0] / times[best][0] - 1 if known else None,
                "failed": peaks[advised] > budget["budget_bytes"] if advised in peaks else None,
            }


def print_tables(space, rows):
    times, peaks = times_of(rows), peaks_of(rows)
    if not times:
        return
    limits = [budget["budget_bytes"] for budget in space["budgets"]]
    print(f"predicted from one plain run: step {format_seconds(space['plain_step_s'])}; one thread a rank\n")
    print(
        f"{'plan':38}{'predicted':>11}{'measured':>11}{'spread':>8}{'CPU':>9}{'runs':>5}{'predicted':>12}{'measured':>12}  fits"
    )
    for name in sorted(times, key=lambda name: times[name][0]):
        plan = space["plans"].get(name, {"step_s": None, "peak_bytes": None})
        step_s, half_range, number, cpu_s = times[name]
        fits = " ".join(f"{b['percent']} %" for b in space["budgets"] if peaks[name] <= b["budget_bytes"])
        print(
            f"{name:38}{'-' if plan['step_s'] is None else format_seconds(plan['step_s']):>11}"
            f"{format_seconds(step_s):>11}{half_range:>8.1%}{format_seconds(cpu_s):>9}{number:>5}"
            f"{'-' if plan['peak_bytes'] is None else format_bytes(plan['peak_bytes']):>12}"
            f"{format_bytes(peaks[name]):>12}  {fits or 'none'}"
        )
    print()
    for answer in questions(space, times, peaks):
        regret = "not known" if answer["regret"] is None else f"{answer['regret']:.1%}"
        print(
            f"{answer['percent']} % of the plain peak, {answer['question']}: advised {answer['advised']}; "
            f"best measured {answer['best']}; regret {regret}{'; THE PICK FAILED' if answer['failed'] else ''}"
        )
    wrong = [
        name
        for name in peaks
        if name in space["plans"]
        and any(space["plans"][name]["peak_bytes"] <= limit < peaks[name] for limit in limits)
    ]
    print(
        f"said to fit and did not: {len(wrong)} of {len(limits) * (len(peaks) - ('plain' in peaks))} decisions"
    )
    known = [name for name in times if name in space["plans"]]
    ratios = [space["plans"][name]["step_s"] / times[name][0] for name in known]
    print(
        f"predicted over measured step: median {median(ratios):.3f}, from {min(ratios):.3f} to {max(ratios):.3f}; "
        f"without their common factor off by {median(abs(r / median(ratios) - 1) for r in ratios):.1%} (median)"
    )
    peak_errors = [abs(space["plans"][name]["peak_bytes"] / peaks[name] - 1) for name in known]
    print(f"predicted over measured peak: off by {max(peak_errors):.3%} at most")


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", required=True, help="directory that keeps the plain run, the plans and the results"
    )
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=180, help="of a batch")
    parser.add_argument("--together", type=int, default=9, help="runs of a batch; each takes 0.7 GiB")
    parser.add_argument("--slice", type=float, default=1.5, dest="slice_s", help="seconds of a turn")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--steps", type=int, default=24, help="of the plain run")
    parser.add_argument(
        "--budgets", type=int, nargs="+", default=[100, 65], metavar="PERCENT", help="of the plain peak"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
