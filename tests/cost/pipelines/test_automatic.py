"""ZB-1p and ZB-2p are the best of all orders that could be tried, though few are."""

from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from memadvisor.cost.pipelines.automatic import _greedy_orders
from memadvisor.cost.pipelines.costs import ChunkCosts
from memadvisor.cost.pipelines.greedy import Choices, Greedy

seconds = st.sampled_from([0.5, 1.0, 1.1, 1.5, 2.0, 3.0])
chunks = st.builds(
    ChunkCosts,
    forward_s=seconds,
    input_backward_s=seconds,
    weight_backward_s=seconds,
    activation_bytes=st.integers(2, 4),
    weight_activation_bytes=st.integers(1, 2),
)


@given(
    st.lists(chunks, min_size=2, max_size=5),
    st.integers(2, 12),
    st.integers(1, 3),
    st.sampled_from([0.0, 0.3]),
)
@settings(max_examples=150, deadline=None)
def test_choices_that_are_not_tried_would_have_written_an_order_that_is_there(
    costs, num_microbatches, times, link_s
):
    links, limit_bytes = (link_s,) * len(costs), 4 * times * len(costs)
    tried = list(_greedy_orders(tuple(costs), links, num_microbatches, limit_bytes))
    every = [
        Greedy(costs, links, num_microbatches, limit_bytes, Choices(one_more=one_more, fill=fill)).run()
        for one_more, fill in product((False, True), repeat=2)
    ]
    assert len(tried) <= 4
    assert all(codes in [order.codes for order in tried] for codes in every)
