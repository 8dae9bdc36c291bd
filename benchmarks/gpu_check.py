"""The whole loop on one device, and one table: what was captured and predicted beside what torch itself says.

Trains samples/train_gpt.py in bf16 plain, profiled, and with the plan that `advise` finds for a budget below its
peak, each in a process of its own, and reads the runs. Then benchmarks/allocator_models.py: for each of its models the
captured peak, and what the simulated allocator reserves for torch's own sequence of allocations and for the captured
step, beside what torch reserved. Then the engines (gpu_engines.py): two ranks under ZeRO, and placement on one. On a GPU
each takes a few minutes; on a CPU the models are small. Needs torch and numpy alone: no view is used.

    python benchmarks/gpu_check.py
    python benchmarks/gpu_check.py --only ranks placement
    python benchmarks/gpu_check.py --device cpu
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gpu_engines import GPT, WITNESS, alike, check_placement, check_ranks, losses_of

import memadvisor
from memadvisor.analyzers.analysis import analyze
from memadvisor.analyzers.fragmentation import allocator_settings
from memadvisor.cost.allocator_replay import Change, replay
from memadvisor.hardware.load import named_hardware
from memadvisor.plan_file import save_plan
from memadvisor.units import format_bytes, format_fraction, format_seconds

ROOT = Path(__file__).resolve().parents[1]
MODELS = ROOT / "benchmarks" / "allocator_models.py"
OVERHEAD = ROOT / "benchmarks" / "overhead.py"
SHAPES = {
    "cuda": {"layers": 12, "dim": 2048, "heads": 16, "seq": 1024, "micro-batch": 16},
    "cpu": {"layers": 4, "dim": 128, "heads": 4, "seq": 128, "micro-batch": 8},
}
NOT_RECORDED = "not recorded"
PARTS = ("loop", "allocator", "ranks", "placement")


class Failed(Exception):
    """A process ended with another code than 0."""


class Check:
    """Processes to run, their files in one folder, and the rows of the table."""

    def __init__(self, args, folder):
        self.args = args
        self.folder = folder
        self.kind = args.device.split(":")[0]
        self.on_cuda = self.kind == "cuda"
        self.shape = [word for name, value in SHAPES[self.kind].items() for word in (f"--{name}", str(value))]
        self.training = [*self.shape, "--steps", str(args.steps), "--bf16", "--device", args.device]
        self.rows = []

    def row(self, what, *cells):
        self.rows.append((what, *cells))

    def python(self, *words):
        """stdout of a Python process in the folder; what it says on stderr is shown if it fails."""
        paths = [str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        done = subprocess.run(
            [sys.executable, *map(str, words)],
            cwd=self.folder,
            env=environment,
            text=True,
            capture_output=True,
        )
        if done.returncode != 0:
            raise Failed(f"{' '.join(map(str, words))} ended with {done.returncode}:\n{done.stderr}")
        return done.stdout

    def tried(self, what, measure, *arguments):
        """`measure`'s result, or None and a row where it failed: what comes after it does not hang on it."""
        try:
            return measure(self, *arguments)
        except Exception:  # any: a check of half the rows is worth more than none
            told = traceback.format_exc()
            print(f"{what}: {told}", file=sys.stderr)
            self.row(what, "FAILED", told.strip().splitlines()[-1][:100])
            return None

    def witnessed(self, name, *before, peak=False):
        """Losses, and what the witness saw, of a training; `before` is what runs the witness."""
        result = self.folder / f"{name}.json"
        option = ["--peak"] if peak else []
        # memadvisor takes options up to the script: the witness's own come after it.
        stdout = self.python(*before, WITNESS, *option, result, GPT, *self.training)
        return losses_of(stdout), json.loads(result.read_text())

    def memadvisor(self, command, out, *options):
        """Words that run what follows them under memadvisor; its run is `out` in the folder."""
        return ["-m", "memadvisor", command, *options, "--trace-step", "3", "--out", self.folder / out]


def steady_s(told):
    return statistics.median(told["durations_s"][2:])


def steady_peak_bytes(told):
    return max(told["peaks_bytes"][2:], default=None)


def error(claimed, true):
    return NOT_RECORDED if claimed is None or not true else f"{100 * (claimed - true) / true:+.2f} %"


def read(path):
    run = memadvisor.load(path)
    return analyze(run, named_hardware(run.ranks[0].process.device_name))


