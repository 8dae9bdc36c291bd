"""Plans of `advise` at budgets below the plain peak, beside every-layer, sqrt and selective: predicted and measured peak and
time. At each budget the fastest plan that keeps outputs of operators, and the fastest one that does not.

A plain profile of a few steps is what `advise` plans from. Each plan is applied to a fresh model and profiled, which
gives its measured peak. Then all of them take a step in turn, round after round, without the recorder: measured time
is CPU seconds of the fastest step, as a multiple of the plain one's; predicted time is as a multiple of the plain one
too. Losses are compared with the plain ones, all of them.

    python benchmarks/recomputation.py [--rounds 5] [--models gpt cnn sample-gpt sample-cnn] [--budgets 80 60 40 30 20]
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import memadvisor
from memadvisor.engines.apply import apply
from memadvisor.plan import Plan
from memadvisor.planning.advise import advise
from samples import train_cnn, train_gpt
from tests.analyzers.checkpointed import Cnn, Gpt, loss_of

MODELS = {
    "gpt": lambda: Gpt(dim=32, layers=24),
    "cnn": lambda: Cnn(32),
    "sample-gpt": lambda: train_gpt.GPT(layers=12, dim=128, heads=8, seq=256, dropout=0.1),
    "sample-cnn": lambda: train_cnn.ResNet(24),
}
STEPS = 4
TEXT = train_gpt.read_text(1_000_000)
DIGITS = train_cnn.load_data("cpu")[0]


def hand_made(policy):
    return Plan(num_ranks=1, zero_stage=0, policy=policy)


def batch_of(model, step):
    """Random numbers, and for the samples' models real text and real digits."""
    if isinstance(model, train_gpt.GPT):
        generator = torch.Generator().manual_seed(step)
        return train_gpt.sample_batch(TEXT, 4, 256, generator, torch.device("cpu"))
    if isinstance(model, train_cnn.ResNet):
        images, labels = DIGITS
        chosen = slice(128 * step, 128 * (step + 1))
        return images[chosen], labels[chosen]
    images = isinstance(model, Cnn)
    x = torch.randn(16, 3, 32, 32) if images else torch.randint(0, 256, (4, 128))
    return x, torch.randint(0, 10, (16,)) if images else torch.randint(0, 256, (4, 128))


def trained(make, plan, steps):
    """Losses and CPU seconds of each step, with a plan applied."""
    torch.manual_seed(0)
    model = make()
    applied = None if plan is None else apply(plan, model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    try:
        taken, losses = [], []
        for step in range(steps):
            x, target = batch_of(model, step)
            start_s = time.process_time()
            is_sample = isinstance(model, train_gpt.GPT)
            loss = model(x, target) if is_sample else loss_of(model, x, target)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            taken.append(time.process_time() - start_s)
            losses.append(float(loss.detach()))
    finally:
        if applied is not None:
            applied.remove()
    return losses, min(taken)


def recorded(make, plan):
    with tempfile.TemporaryDirectory() as scratch:
        with memadvisor.profile(Path(scratch) / "run", trace_step=1):
            trained(make, plan, STEPS)
        return memadvisor.load(Path(scratch) / "run")


def plans_of(run, budgets):
    peak_bytes = run.ranks[0].traced_step.peak_allocated_bytes
    plans = {"plain": None, **{name: hand_made(name) for name in ("every-layer", "sqrt", "selective")}}
    for percent in budgets:
        advice = advise(run, memory_bytes=peak_bytes * percent // 100)
        found = [ranked.plan for ranked in advice.plans if ranked.fits and not ranked.changes_script]
        for words, keeps in (("units", False), ("operators", True)):
            alike = (plan for plan in found if any(unit.kept for unit in plan.units) is keeps)
            plans[f"{percent} %, {words}"] = next(alike, None)
    return {name: plan for name, plan in plans.items() if plan is not None or name == "plain"}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--budgets", nargs="+", type=int, default=[80, 60, 40, 30, 20])
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, 1 thread, {args.rounds} rounds")
    for name in args.models:
        make = MODELS[name]
        run = recorded(make, None)
        plans = plans_of(run, args.budgets)
        peaks = {n: recorded(make, p).ranks[0].traced_step.peak_allocated_bytes for n, p in plans.items()}
        plain = trained(make, None, STEPS)[0]  # losses
        rounds = []
        for _ in range(args.rounds):
            rounds.append({n: trained(make, p, 2) for n, p in plans.items()})
        fastest_s = {n: min(taken[n][1] for taken in rounds) for n in plans}
        plain_s = advise(run, memory_bytes=2**60).measured_step_time_s
        print(
            f"{name}: plain peak {peaks['plain']} bytes, {1e3 * fastest_s['plain']:.1f} ms of CPU time a step"
        )
        print(
            f"{'plan':<16} {'predicted peak':>15} {'measured':>12} {'of plain':>9} {'predicted time':>15} "
            f"{'measured':>9}  recomputed"
        )
        for plan_name, plan in plans.items():
            if plan is None:
                continue
            predicted = plan.prediction
            again = (
                f"{len(plan.recomputed_units)} units, {len(plan.stretches)} stretches, "
                f"{sum(len(unit.kept) for unit in plan.units)} outputs kept; "
                if predicted
                else ""
            )
            equal = trained(make, plan, STEPS)[0] == plain
            print(
                f"{plan_name:<16} {predicted.peak_bytes if predicted else '-':>15} {peaks[plan_name]:>12} "
                f"{100 * peaks[plan_name] / peaks['plain']:>7.1f} % "
                f"{f'{predicted.step_time_s / plain_s:.3f}' if predicted else '-':>15} "
                f"{fastest_s[plan_name] / fastest_s['plain']:>9.3f}  "
                f"{again}losses {'equal' if equal else 'DIFFER'}"
            )


if __name__ == "__main__":
    main()
