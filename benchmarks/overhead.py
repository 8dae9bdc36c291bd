"""What profiling costs: rounds of plain, timed, traced and peer-profiled steps, interleaved in one process.

Two models: a GPT (6 layers, d=256), and twenty tiny layers whose step is nothing but launches. Every round runs
each variant on the same model, in an order that rotates, and compares it with the plain steps of that round, so
that a machine that slows down meanwhile slows all of them. Others on the machine only ever add to a time, and on a
shared one they may double it from one round to the next: so a second ratio stands beside the median one, that of
the mean of a variant's fastest quarter of rounds to the mean of the plain steps' fastest quarter. What is not counted: the steps up to a profile's traced
one, and as many more as it takes to learn how often it can afford to listen; a traced step is charged with its
start, which falls into the step before it, and with the writing of its rows. `labels alone` are the dispatch mode
and the saved-tensor hooks of a traced step without the rest of it; `afterwards` is a plain step once a profile
is over.

What an operator costs is the time of the thread that runs it: while that is in Python, OpenMP's other threads wait by
spinning, which would be charged to the operator once for each of them. On CUDA, where backwards run on a thread of
their own, it is that of all threads.

Beside the overhead that is measured stands the one that the run itself states; and what the journal takes.

    python benchmarks/overhead.py
    python benchmarks/overhead.py --models gpt --layers 12 --dim 768 --heads 12 --seq 1024 --device cuda
"""

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
import time
import tracemalloc
from pathlib import Path

import torch
from torch import nn
from torch._C._autograd import _pop_saved_tensors_default_hooks, _push_saved_tensors_default_hooks
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils.flop_counter import FlopCounterMode

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "samples"))
from train_gpt import GPT, read_text, sample_batch

import memadvisor
from memadvisor.capture.collectives import CollectiveLog
from memadvisor.capture.label_log import LabelLog
from memadvisor.capture.labels import LabelMode
from memadvisor.capture.position import Position
from memadvisor.capture.saved_hooks import SavedTensorHooks

NEVER = 10**9  # a step that does not come: nothing is traced
TRACE_STEP = 2
VARIANTS = (
    "plain",
    "timed",
    "afterwards",
    "labels alone",
    "traced",
    "torch.profiler",
    "FlopCounterMode",
    "MemTracker",
)
ROWS = (*VARIANTS, "torch.profiler and its stop")
CLOCKS = (time.perf_counter, time.process_time, time.thread_time)


def now():
    return tuple(clock() for clock in CLOCKS)


def since(before):
    return tuple(after - earlier for after, earlier in zip(now(), before, strict=True))


