"""Rows of benchmarks/gpu_check.py: the engines on one device. The sample GPT under plans, beside itself without one.

Ranks: two of them, each on a GPU of its own or sharing one, under ZeRO stages 1 to 3. Placement: state and activations
on the host (of a CPU: on disk), a model in a third of the memory that it takes, and bf16 weights within budgets beside
full recomputation and torch's own `activation_memory_budget` (compiled.py).
"""

import json
import statistics
from pathlib import Path

from stages import WAYS, plan_of

import memadvisor
from memadvisor.analyzers.analysis import analyze
from memadvisor.analyzers.observed_collectives import observed_collectives
from memadvisor.analyzers.segments import captured_step
from memadvisor.cost.collectives import Observation, times_from_observations
from memadvisor.plan_file import save_plan
from memadvisor.units import format_bytes, format_fraction, format_seconds

ROOT = Path(__file__).resolve().parents[1]
GPT = ROOT / "samples" / "train_gpt.py"
COMPILED = ROOT / "benchmarks" / "compiled.py"
WITNESS = ROOT / "benchmarks" / "witness.py"
NUM_RANKS = 2
RANK_SHAPES = {
    "cuda": "--layers 8 --dim 1024 --heads 16 --seq 512 --micro-batch 4 --steps 12",
    "cpu": "--layers 4 --dim 128 --heads 4 --seq 128 --micro-batch 4 --steps 8",
}
STATE_SHAPES = {  # states are most of the peak
    "cuda": "--layers 24 --dim 2048 --heads 16 --seq 512 --micro-batch 2 --steps 8",
    "cpu": "--layers 12 --dim 256 --heads 4 --seq 64 --micro-batch 2 --steps 8",
}
BUDGET_SHAPES = {  # on a GPU GPT-2 XL, of 1.5 G parameters
    "cuda": "--layers 48 --dim 1600 --heads 25 --seq 1024 --micro-batch 8 --steps 10 --bf16-weights",
    "cpu": "--layers 4 --dim 128 --heads 4 --seq 128 --micro-batch 8 --steps 8 --bf16-weights",
}
A_MESSAGE = Observation(operation="all_reduce", num_ranks=NUM_RANKS, size_bytes=2**20, duration_s=1e-3)
OVERLAPPING = ("1 overlap", "2 overlap", "3 overlap")
BUDGETS = (1.0, 0.6, 0.4)


def check_ranks(check):
    """Losses against DDP's, what is predicted and captured at the peak, and waits for the device that a plan adds."""
    words = [GPT, *RANK_SHAPES[check.kind].split(), "--device", check.args.device]
    ranks = ("--nproc", str(NUM_RANKS))
    plain = losses_of(check.python(*check.memadvisor("profile", "ddp", *ranks), *words))
    run = memadvisor.load(check.folder / "ddp")
    step = captured_step(run)
    # Of tensors on a GPU Gloo does not tell when a message is over. Peaks, which are compared, hang on no time.
    seen = observed_collectives(run) or (A_MESSAGE,)
    times = times_from_observations(seen, "the traced step's own collectives")
    plain_s = analyze(run, None).ranks[0].step_time.median_s
    check.row(f"{NUM_RANKS} ranks, DDP: peak, captured", format_bytes(step.peak_bytes))
    check.row(f"{NUM_RANKS} ranks, DDP: step time", format_seconds(plain_s))
    waits = waits_of(check, "ddp", "profile", ranks, words)
    for way in OVERLAPPING:
        plan = plan_of(run, step, times, WAYS[way])
        file = check.folder / f"{way}.json"
        save_plan(plan, file)
        options = (*ranks, "--plan", file)
        losses = losses_of(check.python(*check.memadvisor("run", way, *options), *words))
        name = f"{NUM_RANKS} ranks, ZeRO {way}"
        applied = analysis_of(check, way)
        peak = applied.comparison.peak_bytes
        check.row(f"{name}: losses against DDP", f"{largest_difference(losses, plain):.1e}")
        check.row(
            f"{name}: peak, predicted",
            format_bytes(peak.predicted),
            format_fraction(peak.predicted / peak.measured) + " of captured",
        )
        measured_s = applied.ranks[0].step_time.median_s
        check.row(
            f"{name}: step time",
            format_seconds(measured_s),
            f"{format_fraction(measured_s / plain_s)} of DDP's",
        )
        if check.on_cuda:
            counts = waits_of(check, way, "run", options, words), waits
            said = "none added" if counts[0] <= counts[1] else "ADDED"
            check.row(f"{name}: waits for the device, against DDP", f"{counts[0]} / {counts[1]}", said)


def check_placement(check):
    """On one rank: optimizer state, then all states and activations on another tier; budgets for bf16 weights."""
    check.tried("states on another tier", check_tiers)
    check.tried("budgets", check_budgets)


