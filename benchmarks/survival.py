"""What a run survives: damaged files and kills. Every figure is counted, none is claimed.

python benchmarks/survival.py files --cases 10000
python benchmarks/survival.py kills --times 200
"""

import argparse
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.damage import draw_case, judge, read_files, read_written, write_files
from memadvisor.run.store import load_run

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "tests" / "scripts" / "ticking.py"
MAX_CASE_S = 2.0
HANG_S = 30
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def profiled(out, *words, ranks=None):
    nproc = ["--nproc", str(ranks)] if ranks else []
    return [sys.executable, "-m", "memadvisor", "profile", *nproc, "--out", str(out), str(SCRIPT), *words]


# ---- files -----------------------------------------------------------------------------------------


def record_runs(directory):
    """One run of one rank and one of two, of real trainings, each with a plan beside it."""
    from memadvisor.plan import Plan
    from memadvisor.plan_file import save_plan

    paths = []
    for ranks in (1, 2):
        path = directory / f"run-{ranks}"
        command = profiled(path, "6", "0", ranks=ranks if ranks > 1 else None)
        subprocess.run(command, env=ENVIRONMENT, check=True, capture_output=True, timeout=300)
        plan = Plan(num_ranks=ranks, zero_stage=0, why="made by hand")
        save_plan(plan, path / "plan.json")
        paths.append(path)
    return paths


class Hang(Exception):
    pass


def _alarm(number, frame):
    raise Hang


def check_cases(paths, first, count, report_every):
    """Judge `count` cases, seeded by their number; what was found, in counts."""
    originals = [read_files(path) for path in paths]
    written = read_written(paths)
    found, wrong, slowest_s = Counter(), [], 0.0
    signal.signal(signal.SIGALRM, _alarm)
    before_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    with tempfile.TemporaryDirectory() as scratch:
        for seed in range(first, first + count):
            case = draw_case(originals, random.Random(seed))
            directory = Path(scratch) / str(seed)
            write_files(case.files, directory)
            signal.alarm(HANG_S)
            try:
                verdict = judge(case, directory, written, with_report=seed % report_every == 0)
            except BaseException:
                wrong.append((seed, case.kind, traceback.format_exc()))
                continue
            finally:
                signal.alarm(0)
                for path in directory.iterdir():
                    path.unlink()
                directory.rmdir()
            found[case.kind, verdict.outcome] += 1
            if seed % report_every:  # a report takes seconds of its own
                slowest_s = max(slowest_s, verdict.cpu_s)
                if verdict.cpu_s > MAX_CASE_S:
                    wrong.append((seed, case.kind, f"took {verdict.cpu_s:.1f} s of CPU time"))
            if verdict.wrong:
                wrong.append((seed, case.kind, verdict.wrong))
    grown_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before_bytes
    return found, wrong, slowest_s, grown_bytes


def files(args):
    with tempfile.TemporaryDirectory() as scratch:
        paths = record_runs(Path(scratch))
        share = -(-args.cases // args.processes)
        with ProcessPoolExecutor(args.processes) as pool:
            parts = [
                pool.submit(check_cases, paths, args.seed + i * share, share, args.report_every)
                for i in range(args.processes)
            ]
            results = [part.result() for part in parts]
    found = sum((result[0] for result in results), Counter())
    wrong = [entry for result in results for entry in result[1]]
    for kind, outcome in sorted(found):
        print(f"{kind:16} {outcome:16} {found[kind, outcome]:6}")
    print(f"cases {sum(found.values())}, failed {len(wrong)}")
    print(f"slowest {max(result[2] for result in results):.2f} s of CPU time")
    print(f"memory grew by at most {max(result[3] for result in results) / 2**20:.0f} MiB")
    for seed, kind, text in wrong[: args.show]:
        print(f"--- seed {seed} ({kind})\n{text}")
    return 1 if wrong else 0


# ---- kills -----------------------------------------------------------------------------------------


def kill_once(directory, number, rng):
    """Start a profiled training, kill it at a random moment, and compare the run with the script's own log."""
    out, log = directory / f"run-{number}", directory / f"log-{number}"
    process = subprocess.Popen(
        profiled(out, "1000000", "0.004", str(log)),
        env=ENVIRONMENT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline_s = time.monotonic() + 120
    # One in ten is killed somewhere in its start, the others in the training.
    while time.monotonic() < deadline_s and not (log.exists() and (number % 10 == 0 or log.stat().st_size)):
        time.sleep(0.02)
    time.sleep(rng.uniform(0, 2.5))
    killed_s = time.monotonic()
    process.send_signal(signal.SIGKILL)
    process.wait()
    done = [float(line) for line in log.read_text().splitlines(keepends=True) if line.endswith("\n")]
    run = load_run(out)
    steps = run.ranks[0].steps
    # The script logs a step after the optimizer's; steps are numbered from 0 on both sides.
    lost_s = [killed_s - done[index] for index in range(len(steps), len(done))]
    # That under way at the kill counts: on a busy machine it may be the longest.
    longest_s = max((b - a for a, b in pairwise([*done, killed_s])), default=0.0)
    return {
        "num_done": len(done),
        "num_recorded": len(steps),
        "num_lost": len(lost_s),
        "lost_s": max(lost_s, default=0.0),  # how long before the kill the first lost step had ended
        "longest_step_s": longest_s,
        "problems": list(run.problems),
        "in_order": [step.index for step in steps] == list(range(len(steps))),
    }


def kills(args):
    rng = random.Random(args.seed)
    results = []
    with tempfile.TemporaryDirectory() as scratch:
        for number in range(args.times):
            try:
                results.append(kill_once(Path(scratch), number, rng))
            except Exception as error:
                results.append({"error": f"{type(error).__name__}: {error}"})
    readable = [result for result in results if "error" not in result]
    errors = Counter(result["error"] for result in results if "error" in result)
    # A step in flight when 250 ms had passed is written when it ends.
    late = [r for r in readable if r["lost_s"] > 0.25 + r["longest_step_s"]]
    figures = {
        "kills": len(results),
        "readable": len(readable),
        "damaged": sum(bool(r["problems"]) for r in readable),
        "out_of_order": sum(not r["in_order"] for r in readable),
        "steps_done": sum(r["num_done"] for r in readable),
        "steps_lost": sum(r["num_lost"] for r in readable),
        "most_lost_s": max((r["lost_s"] for r in readable), default=None),
        "lost_more_than_250_ms_and_a_step": len(late),
        "errors": dict(errors),
    }
    print(json.dumps(figures, indent=1))
    return 1 if late or errors or figures["damaged"] or figures["out_of_order"] else 0


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    parse = commands.add_parser("files", help="read mutated copies of recorded runs")
    parse.add_argument("--cases", type=int, default=10_000)
    parse.add_argument("--processes", type=int, default=2)
    parse.add_argument(
        "--report-every", type=int, default=50, help="render every so many cases as a report too"
    )
    parse.add_argument("--show", type=int, default=5, help="print so many failures in full")
    parse.add_argument("--seed", type=int, default=0)
    parse.set_defaults(run=files)
    parse = commands.add_parser("kills", help="kill -9 at random moments")
    parse.add_argument("--times", type=int, default=200)
    parse.add_argument("--seed", type=int, default=0)
    parse.set_defaults(run=kills)
    args = parser.parse_args()
    raise SystemExit(args.run(args))


if __name__ == "__main__":
    main()
