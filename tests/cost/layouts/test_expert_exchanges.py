"""How far tokens go to experts that are given them in turn, or of which several are on one rank."""

import itertools
from dataclasses import replace

import pytest

from memadvisor.architecture import Experts
from memadvisor.cost.layouts.expert_exchanges import expert_exchange_seconds
from memadvisor.cost.layouts.links import Group
from memadvisor.layout import Layout, TrainingStep
from memadvisor.layout_table.read import read_rows
from memadvisor.software_traits import Software
from tests.planning.small_spaces import make_model

# Eight ranks of two nodes; all that counts is one byte a second inside, or over each rank's share of the network.
INSIDE = Group(
    size=8, near=4, nodes=2, bytes_per_s=1.0, exchange_bytes_per_s=1.0, own_bytes_per_s=1e9, ring_latency_s=0.0, tree_latency_s=0.0,
    tree_share=1.0, call_s=0.0,
)  # fmt: skip
BETWEEN = replace(INSIDE, bytes_per_s=1e9, exchange_bytes_per_s=1e9, own_bytes_per_s=1.0)


def exchange_seconds(chosen: int, group: Group, *, in_turn: bool = True) -> tuple[float, float]:
    """Of tokens that have `chosen` of 32 experts; and the bytes of all tokens of a rank."""
    model = make_model(2, Experts(num_experts=32, experts_per_token=chosen, expert_ffn=64))
    step = TrainingStep(
        layout=Layout(data=8, expert=8), seq_len=64, software=Software(experts_in_turn=in_turn)
    )
    return expert_exchange_seconds(model, step, 1, 64.0, group), 2.0 * 64 * model.hidden


def holders(chosen: int, among: int) -> float:
    """Ranks, or nodes, that have experts of a token: token t has those from t * chosen on."""
    held = 32 // among
    each = [{(token * chosen + i) % 32 // held for i in range(chosen)} for token in range(32)]
    return sum(map(len, each)) / 32


@pytest.mark.parametrize("chosen", [1, 2, 3, 4, 6, 8])
def test_experts_in_turn_are_on_few_ranks_of_few_nodes(chosen):
    """Counted token by token: a rank receives each of its tokens once, there and back, and a node each of its own."""
    seconds, sent = exchange_seconds(chosen, INSIDE)
    assert seconds == pytest.approx(2 * sent * holders(chosen, 8) * 7 / 8)
    seconds, sent = exchange_seconds(chosen, BETWEEN)
    assert seconds == pytest.approx(2 * sent * holders(chosen, 2) / 2)


def test_a_router_spreads_tokens_further():
    for group in (INSIDE, BETWEEN):
        assert exchange_seconds(4, group)[0] < exchange_seconds(4, group, in_turn=False)[0]


@pytest.mark.parametrize("chosen", [1, 2, 4, 8])
def test_a_token_goes_once_to_each_rank_with_experts_of_it(chosen):
    """Of experts that are chosen evenly and one by one: counted over all ways to choose ranks."""
    model = make_model(2, Experts(num_experts=32, experts_per_token=chosen, expert_ffn=64))
    step = TrainingStep(layout=Layout(data=4, expert=4), seq_len=64, software=Software(sends_once=True))
    group = replace(INSIDE, size=4, nodes=1)
    seconds = expert_exchange_seconds(model, step, 1, 64.0, group)

    ways = list(itertools.product(range(4), repeat=chosen))
    others = sum(len(set(way) - {0}) for way in ways) / len(ways)
    assert seconds == pytest.approx(2 * 2.0 * 64 * model.hidden * others)


@pytest.mark.parametrize("chosen", [1, 2, 4, 8])
def test_a_plain_all_to_all_leaves_the_node_once_for_each_expert(chosen):
    """Half of the experts are on the other node; DeepEP sends what several of them need there once."""
    model = make_model(2, Experts(num_experts=32, experts_per_token=chosen, expert_ffn=64))

    def seconds(**software):
        step = TrainingStep(layout=Layout(data=8, expert=8), seq_len=64, software=Software(**software))
        return expert_exchange_seconds(model, step, 1, 64.0, BETWEEN)

    sent = 2.0 * 64 * model.hidden
    assert seconds(leaves_often=True) == pytest.approx(2 * sent * chosen / 2)
    assert seconds() == pytest.approx(2 * sent * (1 - 0.5**chosen))
    assert seconds(leaves_often=True, sends_once=True) == seconds(sends_once=True)


@pytest.mark.parametrize(
    ("framework", "dispatcher", "often"),
    [
        ("Megatron-Core", "", True),
        ("Megatron-Core", "DeepEP", False),
        ("Megatron-Core", "flex", False),
        ("NeMo", "", False),
        ("NeMo", "alltoall", True),
        ("torchtitan", "", True),
    ],
)
def test_who_sends_tokens_is_the_trainers_unless_a_row_says(framework, dispatcher, often):
    header = ["model", "gpu", "n_gpus", "ep", "framework", "dispatcher"]
    (row,) = read_rows([header, ["qwen3-30b-a3b", "H100", "16", "16", framework, dispatcher]], "t")
    assert row.case.step.software.leaves_often is often
