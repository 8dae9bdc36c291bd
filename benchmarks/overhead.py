"""What profiling costs: rounds of plain, timed, peer-profiled and traced steps, interleaved in one process.

Every round runs each variant on the same model, in an order that rotates, and compares it with the plain
steps of that round, so that a machine that slows down meanwhile slows all of them. The first step of each
block is not counted: there the model is discovered. A traced step is charged with its start, which falls
into the step before it, and with the writing of its rows.

    python benchmarks/overhead.py
    python benchmarks/overhead.py --layers 12 --dim 768 --heads 12 --seq 1024 --device cuda
"""

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "samples"))
from train_gpt import GPT, read_text, sample_batch

import memadvisor

NEVER = 10**9  # a step that does not come: nothing is traced
VARIANTS = ("plain", "timed", "traced", "torch.profiler")
ROWS = (*VARIANTS, "torch.profiler and its stop")


class Training:
    """A model that is trained for one step at a time."""

    def __init__(self, args):
        torch.manual_seed(0)
        self.device = torch.device(args.device)
        self.model = GPT(args.layers, args.dim, args.heads, args.seq).to(self.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        generator = torch.Generator().manual_seed(0)
        self.bf16 = args.bf16
        self.batch = sample_batch(read_text(), args.micro_batch, args.seq, generator, self.device)

    def step(self):
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.bf16):
            loss = self.model(*self.batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def timed_step(self):
        """(wall seconds, CPU seconds of all threads) of one step, up to the device's last kernel."""
        self.synchronize()
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        self.step()
        self.synchronize()
        return time.perf_counter() - wall_s, time.process_time() - cpu_s

    def synchronize(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def mean(pairs):
    return tuple(statistics.mean(values) for values in zip(*pairs, strict=True))


def run_block(training, context, num_steps):
    """Mean (wall, CPU) of a step inside `context`, without the first one; and what leaving it took."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(context)
        training.step()
        steps = [training.timed_step() for _ in range(num_steps)]
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        stack.close()
    return mean(steps), (time.perf_counter() - wall_s, time.process_time() - cpu_s)


def profiled(scratch, trace_step):
    return memadvisor.profile(Path(tempfile.mkdtemp(dir=scratch)) / "run", trace_step=trace_step)


def peer():
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    return torch.profiler.profile(activities=activities, profile_memory=True)


def run_traced(training, scratch):
    """(wall, CPU) of one traced step: that of two steps of which the second is traced, less a timed one."""
    with profiled(scratch, trace_step=3):
        training.step()
        timed = training.timed_step()
        both = [training.timed_step() for _ in range(2)]
    return tuple(sum(values) - one for values, one in zip(zip(*both, strict=True), timed, strict=True))


def run_round(training, num_steps, scratch, first):
    """Seconds of a step by variant, and the share of leaving a profiler that falls on each of its steps."""
    seconds = {}
    for variant in VARIANTS[first:] + VARIANTS[:first]:
        if variant == "traced":
            seconds[variant] = run_traced(training, scratch)
            continue
        contexts = {
            "plain": contextlib.nullcontext,
            "timed": lambda: profiled(scratch, NEVER),
            "torch.profiler": peer,
        }
        step, leaving = run_block(training, contexts[variant](), num_steps)
        seconds[variant] = step
        if variant == "torch.profiler":
            seconds["torch.profiler and its stop"] = tuple(
                a + b / num_steps for a, b in zip(step, leaving, strict=True)
            )
    return seconds


def summarize(rounds):
    """Medians over rounds; each ratio is to the plain steps of the same round."""
    return {
        variant: {
            "wall_s": statistics.median(r[variant][0] for r in rounds),
            "cpu_s": statistics.median(r[variant][1] for r in rounds),
            "wall_ratio": statistics.median(r[variant][0] / r["plain"][0] for r in rounds),
            "cpu_ratio": statistics.median(r[variant][1] / r["plain"][1] for r in rounds),
            "cpu_ratio_range": [
                min(r[variant][1] / r["plain"][1] for r in rounds),
                max(r[variant][1] / r["plain"][1] for r in rounds),
            ],
        }
        for variant in ROWS
    }


def print_table(summary):
    print(f"{'':28} {'wall':>10} {'CPU':>10} {'wall ratio':>11} {'CPU ratio':>10}   range of the CPU ratio")
    for variant, row in summary.items():
        low, high = row["cpu_ratio_range"]
        print(
            f"{variant:28} {1e3 * row['wall_s']:>7.2f} ms {1e3 * row['cpu_s']:>7.2f} ms"
            f" {row['wall_ratio']:>11.3f} {row['cpu_ratio']:>10.3f}   {low:.3f} - {high:.3f}"
        )


def parse_args(argv):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=6, help="steps of a variant in a round")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--seq", type=int, default=256)
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--bf16", action="store_true", help="autocast to bfloat16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args(argv)


def measure(args):
    training = Training(args)
    for _ in range(3):
        training.step()
    with tempfile.TemporaryDirectory() as scratch:
        rounds = [run_round(training, args.steps, scratch, n % len(VARIANTS)) for n in range(args.rounds)]
    return summarize(rounds)


def main(argv=None):
    args = parse_args(argv)
    summary = measure(args)
    if args.json:
        print(json.dumps(summary, indent=1))
        return
    threads = torch.get_num_threads()
    print(
        f"GPT of {args.layers} layers, d={args.dim}, {args.micro_batch} x {args.seq} bytes, {args.device}, "
        f"{threads} threads, torch {torch.__version__}; {args.rounds} rounds of {args.steps} steps"
    )
    print_table(summary)


if __name__ == "__main__":
    main()
