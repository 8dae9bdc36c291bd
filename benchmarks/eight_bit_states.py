"""Optimizer state in 8 bits: ours, torchao's and bitsandbytes' AdamW8bit where they can be imported, and plain AdamW.

The same GPT learns the same batches under each, in one process, a step of each in turn. Losses are means of the last 20
steps; times are CPU seconds on one thread, medians of the steps behind the first five (torchao compiles its update in the
first); state is what the optimizer keeps between steps, with scales and tables.

    python benchmarks/eight_bit_states.py [--steps 300] [--layers 4] [--dim 128] [--seq 64] [--micro-batch 8] [--seeds 1]
"""

import argparse
import importlib
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from memadvisor.engines.apply import apply
from memadvisor.engines.sharding.late import LateTensor
from memadvisor.plan import Plan
from samples import train_gpt

TEXT = train_gpt.read_text(2_000_000)
OTHERS = {"torchao": "torchao.optim", "bitsandbytes": "bitsandbytes.optim"}
WARM_UP = 5
SETTINGS = {"lr": 5e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}


class Training:
    """One model, its optimizer, and what was seen of both."""

    def __init__(self, name, args, seed):
        torch.manual_seed(seed)
        self.model = train_gpt.GPT(args.layers, args.dim, args.heads, args.seq)
        kind = importlib.import_module(OTHERS[name]).AdamW8bit if name in OTHERS else torch.optim.AdamW
        self.optimizer = kind(self.model.parameters(), **SETTINGS)
        self.applied = None
        if name == "ours":
            plan = Plan(num_ranks=1, zero_stage=0, optimizer_bits=8)
            self.applied = apply(plan, self.model, self.optimizer)
        self.losses, self.steps_s, self.updates_s = [], [], []

    def step(self, batch):
        start_s = time.process_time()
        loss = self.model(*batch)
        loss.backward()
        middle_s = time.process_time()
        self.optimizer.step()
        end_s = time.process_time()
        self.optimizer.zero_grad()
        self.losses.append(float(loss.detach()))
        self.steps_s.append(end_s - start_s)
        self.updates_s.append(end_s - middle_s)

    def state_bytes(self):
        found = {}
        for state in self.optimizer.state.values():
            for value in state.values():
                parts = [getattr(value, part, None) for part in ("codes", "scale", "qmap")]
                for tensor in parts if parts[0] is not None else [value]:
                    if isinstance(tensor, torch.Tensor) and type(tensor) is not LateTensor:
                        found[tensor.data_ptr()] = tensor.nbytes
        for tensor, _, _ in self.applied.labelled_tensors() if self.applied is not None else ():
            found[tensor.data_ptr()] = tensor.nbytes
        return sum(found.values())


def importable(name):
    try:
        importlib.import_module(OTHERS[name])
    except ImportError as error:
        print(f"{name} cannot be imported here: {error}")
        return False
    return True


def run(names, args, seed):
    trainings = {name: Training(name, args, seed) for name in names}
    generator = torch.Generator().manual_seed(seed)
    for _ in range(args.steps):
        batch = train_gpt.sample_batch(TEXT, args.micro_batch, args.seq, generator, "cpu")
        for training in trainings.values():
            training.step(batch)
    return trainings


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for option, default in (("steps", 300), ("layers", 4), ("dim", 128), ("heads", 4), ("seq", 64)):
        parser.add_argument(f"--{option}", type=int, default=default)
    parser.add_argument("--micro-batch", type=int, default=8)
    parser.add_argument("--seeds", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(1)
    names = ["plain", "ours", *filter(importable, OTHERS)]
    for seed in range(args.seeds):
        trainings = run(names, args, seed)
        plain = trainings["plain"]
        num_parameters = sum(p.numel() for p in plain.model.parameters())
        print(f"seed {seed}, {num_parameters} parameters, {args.steps} steps")
        print(
            f"{'':14}{'loss':>9}{'difference':>12}{'state bytes':>13}{'update':>10}{'step':>10}{'ratio':>7}"
        )
        for name, training in trainings.items():
            loss, usual = (statistics.mean(each.losses[-20:]) for each in (training, plain))
            update_s = statistics.median(training.updates_s[WARM_UP:])
            ratios = [a / b for a, b in zip(training.steps_s, plain.steps_s, strict=True)][WARM_UP:]
            step_s = statistics.median(training.steps_s[WARM_UP:])
            print(
                f"{name:14}{loss:9.4f}{loss - usual:12.4f}{training.state_bytes():13d}{1e3 * update_s:7.1f} ms"
                f"{1e3 * step_s:7.1f} ms{statistics.median(ratios):7.2f}",
                flush=True,
            )
            if training.applied is not None:
                training.applied.remove()


if __name__ == "__main__":
    main()
