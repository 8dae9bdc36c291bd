"""How long `advise` takes to decide: CPU seconds of each case, of a run that is read already.

One GPT is profiled on one rank and one on two Gloo ranks (or runs are named that were profiled before), and `advise` is
asked for shares of the plain peak, without and with tiers to move things to. The tiers' and links' bandwidths are made
up: they decide what is chosen, not what is measured here. The digest is of all plans, predictions and the front, so
that two versions of the planner can be told to answer alike.

    python benchmarks/decision.py [--layers 96] [--budgets 90 60 40] [--runs RUN...] [--rounds 1] [--cprofile]
"""

import argparse
import cProfile
import hashlib
import pstats
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import memadvisor
from memadvisor.hardware.hardware import CollectiveCurve, Hardware, TierBandwidth
from memadvisor.plan_file import plan_to_json
from memadvisor.planning.advise import advise

SCRIPT = Path(__file__).resolve().parents[1] / "samples" / "train_gpt.py"
SHAPE = ("--dim", "32", "--heads", "2", "--seq", "32", "--micro-batch", "8", "--steps", "6")


def profiled(out, num_ranks, num_layers):
    command = [sys.executable, "-m", "memadvisor", "profile", "--nproc", str(num_ranks), "--out", str(out)]
    command += [str(SCRIPT), "--layers", str(num_layers), *SHAPE]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return memadvisor.load(out)


def hardware(num_ranks, has_tier):
    curve = {"num_ranks": num_ranks, "sizes_bytes": (1 << 10, 1 << 20), "durations_s": (1e-4, 1.1e-3)}
    operations = ("all_reduce", "all_gather", "reduce_scatter") if num_ranks > 1 else ()
    return Hardware(
        name="made up",
        kind="measured",
        source="benchmarks/decision.py",
        memory_bytes=None,
        memory_bandwidth_bytes_per_s=None,
        peak_flops_per_s={},
        collectives=tuple(CollectiveCurve(operation=name, **curve) for name in operations),
        disk=TierBandwidth(read_bytes_per_s=2e9, write_bytes_per_s=1e9) if has_tier else None,
    )


def digest(advice):
    words = [plan_to_json(ranked.plan) for ranked in advice.plans]
    words += [repr((advice.front, advice.next_gib_s, advice.smallest_budget_bytes, advice.lossy))]
    return hashlib.sha256("\n".join(map(str, words)).encode()).hexdigest()[:12]


def decide(run, budgets, num_rounds, profile):
    rank = run.ranks[0]
    num_ranks = run.manifest.world_size
    peak_bytes = rank.traced_step.peak_allocated_bytes
    for percent in budgets:
        for has_tier in (False, True):
            seconds = []
            for _ in range(num_rounds):
                if profile is not None:
                    profile.enable()
                start_s = time.process_time()
                advice = advise(
                    run,
                    memory_bytes=peak_bytes * percent // 100,
                    hardware=hardware(num_ranks, has_tier),
                )
                seconds.append(time.process_time() - start_s)
                if profile is not None:
                    profile.disable()
            best = advice.plans[0]
            print(
                f"{len(rank.units):>5} units {num_ranks} ranks {percent:>4} % {'tier' if has_tier else '-':>5} "
                f"{min(seconds):>7.2f} s  {digest(advice)}  {'fits' if best.fits else 'over'} "
                f"{best.prediction.step_time_s * 1e3:.3f} ms",
                flush=True,
            )


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=96)
    parser.add_argument("--budgets", nargs="+", type=int, default=[90, 60, 40])
    parser.add_argument("--runs", nargs="+", type=Path, default=[])
    parser.add_argument("--rounds", type=int, default=1, help="the least CPU time of so many is shown")
    parser.add_argument("--cprofile", action="store_true", help="also show where the time goes")
    args = parser.parse_args()
    profile = cProfile.Profile() if args.cprofile else None
    with tempfile.TemporaryDirectory() as scratch:
        runs = [memadvisor.load(path) for path in args.runs]
        runs = runs or [profiled(Path(scratch) / str(n), n, args.layers) for n in (1, 2)]
        for run in runs:
            decide(run, args.budgets, args.rounds, profile)
    if profile is not None:
        pstats.Stats(profile).sort_stats("tottime").print_stats(40)


if __name__ == "__main__":
    main()
