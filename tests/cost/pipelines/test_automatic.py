"""ZB-1p and ZB-2p are the best of all orders that could be tried, though few are."""

from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from memadvisor.cost.pipelines.automatic import _greedy_ones, _order, automatic_graph
from memadvisor.cost.pipelines.costs import ChunkCosts
from memadvisor.cost.pipelines.graph import pipeline_graph
from memadvisor.cost.pipelines.greedy import Choices, Greedy
from memadvisor.cost.pipelines.play import durations_of, peaks, play, spans
from memadvisor.cost.pipelines.zero_bubble import zb_h1, zb_h2

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
    tried = [greedy.run() for greedy in _greedy_ones(tuple(costs), links, num_microbatches, limit_bytes)]
    every = [
        Greedy(costs, links, num_microbatches, limit_bytes, Choices(one_more=one_more, fill=fill)).run()
        for one_more, fill in product((False, True), repeat=2)
    ]
    assert len(tried) <= 4
    assert all(codes in tried for codes in every)


@given(
    st.lists(chunks, min_size=2, max_size=6),
    st.integers(1, 16),
    st.sampled_from([0.0, 0.3]),
    st.sampled_from([("zb-1p", 1), ("zb-2p", 2)]),
)
@settings(max_examples=150, deadline=None)
def test_the_best_of_all_is_found_though_orders_that_take_longer_are_not_written_to_their_end(
    costs, num_microbatches, link_s, named
):
    """Held against all of them, played, also for where a greedy order's pieces begin in the playing."""
    name, times = named
    links = (link_s,) * len(costs)
    limit_bytes = times * min(len(costs), num_microbatches) * max(cost.activation_bytes for cost in costs)
    graphs = [pipeline_graph(drawn(len(costs), num_microbatches)) for drawn in (zb_h1, zb_h2)]
    for one_more, fill in product((False, True), repeat=2):
        choices = Choices(one_more=one_more, fill=fill)
        greedy = Greedy(costs, links, num_microbatches, limit_bytes, choices)
        order = _order(greedy.run(), num_microbatches)
        graphs.append(pipeline_graph(order))
        written = graphs[-1], pipeline_graph(order, greedy.sequence)
        assert len({_device_seconds(graph, costs, links) for graph in written}) == 1
    fitting = [graph for graph in graphs if max(peaks(graph, costs)[0]) <= limit_bytes]
    best = min(fitting, key=lambda graph: max(_device_seconds(graph, costs, links)))
    assert automatic_graph(name, tuple(costs), links, num_microbatches).order == best.order


def _device_seconds(graph, costs, links):
    durations = durations_of(graph, costs)
    return spans(graph, durations, play(graph, durations, links, blocking=False))[0]
