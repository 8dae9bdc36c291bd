"""A loss in chunks: ours on a script that knows nothing of it, torch's linear_cross_entropy (from 2.13 on) called by one
that does, and all scores at once.

The same GPT learns the same batches under each, in one process, a step of each in turn. Times are CPU seconds on one thread,
medians of the steps behind the first three; peaks are the allocator's of one more step of each, by itself.

    python benchmarks/chunked_loss.py [--steps 12] [--words 16000] [--layers 4] [--dim 256] [--seq 256] [--micro-batch 4] [--rows auto]
"""

import argparse
import gc
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import memadvisor
from memadvisor.chunked_loss import ChunkedLoss
from memadvisor.engines.apply import apply
from memadvisor.plan import Plan

WARM_UP = 3
GIVEN = {"torch's": True, "all at once": False, "ours": False}


class Gpt(nn.Module):
    def __init__(self, args, calls_torchs):
        super().__init__()
        layer = nn.TransformerEncoderLayer(args.dim, 4, 4 * args.dim, dropout=0.0, batch_first=True)
        self.tokens = nn.Embedding(args.words, args.dim)
        self.blocks = nn.TransformerEncoder(layer, args.layers, enable_nested_tensor=False)
        self.head = nn.Linear(args.dim, args.words, bias=False)
        self.calls_torchs = calls_torchs

    def forward(self, words):
        hidden = self.blocks(self.tokens(words[:, :-1]))
        targets = words[:, 1:].flatten()
        if self.calls_torchs:
            options = nn.LinearCrossEntropyOptions()
            return F.linear_cross_entropy(hidden.flatten(0, 1), self.head.weight, targets, options=options)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), targets)


class Training:
    def __init__(self, name, args):
        torch.manual_seed(0)
        self.model = Gpt(args, GIVEN[name])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        self.applied = None
        if name == "ours":
            rows = None if args.rows == "auto" else int(args.rows)
            plan = Plan(num_ranks=1, zero_stage=0, chunked_loss=ChunkedLoss(rows=rows))
            self.applied = apply(plan, self.model, self.optimizer)
        self.losses, self.steps_s = [], []

    def step(self, words):
        start_s = time.process_time()
        loss = self.model(words)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps_s.append(time.process_time() - start_s)
        self.losses.append(float(loss.detach()))


def peak_bytes(name, args):
    """Of a step of one training alone."""
    gc.collect()
    training = Training(name, args)
    with tempfile.TemporaryDirectory() as directory:
        with memadvisor.profile(Path(directory) / "run", trace_step=2) as prof:
            for number in range(4):
                training.step(batch(args, number))
        if training.applied is not None:
            training.applied.remove()
        return prof.run.ranks[0].traced_step.peak_allocated_bytes


def batch(args, number):
    generator = torch.Generator().manual_seed(number)
    return torch.randint(args.words, (args.micro_batch, args.seq + 1), generator=generator)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for option, default in (
        *(("steps", 12), ("words", 16_000), ("layers", 4), ("dim", 256), ("seq", 256), ("micro-batch", 4)),
    ):
        parser.add_argument(f"--{option}", type=int, default=default)
    parser.add_argument("--rows", default="auto")
    args = parser.parse_args()
    torch.set_num_threads(1)
    names = [name for name in GIVEN if not GIVEN[name] or hasattr(F, "linear_cross_entropy")]
    trainings = {name: Training(name, args) for name in names}
    for number in range(args.steps):
        for training in trainings.values():
            training.step(batch(args, number))
    for training in trainings.values():
        if training.applied is not None:
            training.applied.remove()
    usual = trainings["all at once"]
    print(f"torch {torch.__version__}, {args.micro_batch * args.seq} tokens, {args.words} words")
    print(f"{'':14}{'step':>12}{'ratio':>8}{'peak MiB':>10}{'ratio':>8}{'last loss':>12}")
    peaks = {name: peak_bytes(name, args) for name in names}
    for name, training in trainings.items():
        ratios = [a / b for a, b in zip(training.steps_s, usual.steps_s, strict=True)][WARM_UP:]
        print(
            f"{name:14}{1e3 * statistics.median(training.steps_s[WARM_UP:]):9.1f} ms{statistics.median(ratios):8.2f}"
            f"{peaks[name] / 2**20:10.1f}{peaks[name] / peaks['all at once']:8.2f}{training.losses[-1]:12.6f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