def check_capture(check):
    """Plain and profiled: the captured peak beside torch's own, the unexplained rest, MFU."""
    losses, told = check.witnessed("plain")
    true_peak = steady_peak_bytes(told) or steady_peak_bytes(check.witnessed("peaks", peak=True)[1])
    profiled_losses, _ = check.witnessed("profiled", *check.memadvisor("profile", "before"))
    analysis = read(check.folder / "before")
    [rank] = analysis.ranks
    source = "max_memory_allocated" if check.on_cuda else "profiler's memory events"
    check.row(f"peak, {source}", format_bytes(true_peak))
    check.row(
        "peak, captured", format_bytes(rank.peak.allocated_bytes), error(rank.peak.allocated_bytes, true_peak)
    )
    check.row(
        "peak, unexplained",
        format_bytes(rank.peak.unexplained_bytes),
        format_fraction(rank.peak.unexplained_bytes / rank.peak.allocated_bytes),
    )
    for category, size_bytes in rank.peak.by_category_bytes.items():
        if size_bytes:
            check.row(f"    {category}", format_bytes(size_bytes))
    states = rank.model_states
    captured_bytes = states.parameter_bytes + states.gradient_bytes + states.optimizer_state_bytes
    check.row(
        "model states, captured",
        format_bytes(captured_bytes),
        error(captured_bytes, states.expected_bytes) + " of expected",
    )
    check.row("step time, plain", format_seconds(steady_s(told)))
    check.row(
        "step time, profiled (timed steps)",
        format_seconds(rank.step_time.median_s),
        error(rank.step_time.median_s, steady_s(told)),
    )
    use = rank.utilization
    check.row(
        "MFU / HFU",
        f"{format_fraction(use.mfu)} / {format_fraction(use.hfu)}",
        f"convention {use.convention}, {use.dtype}, {use.hardware_kind or 'no'} peak",
    )
    check.row("losses, profiled against plain", alike(losses, profiled_losses))
    return losses, rank


def check_plan(check, plain_losses, measured):
    """The plan for a budget below the peak: predicted beside measured, and the losses beside the plain ones."""
    budget_bytes = int(check.args.budget * measured.peak.allocated_bytes)
    advice = memadvisor.advise(check.folder / "before", memory=budget_bytes)
    chosen = next((r for r in advice.plans if r.fits and not r.changes_script), None)
    check.row(f"budget, {check.args.budget:.0%} of the peak", format_bytes(budget_bytes))
    if chosen is None:
        check.row("plan", "none fits", f"smallest budget {format_bytes(advice.smallest_budget_bytes)}")
        return
    plan = chosen.plan
    check.row(
        "plan",
        f"ZeRO {plan.zero_stage}",
        f"recomputes {len(plan.recomputed_units)} of {len(plan.units)} units",
    )
    save_plan(plan, check.folder / "plan.json")
    runner = check.memadvisor("run", "after", "--plan", check.folder / "plan.json")
    losses, told = check.witnessed("applied", *runner)
    analysis = read(check.folder / "after")
    compared = analysis.comparison
    peak, step = compared.peak_bytes, compared.step_time_s
    check.row(
        "peak with the plan, predicted", format_bytes(peak.predicted), error(peak.predicted, peak.measured)
    )
    check.row(
        "peak with the plan, captured",
        format_bytes(peak.measured),
        "within budget" if peak.measured <= budget_bytes else "OVER BUDGET",
    )
    true_peak = steady_peak_bytes(told)
    check.row("peak with the plan, torch's own", format_bytes(true_peak), error(peak.measured, true_peak))
    check.row(
        "step time with the plan, predicted",
        format_seconds(step.predicted),
        error(step.predicted, step.measured),
    )
    check.row("step time with the plan, measured", format_seconds(step.measured))
    use = analysis.ranks[0].utilization
    check.row("MFU / HFU with the plan", f"{format_fraction(use.mfu)} / {format_fraction(use.hfu)}")
    check.row("losses, with the plan against plain", alike(losses, plain_losses))


def check_overhead(check):
    """Interleaved rounds in one process: the only fair way to see a few per cent."""
    words = [
        OVERHEAD,
        "--json",
        "--bf16",
        "--rounds",
        check.args.rounds,
        "--device",
        check.args.device,
        *check.shape,
    ]
    for model, found in json.loads(check.python(*words)).items():
        for variant, row in found["steps"].items():
            if variant != "plain":
                check.row(
                    f"overhead, {model}: {variant}",
                    f"wall x {row['wall_ratio']:.3f}",
                    f"CPU x {row['cpu_ratio']:.3f}, of the fastest rounds {row['quiet_cpu_ratio']:.3f}",
                )


def check_allocator(check):
    """Each model three times: with torch's own history, profiled, and profiled without a traced step."""
    for name in check.args.models:
        check.tried(f"{name}: allocator", check_model, name)


