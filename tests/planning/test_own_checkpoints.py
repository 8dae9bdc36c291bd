"""Units that checkpoint parts of themselves: what recomputing them frees is predicted, applied and measured."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from memadvisor.analyzers.segments import captured_step
from memadvisor.cost.simulate import simulate
from memadvisor.write_schedule import write_schedule
from tests.engines.trainings import make_plan
from tests.planning.test_called_again import predicted_and_measured
from tests.planning.test_moved_activations import WIDTH, Block, Gpt, recorded

WAYS = {
    "reentrant": {"use_reentrant": True},
    "not reentrant": {"use_reentrant": False},
    "selective": {
        "use_reentrant": False,
        "context_fn": partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default]),
    },
}


class Attending(Block):
    """Checkpoints its attention, whose scores are most of what it would keep."""

    def __init__(self, again):
        super().__init__()
        self.again = again

    def forward(self, x, scale):
        x = x + self.again(self.attend, x, scale)
        return x + self.down(F.gelu(self.up(x)))

    def attend(self, x, scale):
        q, k, v = self.qkv(self.norm(x) * scale).split(WIDTH, -1)
        return self.dropout(self.out((q @ k.transpose(1, 2)).softmax(-1) @ v))


class Deciding(Attending):
    """Checkpoints what its feed-forward layer makes, the last that it keeps anything of."""

    def forward(self, x, scale):
        x = x + self.attend(x, scale)
        return x + self.again(self.think, x)

    def think(self, x):
        return self.down(F.gelu(self.up(x)))


class Stage(nn.Module):
    """Several blocks, each of which it checkpoints as a whole."""

    def __init__(self, again):
        super().__init__()
        self.layers, self.again = nn.ModuleList(Block() for _ in range(3)), again

    def forward(self, x, scale):
        for layer in self.layers:
            x = self.again(layer, x, scale)
        return x


class Checkpointing(Gpt):
    def __init__(self, kind, way):
        super().__init__()
        self.blocks = nn.ModuleList(kind(partial(checkpoint, **WAYS[way])) for _ in range(4))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", [Attending, Deciding, Stage])
def test_what_a_unit_keeps_beside_its_own_checkpoints_is_set_free(kind, way):
    num_micro_batches, bf16 = (2, False) if way == "reentrant" else (1, way == "selective")
    predicted, measured, losses = predicted_and_measured(
        partial(Checkpointing, kind, way), num_micro_batches, (0, 1, 3), bf16
    )

    assert losses[0] == losses[1]
    assert measured == pytest.approx(predicted, rel=1e-4)


class Around(Gpt):
    """Checkpoints its blocks, as libraries of models do: an engine leaves such calls alone."""

    def __init__(self, use_reentrant=False):
        super().__init__()
        self.use_reentrant = use_reentrant

    def forward(self, words):
        x = self.tokens(words)
        scale = torch.linspace(0.5, 1.5, x.numel()).view_as(x)
        for block in self.blocks:
            x = checkpoint(block, x, scale, use_reentrant=self.use_reentrant)
        return self.head(x)


def test_a_unit_that_is_checkpointed_as_a_whole_is_none_that_a_plan_may_recompute():
    run, _ = recorded(Around, 1, bf16=False)

    assert set(captured_step(run).recomputable) <= {"tokens", "head"}


def test_a_policy_by_hand_holds_to_the_end_of_a_forward_what_its_last_checkpoint_gives_and_nobody_asks_for():
    """What a stage's last checkpoint calls comes behind the last tensor that the stage saves."""
    model = partial(Checkpointing, Stage, "not reentrant")
    step = captured_step(recorded(model, 1, bf16=False)[0])
    plan = make_plan(1, 0, "selective")
    run, _ = recorded(model, 1, bf16=False, plan=plan)
    predicted = simulate(step, write_schedule(plan, step.units), None).peak

    assert "forward of blocks.3" in predicted.position
    assert run.ranks[0].traced_step.peak_allocated_bytes == predicted.total_bytes
