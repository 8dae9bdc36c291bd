"""Every schedule's order is one that a pipeline can run."""

from collections import Counter

from hypothesis import given, settings

from memadvisor.cost.pipelines import Kind, pipeline_order
from memadvisor.cost.pipelines.graph import pipeline_graph
from tests.cost.pipelines.shapes import shapes


@given(shapes())
@settings(max_examples=150, deadline=None)
def test_every_piece_runs_once_and_none_waits_for_ever(shape):
    """F once for each chunk and microbatch, and either B and W, or both in one; resolving refuses circles."""
    order = pipeline_order(*shape)
    pieces = Counter(work for device in range(order.num_devices) for work in order.works(device))

    assert set(pieces.values()) == {1}
    for chunk in range(order.num_chunks):
        for microbatch in range(order.num_microbatches):
            kinds = {kind for kind in Kind if (kind, chunk, microbatch) in pieces}
            assert kinds in ({Kind.F, Kind.BW}, {Kind.F, Kind.B, Kind.W})
    assert len(pipeline_graph(order).device) == len(pieces)


@given(shapes())
@settings(max_examples=100, deadline=None)
def test_a_microbatch_stays_where_its_weights_are(shape):
    """The pieces of a chunk for one microbatch run on one device, which holds no more chunks than it says."""
    order = pipeline_order(*shape)
    homes = {}
    for device in range(order.num_devices):
        for _, chunk, microbatch in order.works(device):
            assert homes.setdefault((chunk, microbatch), device) == device
        held = {work.chunk for work in order.works(device)}
        assert len(held) <= order.weight_copies * order.num_chunks // order.num_devices
    for chunk in range(order.num_chunks):
        places = {home for (of, _), home in homes.items() if of == chunk}
        assert len(places) <= order.weight_copies
