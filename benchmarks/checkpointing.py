"""What checkpointing costs: the seconds predicted from a plain run beside those of checkpoints that are applied.

For each model a plain profile of a few steps predicts, for the modules whose checkpoint costs most, how much
longer a step gets. Then the plain model and the one with `torch.utils.checkpoint` around those modules take a few
steps in turn, round after round, without memadvisor; the difference is the measured cost. Predicted are wall seconds
of the profile's timed steps, so both are wall seconds, of the fastest step of each round.

    python benchmarks/checkpointing.py [--rounds 5] [--models gpt cnn recurrent encoder]
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import memadvisor
from tests.analyzers.checkpointed import Cnn, Encoder, Gpt, Recurrent, train, with_checkpoints

MODELS = {
    "gpt": lambda: Gpt(dim=256, layers=6),
    "cnn": lambda: Cnn(32),
    "recurrent": Recurrent,
    "encoder": Encoder,
}
STEPS, STEPS_OF_A_ROUND, MOST_KINDS = 8, 3, 4


def predictions(model):
    """(kind, predicted seconds a step) of what would free memory, largest cost first; not of the whole model."""
    with tempfile.TemporaryDirectory() as scratch:
        with memadvisor.profile(Path(scratch) / "run", trace_step=1) as prof:
            train(model, steps=STEPS)
        rank = prof.analysis.ranks[0]
    found = [
        module
        for module in rank.checkpointing.rows
        if module.name
        and not module.obstacle
        and module.extra_time_s is not None
        and (module.freed_bytes or 0) > 0
    ]
    found.sort(key=lambda module: -module.extra_time_s)
    return [(module.name, module.extra_time_s) for module in found[:MOST_KINDS]]


def fastest_step_s(model):
    """The fastest of a round's steps, each with data and an optimizer of its own."""
    taken = []
    for _ in range(STEPS_OF_A_ROUND):
        start_s = time.perf_counter()
        train(model, steps=1)
        taken.append(time.perf_counter() - start_s)
    return min(taken)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(
        f"torch {torch.__version__}, {args.threads} threads, {args.rounds} rounds of {STEPS_OF_A_ROUND} steps"
    )
    print(
        f"{'model':<10} {'checkpointed':<22} {'plain step':>11} {'predicted':>10} {'measured':>10} {'of the step':>12}"
    )
    for name in args.models:
        torch.manual_seed(0)
        predicted = predictions(MODELS[name]())
        models = {
            "": MODELS[name](),
            **{kind: with_checkpoints(MODELS[name](), kind) for kind, _ in predicted},
        }
        for model in models.values():
            train(model, steps=1)
        rounds = [{kind: fastest_step_s(model) for kind, model in models.items()} for _ in range(args.rounds)]
        plain_s = statistics.median(taken[""] for taken in rounds)
        for kind, extra_s in predicted:
            measured_s = statistics.median(taken[kind] - taken[""] for taken in rounds)
            print(
                f"{name:<10} {kind:<22} {1e3 * plain_s:>8.1f} ms {1e3 * extra_s:>7.1f} ms {1e3 * measured_s:>7.1f} ms "
                f"{(extra_s - measured_s) / plain_s:>+11.1%}"
            )


if __name__ == "__main__":
    main()
