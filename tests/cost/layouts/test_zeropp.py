"""ZeRO++: bytes between nodes by hand and as in its paper (arXiv:2306.10209), the second copy of hpZ."""

from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memadvisor.architectures.load import load_architecture
from memadvisor.cost.layouts.coefficients import Coefficients
from memadvisor.cost.layouts.data_parallel import microbatch_traffic, replica_groups
from memadvisor.cost.layouts.estimate import estimate_step
from memadvisor.cost.layouts.links import group_of
from memadvisor.cost.layouts.memory import StageParameters
from memadvisor.cost.layouts.zeropp import QUANTIZED_GRADIENT_BYTES, QUANTIZED_WEIGHT_BYTES
from memadvisor.errors import UsageError
from memadvisor.layout import ZEROPP, Layout, TrainingStep
from memadvisor.software_traits import Software
from memadvisor.zeropp_options import zeropp_fields
from tests.cost.layouts.nodes import make_cluster

NOTHING_BUT_BYTES = Coefficients(inside_share=1.0, across_share=1.0, collective_s=0.0)
SIXTEEN_BITS = Software(parameter_bytes=2, reduce_bytes=2)
PARAMETERS = 1e9


def zero_3(ranks, names, **others):
    fields = zeropp_fields(names, shard_ranks=ranks, tensor=1, per_node=8)
    return Layout(data=ranks, zero_stage=3, **fields, **others)


def bytes_between_nodes(layout, count, software=SIXTEEN_BITS):
    """That leave each node in one forward and in one backward: links inside take no time, and eight cards a second for 8 B."""
    cluster = make_cluster(layout.num_ranks, inside=1e300, across=1.0)
    groups = replica_groups(layout, partial(group_of, cluster, coefficients=NOTHING_BUT_BYTES), None)
    step = TrainingStep(layout=layout, seq_len=1024, software=software)
    return tuple(8 * seconds for seconds in microbatch_traffic(step, count, groups))


COUNT = StageParameters(shared=PARAMETERS, experts=0.0, widest_layer=0.0)


@pytest.mark.parametrize(
    "names, of_m", [((), 3), (("qwz",), 2.5), (("hpz",), 2), (("qgz",), 2.25), (("qwz", "hpz"), 1.5), (ZEROPP, 0.75)]
)  # fmt: skip
def test_nodes_exchange_what_the_paper_says(names, of_m):
    """In M, the bytes of 16-bit parameters, on many nodes; scales of blocks are a thousandth."""
    exchanged = sum(bytes_between_nodes(zero_3(4096, names), COUNT))
    assert exchanged / (2 * PARAMETERS) == pytest.approx(of_m, rel=4e-3)


def test_bytes_of_two_nodes_by_hand():
    """A ring of 16 passes 15/16 through each node; an all-to-all between two nodes what is the other's, a half."""
    forward, backward = bytes_between_nodes(zero_3(16, ZEROPP), COUNT)
    assert forward == pytest.approx(QUANTIZED_WEIGHT_BYTES * PARAMETERS * 15 / 16)
    assert backward == pytest.approx(QUANTIZED_GRADIENT_BYTES * PARAMETERS / 2)
    forward, backward = bytes_between_nodes(zero_3(16, ("hpz",)), COUNT)
    assert (forward, backward) == (pytest.approx(2 * PARAMETERS * 15 / 16),) * 2


@given(
    st.sampled_from([2, 4, 8, 16, 64, 256]),
    st.sets(st.sampled_from(ZEROPP)),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2]),
    st.sampled_from([1, 2, 4]),
)
def test_no_option_adds_bytes_between_nodes_and_one_node_exchanges_none(
    ranks, names, expert, parameter_bytes, reduce_bytes
):
    software = Software(parameter_bytes=parameter_bytes, reduce_bytes=reduce_bytes)
    count = StageParameters(shared=PARAMETERS, experts=2 * PARAMETERS, widest_layer=0.0)
    expert = min(expert, ranks)
    plain, with_options = (
        bytes_between_nodes(zero_3(ranks, tuple(each), expert=expert), count, software)
        for each in ((), names)
    )
    for before, after in zip(plain, with_options, strict=True):
        assert after <= before * (1 + 1e-9)
        assert ranks > 8 or after < 1e-280


def test_hpz_holds_the_parameters_a_second_time_shared_by_the_node():
    """And nothing else: 16-bit parameters over eight ranks; of one node time is as before."""
    model = load_architecture("llama3-8b")

    def estimate(ranks, names):
        step = TrainingStep(layout=zero_3(ranks, names), seq_len=1024)
        return estimate_step(model, step, make_cluster(ranks))

    for ranks in (8, 32):
        plain, second = estimate(ranks, ()), estimate(ranks, ("hpz",))
        more = second.worst.parameter_bytes - plain.worst.parameter_bytes
        assert more == pytest.approx(2 * model.num_parameters() / 8)
        assert replace(second.worst, parameter_bytes=0, allocator_bytes=0) == replace(
            plain.worst, parameter_bytes=0, allocator_bytes=0
        )
        assert second.step_time_s < plain.step_time_s or (ranks == 8 and second.time_s == plain.time_s)


def test_of_experts_the_second_copy_is_shared_by_those_that_hold_the_same():
    """Eight ranks of a node hold four times the same two of eight parts of the experts."""
    layout = Layout(data=16, expert=2, zero_stage=3, secondary_shard=8)
    assert (
        StageParameters(shared=800.0, experts=400.0, widest_layer=0.0).secondary(layout) == 800 / 8 + 400 / 4
    )
    alone = Layout(data=16, expert=16, zero_stage=3, secondary_shard=8)  # nothing of experts is gathered
    assert StageParameters(shared=0.0, experts=400.0, widest_layer=0.0).secondary(alone) == 0


@pytest.mark.parametrize(
    "impossible",
    [{"zero_stage": 2, "quantized_weights": True}, {"zero_stage": 3, "secondary_shard": 3},
     {"zero_stage": 3, "secondary_shard": 4, "offload_parameters": True}],
)  # fmt: skip
def test_what_goes_with_no_zeropp_is_refused_in_a_line(impossible):
    with pytest.raises(UsageError) as caught:
        Layout(data=8, **impossible)
    assert "\n" not in caught.value.one_line()
