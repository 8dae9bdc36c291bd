"""What DeepSpeed's updates by groups of parameters hold under ZeRO stage 3."""

from dataclasses import replace

import pytest

from memadvisor.architecture import Architecture
from memadvisor.cost.layouts.chance import chance_of_more
from memadvisor.cost.layouts.coefficients import FITTED
from memadvisor.cost.layouts.grouped_updates import group_update_bytes
from memadvisor.cost.layouts.memory import StageContents, stage_memory
from memadvisor.cost.layouts.rank_memory import StageMemory
from memadvisor.layout import Layout, TrainingStep
from memadvisor.software import DEEPSPEED
from memadvisor.software_traits import Software

LLAMA = Architecture(
    name="llama", n_layers=16, hidden=1024, n_heads=8, n_kv_heads=8, head_dim=128, ffn=2816, vocab=32000,
    tied_embeddings=False, gated_mlp=True,
)  # fmt: skip
WHOLE = StageContents(layers=tuple(range(16)), embeddings=1, heads=1)
GROUPED = DEEPSPEED.software
PLAIN = replace(GROUPED, update_group_elements=0.0)


def held(software: Software, layout: Layout, activation_bytes: float, seq_len: int = 512) -> StageMemory:
    step = TrainingStep(layout=layout, seq_len=seq_len, software=software)
    return stage_memory(LLAMA, step, WHOLE, activation_bytes, FITTED)


def test_a_group_is_what_the_rank_has_or_a_thousand_million():
    """Joined gradients of two bytes and their copies in fp32."""
    step = TrainingStep(layout=Layout(data=8, zero_stage=3), seq_len=512, software=GROUPED)
    assert group_update_bytes(step, 3e8) == pytest.approx(6 * 3e8)
    assert group_update_bytes(step, 4e9) == pytest.approx(6 * 1e9)


@pytest.mark.parametrize(
    "layout",
    [Layout(data=8, zero_stage=2), Layout(data=8, zero_stage=3, offload_optimizer=True)],
    ids=["stage 2", "optimizer on the host"],
)
def test_other_stages_and_updates_on_the_host_hold_nothing(layout):
    assert held(GROUPED, layout, 1e9) == held(PLAIN, layout, 1e9)


def test_beside_activations_a_group_is_reserved_and_not_allocated():
    """Activations are gone by then, but none of their blocks is as large as the group's one tensor."""
    layout = Layout(zero_stage=3)
    grouped, plain = held(GROUPED, layout, 20e9), held(PLAIN, layout, 20e9)
    group = 6 * plain.parameter_bytes / 2
    assert grouped.allocated_bytes == plain.allocated_bytes
    assert grouped.peak_bytes - plain.peak_bytes == grouped.cached_bytes == pytest.approx(group)


def test_what_is_more_than_the_activations_were_is_allocated():
    layout = Layout(zero_stage=3)
    grouped, plain = held(GROUPED, layout, 0.0, seq_len=1), held(PLAIN, layout, 0.0, seq_len=1)
    group = 6 * plain.parameter_bytes / 2
    assert grouped.buffer_bytes > plain.buffer_bytes
    assert grouped.buffer_bytes - plain.buffer_bytes + grouped.cached_bytes == pytest.approx(group)


def test_logits_leave_a_block_for_a_group_that_is_smaller():
    """Of 2.8e8 parameters fp32 gradients are 1.1 GB, and logits of 10,000 tokens 1.3 GB."""
    layout = Layout(zero_stage=3)
    assert held(GROUPED, layout, 20e9, seq_len=2000).cached_bytes > 0
    assert held(GROUPED, layout, 20e9, seq_len=10_000).cached_bytes == 0.0


def test_logits_of_two_bytes_leave_half_the_block_and_those_by_pieces_none():
    """The same group of 1.1 GB finds no room in 0.64 GB of 10,000 tokens, and in 1.3 of 20,000."""
    layout = Layout(zero_stage=3)
    narrow = replace(GROUPED, loss_bytes=2)
    assert held(narrow, layout, 20e9, seq_len=10_000).cached_bytes > 0
    assert held(narrow, layout, 20e9, seq_len=20_000).cached_bytes == 0.0
    assert held(replace(GROUPED, linear_loss=True), layout, 20e9, seq_len=20_000).cached_bytes > 0


def test_a_cached_block_is_given_up_before_memory_runs_out():
    grouped, plain = (held(software, Layout(zero_stage=3), 20e9) for software in (GROUPED, PLAIN))
    assert 0.0 < chance_of_more(plain, 30e9, FITTED) == chance_of_more(grouped, 30e9, FITTED) < 1.0


JOINED = replace(Software(), gradient_bytes=2, update_held_bytes=12.0, joins_gradients=True)


def test_an_update_of_all_parameters_at_once_lets_their_gradients_go():
    """Of 26 B of a parameter 14 are states without the gradient, 12 of the update; blocks of 4 more are kept."""
    found = held(JOINED, Layout(zero_stage=1), 0.0, seq_len=1)
    parameters = found.parameter_bytes / 2
    logits_and_layer = found.allocated_bytes - 26 * parameters

    assert abs(logits_and_layer) < 0.01 * found.allocated_bytes
    assert found.cached_bytes == pytest.approx(4 * parameters)


def test_under_stage_3_gradients_stay_beside_their_copies():
    found = held(JOINED, Layout(data=4, zero_stage=3), 0.0, seq_len=1)
    shards = found.parameter_bytes / 2

    assert found.cached_bytes == 0.0
    assert found.allocated_bytes > (2 + 2 + 12 + 12) * shards


def test_an_update_on_the_host_holds_nothing_on_the_device():
    layout = Layout(data=4, zero_stage=2, offload_optimizer=True)
    plain = replace(JOINED, update_held_bytes=0.0, joins_gradients=False)
    assert held(JOINED, layout, 0.0) == held(plain, layout, 0.0)