def check_tiers(check):
    tier = "host" if check.on_cuda else "disk"
    words = [GPT, *STATE_SHAPES[check.kind].split(), "--device", check.args.device]
    plain = losses_of(check.python(*check.memadvisor("profile", "whole"), *words))
    whole = analysis_of(check, "whole").ranks[0]
    peak_bytes, step_s = whole.peak.allocated_bytes, whole.step_time.median_s
    state_bytes = whole.model_states.optimizer_state_bytes
    check.row("states on the device: peak, captured", format_bytes(peak_bytes))
    check.row("states on the device: step time", format_seconds(step_s))
    third_bytes = peak_bytes // 3
    for name, options in {
        f"optimizer state on {tier}": ("--offload-optimizer", tier),
        f"all on {tier}, a third of the memory": (
            "--offload-parameters", tier, "--offload-activations", tier, "--memory-limit", f"{third_bytes}B",
        ),
    }.items():  # fmt: skip
        out = name.replace(" ", "-")
        losses = losses_of(check.python(*check.memadvisor("run", out, *options), *words))
        rank = analysis_of(check, out).ranks[0]
        captured_bytes = rank.peak.allocated_bytes
        check.row(f"{name}: losses", alike(losses, plain))
        check.row(
            f"{name}: peak, captured",
            format_bytes(captured_bytes),
            f"{format_bytes(peak_bytes - captured_bytes)} less; optimizer state is {format_bytes(state_bytes)}",
        )
        measured_s = rank.step_time.median_s
        check.row(f"{name}: step time", format_seconds(measured_s), f"x {measured_s / step_s:.2f}")


def check_budgets(check):
    """Tokens a second within each budget, of the plan that is advised, full recomputation and torch's budget."""
    shape = BUDGET_SHAPES[check.kind].split()
    words = [GPT, *shape, "--device", check.args.device]
    tokens = int(shape[shape.index("--micro-batch") + 1]) * int(shape[shape.index("--seq") + 1])
    check.python(*check.memadvisor("profile", "budgets"), *words)
    whole = analysis_of(check, "budgets").ranks[0]
    peak_bytes = whole.peak.allocated_bytes
    add_speed(check, "bf16 weights, plain", tokens, whole)
    full = check.memadvisor("run", "full", "--policy", "every-layer")
    check.python(*full, *words)
    add_speed(check, "bf16 weights, full recomputation", tokens, analysis_of(check, "full").ranks[0])
    for budget in BUDGETS:
        advice = memadvisor.advise(check.folder / "budgets", memory=int(budget * peak_bytes))
        chosen = next((one for one in advice.plans if one.fits and not one.changes_script), None)
        name = f"bf16 weights, {budget:.0%} of the peak"
        if chosen is None:
            check.row(name, "no plan fits", f"smallest {format_bytes(advice.smallest_budget_bytes)}")
            continue
        file, out = check.folder / f"{budget}.json", f"budget-{budget}"
        save_plan(chosen.plan, file)
        check.python(*check.memadvisor("run", out, "--plan", file), *words)
        applied = analysis_of(check, out)
        add_speed(check, name, tokens, applied.ranks[0])
        peak = applied.comparison.peak_bytes
        held = "held" if peak.measured <= budget * peak_bytes else "BROKEN"
        check.row(f"{name}: predicted", format_bytes(peak.predicted), f"budget {held}")
        if check.on_cuda:
            check.tried(f"torch.compile, budget {budget}", add_torchs_budget, budget, words, tokens)


def add_torchs_budget(check, budget, words, tokens):
    """What torch.compile makes of the same share; its peaks and times are those of a witness."""
    result = check.folder / f"compiled-{budget}.json"
    check.python(WITNESS, result, COMPILED, str(budget), *words)
    told = json.loads(result.read_text())
    seconds = statistics.median(told["durations_s"][-4:])
    check.row(
        f"bf16 weights, torch.compile with activation_memory_budget {budget}",
        f"{tokens / seconds:,.0f} tokens/s",
        format_bytes(max(told["peaks_bytes"][-4:])),
    )


def add_speed(check, name, tokens, rank):
    speed = tokens / rank.step_time.median_s
    check.row(name, f"{speed:,.0f} tokens/s", format_bytes(rank.peak.allocated_bytes))


def waits_of(check, name, command, options, words):
    """How often torch reports that a rank's step waited for its device, of the rank with most; None on a CPU."""
    if not check.on_cuda:
        return None
    result = check.folder / f"waits-{name}.json"
    runner = ["-m", "memadvisor", command, *options, "--trace-step", "1000"]
    check.python(*runner, "--out", check.folder / f"waits-{name}", WITNESS, "--waits", result, *words)
    files = check.folder.glob(f"waits-{name}.json*")
    return max(json.loads(file.read_text())["num_waits"] for file in files)


def analysis_of(check, name):
    return analyze(memadvisor.load(check.folder / name), None)


def losses_of(stdout):
    """What the sample has printed."""
    return [float(line.split()[-1]) for line in stdout.splitlines() if line.startswith("step ")]


def alike(losses, others):
    """In words."""
    return "the same" if losses == others else f"differ by {largest_difference(losses, others):.2g}"


def largest_difference(losses, others):
    """Relative; over all steps."""
    return max(abs(a - b) / abs(b) for a, b in zip(losses, others, strict=True))
