"""Pipelines for property tests: schedules with devices, microbatches and chunks that they can run, and costs."""

from hypothesis import strategies as st

from memadvisor.cost.pipelines import SCHEDULES, ChunkCosts

CHUNKS = {"interleaved": (1, 4), "breadth-first": (1, 4), "zb-v": (2, 2), "dualpipe-v": (2, 2)}


@st.composite
def shapes(draw, names=SCHEDULES, most_devices=7, most_microbatches=20):
    """(schedule, devices, microbatches, chunks a device)"""
    name = draw(st.sampled_from(names))
    devices = draw(st.integers(1, most_devices))
    microbatches = draw(st.integers(1, most_microbatches))
    if name == "interleaved":
        microbatches = devices * draw(st.integers(1, max(1, most_microbatches // devices)))
    if name in ("chimera", "dualpipe"):
        devices += devices % 2
    if name == "dualpipe":
        microbatches = 2 * devices + 2 * draw(st.integers(0, 4))
    if name == "dualpipe-v":
        microbatches = 2 * devices + draw(st.integers(0, 6))
    return name, devices, microbatches, draw(st.integers(*CHUNKS.get(name, (1, 1))))


SECONDS = st.floats(0.1, 4.0)


@st.composite
def chunk_costs(draw):
    held = draw(st.integers(0, 1000))
    return ChunkCosts(
        forward_s=draw(SECONDS),
        input_backward_s=draw(SECONDS),
        weight_backward_s=draw(SECONDS),
        activation_bytes=held,
        weight_activation_bytes=draw(st.integers(0, held)),
    )


@st.composite
def pipelines(draw, **limits):
    """(schedule, devices, microbatches, costs of the chunks, times of the links)"""
    name, devices, microbatches, chunks = draw(shapes(**limits))
    # Some pipelines are even, as most are in life; some have a stage for each cost.
    kinds = draw(st.lists(chunk_costs(), min_size=1, max_size=4))
    costs = [draw(st.sampled_from(kinds)) for _ in range(devices * chunks)]
    links = [draw(st.sampled_from([0.0, 0.1, 1.0])) for _ in range(devices)]
    return name, devices, microbatches, costs, links


def unit_costs(num_chunks, forward_s=1.0, input_s=1.0, weight_s=1.0, held=1000, weight_held=0):
    """All chunks alike."""
    return [
        ChunkCosts(
            forward_s=forward_s,
            input_backward_s=input_s,
            weight_backward_s=weight_s,
            activation_bytes=held,
            weight_activation_bytes=weight_held,
        )
    ] * num_chunks
