from dataclasses import replace

from hypothesis import given, settings

from memadvisor.planning.layout_space import LayoutQuestion
from memadvisor.planning.layouts import search_layouts
from memadvisor.planning.what_if import changes, what_if
from tests.planning.small_spaces import make_cluster, make_model, questions


def best_of(question):
    found = search_layouts(question, num_best=1, front_slowdown=1.0)
    return found.best[0] if found.best else None


@settings(max_examples=8, deadline=None)
@given(questions())
def test_more_memory_or_a_faster_network_never_makes_the_best_slower(question):
    now = best_of(question)
    _, _, memory, network = what_if(question, now)
    for outcome in (memory, network):
        if now is not None and outcome.change.cluster is not None:
            assert outcome.best.estimate.step_time_s <= now.estimate.step_time_s
            assert outcome.speedup >= 1 and outcome.gain_per_accelerator == outcome.speedup - 1


def test_clusters_differ_in_what_is_asked_alone():
    cluster = make_cluster(4, 2, 16e9, across=25e9)
    half, twice, memory, network = (one.cluster for one in changes(cluster))
    assert half == replace(cluster, num_nodes=1, across=None)
    assert twice == replace(cluster, num_nodes=4)
    assert memory == replace(cluster, accelerator=replace(cluster.accelerator, memory_bytes=32 * 10**9))
    assert network == replace(cluster, across=replace(cluster.across, bytes_per_s=50e9))


def test_what_cannot_be_asked_says_why():
    reasons = [one.reason for one in changes(make_cluster(4, 1))]
    assert reasons == [
        "one node cannot be halved", "no network between nodes is known", None, "one node has none"
    ]  # fmt: skip
    assert next(changes(make_cluster(1, 3))).reason == "3 nodes cannot be halved"


def test_a_gain_is_of_an_accelerator_and_none_where_nothing_was_safe():
    question = LayoutQuestion(
        model=make_model(), cluster=make_cluster(2, 2, 5e9), seq_len=512, batch_sequences=8
    )
    now = best_of(question)
    half, twice, *_ = what_if(question, now)
    for outcome, number in ((half, 2), (twice, 8)):
        work = 1 / outcome.best.estimate.step_time_s / number
        before = 1 / now.estimate.step_time_s / 4
        assert abs(outcome.gain_per_accelerator - (work / before - 1)) < 1e-9

    small = replace(question, cluster=make_cluster(2, 2, 2.4e9))
    assert best_of(small) is None
    half, *_, memory, _ = what_if(small, None)
    assert half.best is None and half.gain_per_accelerator is None
    assert memory.best is not None and memory.speedup is None