class GptTraining:
    """A GPT that is trained for one step at a time."""

    warm_steps, steps_of_a_round = TRACE_STEP + 2, 6

    def __init__(self, args):
        torch.manual_seed(0)
        self.device = torch.device(args.device)
        self.model = GPT(args.layers, args.dim, args.heads, args.seq).to(self.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        generator = torch.Generator().manual_seed(0)
        self.bf16 = args.bf16
        self.batch = sample_batch(read_text(), args.micro_batch, args.seq, generator, self.device)
        self.title = (
            f"GPT of {args.layers} layers, d={args.dim}, {args.micro_batch} x {args.seq} bytes, {args.device}"
        )

    def loss(self):
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.bf16):
            return self.model(*self.batch)

    def step(self):
        self.loss().backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def timed_step(self):
        """Seconds of one step by each of CLOCKS, up to the device's last kernel."""
        self.synchronize()
        before = now()
        self.step()
        self.synchronize()
        return since(before)

    def synchronize(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class TinyTraining(GptTraining):
    """Twenty tiny layers: all of a step's time goes into calls, which is the worst case for whoever adds some."""

    # The first ten steps are listened to, the next eight are not, and then the profile knows what it can afford.
    warm_steps, steps_of_a_round = 40, 64

    def __init__(self, args):
        torch.manual_seed(0)
        self.device = torch.device(args.device)
        layers = [nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(20)]
        self.model = nn.Sequential(*layers).to(self.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.batch = torch.randn(8, 16, device=self.device)
        self.title = f"20 layers of Linear(16, 16) and ReLU, batch of 8, {args.device}"

    def loss(self):
        return self.model(self.batch).sum()


TRAININGS = {"gpt": GptTraining, "tiny": TinyTraining}


def mean(pairs):
    return tuple(statistics.mean(values) for values in zip(*pairs, strict=True))


def run_block(training, context, num_steps, warm_steps=1):
    """Mean seconds of a step inside `context`, without the first ones, by each clock; and what leaving it took."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(context)
        for _ in range(warm_steps):
            training.step()
        steps = [training.timed_step() for _ in range(num_steps)]
        before = now()
        stack.close()
    return mean(steps), since(before)


def profiled(scratch, trace_step=TRACE_STEP):
    return memadvisor.profile(Path(tempfile.mkdtemp(dir=scratch)) / "run", trace_step=trace_step)


def peer():
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    return torch.profiler.profile(activities=activities, profile_memory=True)


@contextlib.contextmanager
def mem_tracker(training):
    """MemTracker refuses a second step unless it is reset, and does not follow `zero_grad`'s."""
    tracker = MemTracker()
    tracker.track_external(training.model, training.optimizer)
    step = training.step

    def reset_and_step():
        tracker.reset_mod_stats()
        step()

    training.step = reset_and_step
    try:
        with tracker:
            yield
    finally:
        del training.step


def fail(error):
    raise error


@contextlib.contextmanager
def labels(device, log):
    mode = LabelMode(log, CollectiveLog(None, fail), Position(), device, fail)
    hooks = SavedTensorHooks(mode, log, fail)
    with mode:
        _push_saved_tensors_default_hooks(hooks.pack, hooks.unpack)
        try:
            yield
        finally:
            _pop_saved_tensors_default_hooks()


def run_traced(training, scratch):
    """Seconds of one traced step by each clock: that of two steps of which the second is traced, less a timed one."""
    with profiled(scratch, trace_step=3):
        training.step()
        timed = training.timed_step()
        both = [training.timed_step() for _ in range(2)]
    return tuple(sum(values) - one for values, one in zip(zip(*both, strict=True), timed, strict=True))


def stated_fraction(steps):
    """Share of these steps that the run says the recorder took."""
    return sum(step.recorder_s for step in steps) / sum(step.duration_s for step in steps)


def run_round(training, variants, num_steps, scratch):
    """Seconds of a step by variant, the share of leaving a profiler that falls on each step, and what the run states."""
    seconds, stated = {}, None
    for variant in variants:
        if variant == "traced":
            seconds[variant] = run_traced(training, scratch)
        elif variant == "timed":
            profile = profiled(scratch)
            seconds[variant], _ = run_block(training, profile, num_steps, training.warm_steps)
            stated = stated_fraction(profile.run.ranks[0].steps[-num_steps:])
        elif variant == "afterwards":
            with profiled(scratch):
                for _ in range(TRACE_STEP + 2):
                    training.step()
            seconds[variant], _ = run_block(training, contextlib.nullcontext(), num_steps)
        else:
            context = {
                "plain": contextlib.nullcontext,
                "torch.profiler": peer,
                "FlopCounterMode": lambda: FlopCounterMode(display=False),
                "MemTracker": lambda: mem_tracker(training),
                "labels alone": lambda: labels(training.device, LabelLog()),
            }[variant]()
            seconds[variant], leaving = run_block(training, context, num_steps)
            if variant == "torch.profiler":
                seconds["torch.profiler and its stop"] = tuple(
                    a + b / num_steps for a, b in zip(seconds[variant], leaving, strict=True)
                )
    return seconds, stated


def fastest_quarter_s(rounds, variant, clock):
    """Mean seconds of a step in the quarter of the rounds that were fastest for this variant by this clock."""
    seconds = sorted(r[variant][clock] for r in rounds)
    return statistics.mean(seconds[: max(1, len(seconds) // 4)])


def summarize(rounds):
    """Medians over rounds, each ratio to the plain steps of the same round; and of the fastest quarters of rounds."""
    quiet_s = {v: [fastest_quarter_s(rounds, v, clock) for clock in range(len(CLOCKS))] for v in rounds[0]}
    return {
        variant: {
            "wall_s": statistics.median(r[variant][0] for r in rounds),
            "cpu_s": statistics.median(r[variant][1] for r in rounds),
            "added_thread_s": statistics.median(r[variant][2] - r["plain"][2] for r in rounds),
            "added_cpu_s": statistics.median(r[variant][1] - r["plain"][1] for r in rounds),
            "wall_ratio": statistics.median(r[variant][0] / r["plain"][0] for r in rounds),
            "cpu_ratio": statistics.median(r[variant][1] / r["plain"][1] for r in rounds),
            "quiet_cpu_ratio": quiet_s[variant][1] / quiet_s["plain"][1],
            "quiet_added_thread_s": quiet_s[variant][2] - quiet_s["plain"][2],
            "quiet_added_cpu_s": quiet_s[variant][1] - quiet_s["plain"][1],
            "cpu_ratio_range": [
                min(r[variant][1] / r["plain"][1] for r in rounds),
                max(r[variant][1] / r["plain"][1] for r in rounds),
            ],
        }
        for variant in ROWS
        if variant in rounds[0]
    }


def count_operators(training):
    log = LabelLog()
    with labels(training.device, log):
        training.step()
    log.gather()
    return len(log.calls)


def journal_bytes(training, scratch, num_steps, trace_step):
    profile = profiled(scratch, trace_step)
    with profile:
        for _ in range(num_steps):
            training.step()
    return sum(path.stat().st_size for path in profile.directory.glob("*.journal"))


def python_peak_bytes(training, context):
    """Highest memory that Python objects made in `context` took; tensors are not among it."""
    tracemalloc.start()
    with context:
        for _ in range(TRACE_STEP + 4):
            training.step()
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak_bytes


def measure_sizes(training, scratch):
    few, many = TRACE_STEP + 2, TRACE_STEP + 2 + 4 * training.steps_of_a_round
    untraced = journal_bytes(training, scratch, few, NEVER)
    plain_bytes = python_peak_bytes(training, contextlib.nullcontext())
    return {
        "num_operators": count_operators(training),
        "journal_bytes_per_timed_step": (journal_bytes(training, scratch, many, NEVER) - untraced)
        / (many - few),
        "journal_bytes_of_traced_step": journal_bytes(training, scratch, few, TRACE_STEP) - untraced,
        "recorder_peak_bytes": python_peak_bytes(training, profiled(scratch)) - plain_bytes,
    }


def print_table(summary):
    print(
        f"{'':28} {'wall':>10} {'CPU':>10} {'wall ratio':>11} {'CPU ratio':>10} {'fastest':>8}   range of the CPU ratio"
    )
    for variant, row in summary.items():
        low, high = row["cpu_ratio_range"]
        print(
            f"{variant:28} {1e3 * row['wall_s']:>7.2f} ms {1e3 * row['cpu_s']:>7.2f} ms"
            f" {row['wall_ratio']:>11.3f} {row['cpu_ratio']:>10.3f} {row['quiet_cpu_ratio']:>8.3f}   {low:.3f} - {high:.3f}"
        )


def print_facts(steps, facts, device):
    added = "added_cpu_s" if device.type == "cuda" else "added_thread_s"
    extra_us = {
        name: [1e6 * steps[name][key] / facts["num_operators"] for key in (added, f"quiet_{added}")]
        for name in ("labels alone", "traced", "FlopCounterMode", "MemTracker")
        if name in steps
    }
    if "timed" in steps:
        median, quiet = steps["timed"]["cpu_ratio"] - 1, steps["timed"]["quiet_cpu_ratio"] - 1
        print(
            f"overhead of timed steps: {median:.2%} measured, {quiet:.2%} in the fastest rounds, "
            f"{facts['stated_fraction']:.2%} stated by the run"
        )
    print(
        f"per operator ({facts['num_operators']} a step): "
        + ", ".join(
            f"{name} {us:.1f} us ({quiet:.1f} in the fastest rounds)"
            for name, (us, quiet) in extra_us.items()
        )
    )
    print(
        f"journal: {facts['journal_bytes_per_timed_step'] / 1e3:.2f} kB a timed step, "
        f"{facts['journal_bytes_of_traced_step'] / 1e3:.0f} kB the traced one; "
        f"the recorder's Python objects: {facts['recorder_peak_bytes'] / 1e6:.1f} MB at most"
    )


def parse_args(argv):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, help="steps of a variant in a round (default: 6 and 64)")
    parser.add_argument("--models", nargs="+", choices=list(TRAININGS), default=list(TRAININGS))
    parser.add_argument("--variants", nargs="+", choices=VARIANTS[1:], default=list(VARIANTS[1:]))
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--seq", type=int, default=256)
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--bf16", action="store_true", help="autocast to bfloat16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args(argv)


def measure(args, model):
    training = TRAININGS[model](args)
    for _ in range(3):
        training.step()
    num_steps = args.steps or training.steps_of_a_round
    with tempfile.TemporaryDirectory() as scratch:
        variants = [variant for variant in VARIANTS if variant == "plain" or variant in args.variants]
        rounds = []
        for _ in range(args.rounds):
            rounds.append(run_round(training, variants, num_steps, scratch))
            variants = [*variants[1:], variants[0]]
        facts = measure_sizes(training, scratch)
    if "timed" in variants:
        facts["stated_fraction"] = statistics.median(stated for _, stated in rounds)
    return {"title": training.title, "steps": summarize([seconds for seconds, _ in rounds]), "facts": facts}


def main(argv=None):
    args = parse_args(argv)
    if args.json:
        print(json.dumps({model: measure(args, model) for model in args.models}, indent=1))
        return
    for model in args.models:
        found = measure(args, model)
        print(
            f"{found['title']}, {torch.get_num_threads()} threads, torch {torch.__version__}; {args.rounds} rounds"
        )
        print_table(found["steps"])
        print_facts(found["steps"], found["facts"], torch.device(args.device))


if __name__ == "__main__":
    main()