def check_model(check, name):
    words = [name, "--device", check.args.device]
    plain, profiled, timed = (check.folder / f"{name}-{kind}.json" for kind in ("plain", "traced", "timed"))
    check.python(MODELS, plain, *words, "--history")
    check.python(*check.memadvisor("profile", name), MODELS, profiled, *words)
    told, traced = json.loads(plain.read_text()), json.loads(profiled.read_text())
    run = memadvisor.load(check.folder / name)
    rank = analyze(run, None).ranks[0]
    found, settings = rank.fragmentation, allocator_settings(run.ranks[0])
    check.row(f"{name}: peak, captured", format_bytes(rank.highest_peak_bytes))
    check.row(
        f"{name}: peak, max_memory_allocated",
        format_bytes(traced["allocated_bytes"]),
        error(rank.highest_peak_bytes, traced["allocated_bytes"]),
    )
    check.row(f"{name}: reserved, max_memory_reserved", format_bytes(told["reserved_bytes"]))
    if told["changes"] is not None:
        replayed = replay([Change(*change) for change in told["changes"]], settings)
        reserved_bytes = replayed.peak_reserved_bytes
        check.row(
            f"{name}: reserved, torch's sequence simulated",
            format_bytes(reserved_bytes),
            error(reserved_bytes, told["reserved_bytes"]),
        )
    check.row(
        f"{name}: reserved, captured step simulated",
        format_bytes(found.predicted_reserved_bytes),
        error(found.predicted_reserved_bytes, told["reserved_bytes"]),
    )
    outside = None if found.measured is None else found.measured.outside_allocator_bytes
    check.row(f"{name}: outside the allocator", format_bytes(outside))
    same = "the same" if told["loss"] == traced["loss"] else f"{told['loss']} and {traced['loss']}"
    check.row(f"{name}: loss, profiled against plain", same)
    if check.on_cuda:
        check_waits(check, name, words, timed)


def check_waits(check, name, words, result):
    """How often torch reports a wait for the device, without memadvisor and in its timed steps."""
    counts = []
    never = ["-m", "memadvisor", "profile", "--trace-step", "1000", "--out", check.folder / f"{name}-timed"]
    for runner in ([], never):
        check.python(*runner, MODELS, result, *words)
        counts.append(json.loads(result.read_text())["num_waits"])
    check.row(
        f"{name}: waits for the device, timed against plain",
        f"{counts[1]} / {counts[0]}",
        "none added" if counts[1] <= counts[0] else "ADDED",
    )


def print_table(rows):
    widths = [max(len(row[column]) for row in rows if len(row) > column) for column in range(2)]
    for what, *cells in rows:
        print(f"{what:<{widths[0]}}  {cells[0]:>{widths[1]}}  {cells[1] if len(cells) > 1 else ''}".rstrip())


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument(
        "--rounds", type=int, default=4, help="of the overhead's measurement; 0 leaves it out"
    )
    parser.add_argument(
        "--models", nargs="*", help="of the allocator's check (default: all; compiled on CUDA alone)"
    )
    parser.add_argument("--keep", metavar="DIR", help="leave the runs and what torch told in this directory")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--budget", type=float, default=0.7, help="memory budget, as a fraction of the peak")
    return parser.parse_args()


def main():
    args = parse_args()
    if args.models is None:
        args.models = ["gpt", "cnn", "lstm", "moe", "varying"]
        args.models += ["compiled"] if args.device.startswith("cuda") else []
    started_s = time.monotonic()
    with contextlib.ExitStack() as stack:
        folder = args.keep or stack.enter_context(tempfile.TemporaryDirectory())
        check = Check(args, Path(folder))
        check.folder.mkdir(parents=True, exist_ok=True)
        try:
            if "loop" in args.only:
                captured = check.tried("capture", check_capture)
                if args.rounds:
                    check.tried("overhead", check_overhead)
                if captured is not None:
                    check.tried("plan", check_plan, *captured)
            if "allocator" in args.only:
                check_allocator(check)
            if "ranks" in args.only:
                check.tried("ranks", check_ranks)
            if "placement" in args.only:
                check_placement(check)
        finally:
            name = torch.cuda.get_device_name() if check.on_cuda else "CPU"
            print(
                f"{name}, torch {torch.__version__}, Python {sys.version.split()[0]}: {' '.join(check.training)}"
            )
            if check.rows:
                print_table(check.rows)
    print(f"{time.monotonic() - started_s:.0f} s")


if __name__ == "__main__":
    main()
