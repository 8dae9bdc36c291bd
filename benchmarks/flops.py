"""FLOPs of one training step: worked out by hand, by memadvisor, and by torch.utils.flop_counter.

Four kinds of models of tests/analyzers/measured_models.py: a GPT, a ResNet of bottlenecks, an LSTM, and a mixture of
experts. "Needed" leaves out what nobody asks for (the other half of causal attention, gradients of data); the
hand's figures are of that. FlopCounterMode has one figure, for what ran.

    python benchmarks/flops.py
"""

import sys
from pathlib import Path

import torch
from torch.utils.flop_counter import FlopCounterMode

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from memadvisor.analyzers.analysis import analyze
from tests.analyzers.measured_models import (
    BATCH,
    HEADS,
    LAYERS,
    SEQUENCE,
    TOKENS,
    VOCABULARY,
    WIDTH,
    Experts,
    Gpt,
    Recurrent,
    Resnet,
    profiled,
)

PAIRS = BATCH * HEADS * SEQUENCE * (SEQUENCE + 1) // 2
ATTENTION = LAYERS * 6 * 2 * PAIRS * (WIDTH // HEADS)
PROJECTIONS = LAYERS * 4 * WIDTH**2
HEAD = VOCABULARY * WIDTH


def gpt_by_hand():
    return 6 * TOKENS * (PROJECTIONS + LAYERS * 8 * WIDTH**2 + HEAD) + ATTENTION


def moe_by_hand():
    """The router of 4, and two matrices of each of 2 active experts."""
    layers = LAYERS * (4 * WIDTH + 2 * 2 * WIDTH * 2 * WIDTH)
    return 6 * TOKENS * (PROJECTIONS + layers + HEAD) + ATTENTION


def lstm_by_hand():
    """Two layers of 24, four gates; the first hidden state is a constant."""
    hidden = 24
    products = sum(3 * 2 * TOKENS * 4 * hidden * (width + hidden) for width in (WIDTH, hidden))
    return products - 2 * 2 * BATCH * 4 * hidden**2 + 6 * TOKENS * hidden * VOCABULARY


def resnet_by_hand():
    """(channels, filters, kernel, positions) of each convolution; the stem needs no gradient of the images."""
    stem = (3, 16, 7, 256)
    rest = [(16, 8, 1, 64), (8, 8, 3, 64), (8, 32, 1, 64), (16, 32, 1, 64)]
    rest += [(32, 16, 1, 64), (16, 16, 3, 16), (16, 64, 1, 16), (32, 64, 1, 16)]
    once = [2 * BATCH * p * c * f * k * k for c, f, k, p in (stem, *rest)]
    return 2 * once[0] + 3 * sum(once[1:]) + 3 * 2 * BATCH * 64 * 10


MODELS = {
    "GPT": (Gpt, gpt_by_hand),
    "ResNet": (Resnet, resnet_by_hand),
    "LSTM": (Recurrent, lstm_by_hand),
    "MoE": (lambda: Gpt(make_mlp=lambda: Experts(4, 2, 2 * WIDTH)), moe_by_hand),
}


def counted_by_torch(model):
    with FlopCounterMode(display=False) as counter:
        model(model.batch()).square().mean().backward()
    return counter.get_total_flops()


def main():
    print(f"{'model':8}{'by hand':>12}{'needed':>12}{'executed':>12}{'FlopCounterMode':>18}   of the hand's")
    for name, (make, by_hand) in MODELS.items():
        torch.manual_seed(0)
        theirs = counted_by_torch(make())
        used = analyze(profiled(make())).ranks[0].utilization
        hand = by_hand()
        share = f"ours {used.model_flops_per_step / hand:.3f}, theirs {theirs / hand:.3f}"
        figures = (hand, used.model_flops_per_step, used.executed_flops_per_step)
        print(f"{name:8}{figures[0]:12,}{figures[1]:12,}{figures[2]:12,}{theirs:18,}   {share}")


if __name__ == "__main__":
    main()
