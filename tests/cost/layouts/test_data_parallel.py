import pytest

from memadvisor.cost.layouts.data_parallel import microbatch_traffic, replica_groups
from memadvisor.cost.layouts.links import Group
from memadvisor.cost.layouts.memory import StageParameters
from memadvisor.layout import Layout, Software, TrainingStep


def one_byte_a_second(size, stride):
    return Group(
        size=size, near=1, nodes=size, bytes_per_s=1.0, ring_latency_s=0.0, tree_latency_s=0.0, tree_share=1.0,
        call_s=0.0,
    )  # fmt: skip


@pytest.mark.parametrize("expert, holders", [(1, 8), (2, 4), (8, 1)])
def test_stage_3_gathers_experts_among_those_that_hold_the_same_ones(expert, holders):
    """Each rank receives what others hold of its parameters: none of experts that it alone has."""
    layout = Layout(data=8, expert=expert, zero_stage=3)
    step = TrainingStep(layout=layout, seq_len=1024, software=Software(parameter_bytes=2, reduce_bytes=4))
    count = StageParameters(shared=800.0, experts=1600.0 / expert, widest_layer=0.0)
    forward_s, backward_s = microbatch_traffic(
        step, count, replica_groups(layout, one_byte_a_second, host_bytes_per_s=None)
    )
    received = 800 * 7 / 8 + 1600 / expert * (holders - 1) / holders
    assert forward_s == pytest.approx(2 * received)
    assert backward_s == pytest.approx((2 + 4) * received)
    assert count.sharded(layout) == pytest.approx(800 / 8 + 1600 / expert / holders)
