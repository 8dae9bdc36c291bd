"""The largest that fits does, and the next does not, by the whole cost model; more memory never makes it smaller."""

from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memadvisor.architectures.load import load_architecture
from memadvisor.cost.layouts.estimate import SAFE_P_OOM, estimate_step
from memadvisor.errors import UsageError
from memadvisor.hardware.clusters import parse_cluster
from memadvisor.planning.largest import (
    QUANTITIES,
    LargestQuestion,
    largest_fits,
    largest_that_holds,
    p_oom_of,
    posed,
    techniques,
)
from memadvisor.software import find_preset
from memadvisor.software_dtypes import with_precision

GIB = 2**30


def question(quantity, gib=24, **changed):
    machines = parse_cluster("4xH100,nodes=2")
    machines = replace(machines, accelerator=replace(machines.accelerator, memory_bytes=gib * GIB))
    asked = {"model": load_architecture("tinyllama-1.1b"), "cluster": machines, "seq_len": 512}
    return LargestQuestion(quantity=quantity, **{**asked, **changed})


@cache
def answers(quantity, gib):
    return largest_fits(question(quantity, gib))


@pytest.mark.parametrize("quantity", QUANTITIES)
def test_the_answer_fits_and_the_next_does_not_under_every_technique(quantity):
    asked = question(quantity)
    names = set()
    for answer in answers(quantity, 24):
        technique, fit = answer.technique, answer.fit

        def p_oom(value, technique=technique):
            model, step = posed(asked, technique, value)
            return estimate_step(model, step, asked.cluster).p_oom

        if fit is None:
            assert p_oom(technique.layout.pipeline if quantity == "model" else 1) >= SAFE_P_OOM
            continue
        names.add(technique.name)
        assert fit.limited_by == "memory"
        assert p_oom(fit.value) == fit.estimate.p_oom < SAFE_P_OOM <= p_oom(fit.value + fit.unit)
        if quantity == "sequence" and technique.layout.sequence_parallel:
            assert fit.value % technique.layout.tensor == 0
    assert {"ZeRO-1", "ZeRO-2", "ZeRO-3", "tensor parallel 2", "tensor parallel 4", "pipeline 2", "pipeline 8",
            "ZeRO-2, optimizer on the host", "ZeRO-3, parameters and optimizer on the host"} <= names  # fmt: skip


@pytest.mark.parametrize("quantity", QUANTITIES)
def test_more_memory_and_recomputation_never_make_it_smaller(quantity):
    def values(gib):
        return [answer.fit.value if answer.fit else 0 for answer in answers(quantity, gib)]

    small, medium, large = (values(gib) for gib in (12, 24, 48))
    for few, more, most in zip(small, medium, large, strict=True):
        assert few <= more <= most
    assert sum(small) < sum(medium) < sum(large)
    assert all(full >= plain for plain, full in zip(medium[::2], medium[1::2], strict=True))


@pytest.mark.parametrize("quantity", QUANTITIES)
def test_memory_grows_with_what_is_asked_for(quantity):
    """So nothing larger fits either: bisection is exact. What is larger may be known better, but hardly matters so far off."""
    asked = question(quantity)
    for technique in techniques(asked):
        lowest = technique.layout.pipeline if quantity == "model" else 1
        chances = [
            p_oom_of(*posed(asked, technique, value), asked.cluster) for value in range(lowest, lowest + 60)
        ]
        told = [max(chance, 1e-6) for chance in chances]
        assert told == sorted(told)


def test_memory_without_playing_the_pipeline_is_that_of_the_estimate():
    asked = question("micro-batch")
    for technique in techniques(asked):
        model, step = posed(asked, technique, 3)
        played = estimate_step(model, step, asked.cluster).p_oom
        assert p_oom_of(model, step, asked.cluster) == pytest.approx(played, rel=1e-9, abs=1e-15)


@given(answer=st.integers(-3, 300), lowest=st.integers(1, 40), beyond=st.integers(-2, 300))
def test_bisection_finds_what_counting_finds(answer, lowest, beyond):
    highest = lowest + beyond
    counted = [number for number in range(lowest, highest + 1) if number <= answer]
    assert largest_that_holds(lambda number: number <= answer, lowest, highest) == max(counted, default=None)


def test_a_learned_table_of_positions_ends_sequences():
    asked = question("sequence", model=load_architecture("gpt2"))
    fits = [answer.fit for answer in largest_fits(asked)]
    assert all(fit.value == 1024 and fit.limited_by == "positions" for fit in fits)


def test_no_time_is_given_where_it_is_not_predicted():
    for answer in answers("micro-batch", 24):
        if answer.fit is not None:
            assert answer.fit.tokens_per_s > 0


def test_a_device_without_room_for_its_driver_fits_nothing():
    assert all(answer.fit is None for answer in largest_fits(question("model", gib=1)))


def test_a_sequence_of_nothing_is_refused():
    with pytest.raises(UsageError, match="seq_len is 0"):
        question("model", seq_len=0)


def test_gpt2_xl_on_one_card_of_24_gb():
    """Published (huggingface.co/blog/accelerate-deepspeed): plain is out of memory with a micro-batch of 1; with ZeRO-3,
    parameters and optimizer on the host, 16 is the largest that ran."""
    software = with_precision(find_preset("deepspeed").software, "fp16")
    asked = LargestQuestion(
        quantity="micro-batch",
        model=load_architecture("gpt2-xl"),
        cluster=parse_cluster("1xRTX-3090-24GB"),
        seq_len=128,
        software=replace(software, fused_attention=False, reference_code=True),
    )
    found = {(one.technique.name, one.technique.layout.recompute): one.fit for one in largest_fits(asked)}
    assert found["plain", "none"] is None
    assert 16 <= found["ZeRO-3, parameters and optimizer on the host", "none"].value < 24
