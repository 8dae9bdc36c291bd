"""The samples' models trained plainly, and with activations in 8, 4 and 2 bits: losses, peaks and CPU time.

Each training begins with the same weights and sees the same data in the same order. The loss at a step is the mean of
the ten steps up to it, on data that the model may have seen; the last column is what is left of it on data that it has not.
Another plain training with other initial weights, "other seed", shows how far apart trainings are that differ in nothing
that matters. Peaks are of one traced step, predicted from the plain run and measured. Time is CPU seconds of the median
step as a multiple of the plain one's; one thread.

    python benchmarks/compressed_activations.py [--models gpt cnn] [--steps 200] [--bits 8 4 2]
"""

import argparse
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import memadvisor
from memadvisor.analyzers.segments import captured_step
from memadvisor.cost.simulate import simulate
from memadvisor.engines.apply import apply
from memadvisor.plan import Plan
from memadvisor.write_schedule import write_schedule
from samples import train_cnn, train_gpt

SEQ, BATCH = 64, 16
CPU = torch.device("cpu")


class Gpt:
    """Bytes of Python's own library; its loss is in nats a byte."""

    def __init__(self):
        self.train_text = train_gpt.read_text(1_000_000)[:-100_000]
        self.test_text = train_gpt.read_text(1_000_000)[-100_000:]

    def model(self):
        return train_gpt.GPT(layers=4, dim=128, heads=4, seq=SEQ, dropout=0.0)

    def optimizer(self, model):
        return torch.optim.AdamW(model.parameters(), lr=1e-3)

    def loss(self, model, step):
        return self._of(model, self.train_text, step)

    def test_loss(self, model):
        return mean(float(self._of(model, self.test_text, step)) for step in range(10))

    def _of(self, model, text, step):
        generator = torch.Generator().manual_seed(step)
        return model(*train_gpt.sample_batch(text, BATCH, SEQ, generator, CPU))


class Cnn:
    """Scikit-learn's digits, or what the sample makes up in their place."""

    def __init__(self):
        (self.images, self.labels), self.test = train_cnn.load_data("cpu")

    def model(self):
        return train_cnn.ResNet(24)

    def optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=5e-4)

    def loss(self, model, step):
        chosen = torch.randint(len(self.labels), (128,), generator=torch.Generator().manual_seed(step))
        return F.cross_entropy(model(self.images[chosen]), self.labels[chosen])

    def test_loss(self, model):
        model.eval()
        found = float(F.cross_entropy(model(self.test[0]), self.test[1]))
        model.train()
        return found


@dataclass(frozen=True)
class Trained:
    losses: list
    test_loss: float
    step_s: float

    def at(self, step):
        return mean(self.losses[max(0, step - 10) : step])


def plan_of(bits):
    return None if bits is None else Plan(num_ranks=1, zero_stage=0, activation_bits=bits)


def trained(kind, bits, steps, seed=0):
    torch.manual_seed(seed)
    model = kind.model()
    applied = None if bits is None else apply(plan_of(bits), model)
    optimizer = kind.optimizer(model)
    losses, taken_s = [], []
    try:
        for step in range(steps):
            start_s = time.process_time()
            loss = kind.loss(model, step)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            taken_s.append(time.process_time() - start_s)
            losses.append(float(loss.detach()))
    finally:
        if applied is not None:
            applied.remove()
    with torch.no_grad():
        test_loss = kind.test_loss(model)
    return Trained(losses, test_loss, median(taken_s))


def recorded(kind, bits):
    with tempfile.TemporaryDirectory() as scratch:
        with memadvisor.profile(Path(scratch) / "run", trace_step=1):
            trained(kind, bits, 3)
        return memadvisor.load(Path(scratch) / "run")


def peak_of(run):
    return run.ranks[0].traced_step.peak_allocated_bytes


def row(name, peak_bytes, plain_bytes, predicted_bytes, found, plain, steps):
    losses = " ".join(f"{found.at(step):>7.4f}" for step in (steps // 4, steps // 2, steps))
    predicted = "-" if predicted_bytes is None else predicted_bytes
    print(
        f"{name:<11} {predicted:>15} {peak_bytes:>12} {100 * peak_bytes / plain_bytes:>7.1f} % "
        f"{found.step_s / plain.step_s:>6.2f}  {losses} {found.test_loss:>9.4f}",
        flush=True,
    )


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=["gpt", "cnn"], default=["gpt", "cnn"])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--bits", nargs="+", type=int, choices=(8, 4, 2), default=[8, 4, 2])
    args = parser.parse_args()
    torch.set_num_threads(1)
    for name in args.models:
        kind = {"gpt": Gpt, "cnn": Cnn}[name]()
        run = recorded(kind, None)
        step = captured_step(run)
        plain_bytes, plain = peak_of(run), trained(kind, None, args.steps)
        print(
            f"{name}: torch {torch.__version__}, {args.steps} steps, {1e3 * plain.step_s:.0f} ms of CPU time each"
        )
        print(
            f"{'':<11} {'predicted peak':>15} {'measured':>12} {'of plain':>9} {'time':>6}  "
            f"loss at {args.steps // 4}, {args.steps // 2}, {args.steps} steps  test"
        )
        row("plain", plain_bytes, plain_bytes, None, plain, plain, args.steps)
        other = trained(kind, None, args.steps, seed=1)
        row("other seed", plain_bytes, plain_bytes, None, other, plain, args.steps)
        for bits in args.bits:
            predicted = simulate(step, write_schedule(plan_of(bits), step.units), None).peak.total_bytes
            measured = peak_of(recorded(kind, bits))
            found = trained(kind, bits, args.steps)
            row(f"{bits} bits", measured, plain_bytes, predicted, found, plain, args.steps)


if __name__ == "__main__":
    main()
