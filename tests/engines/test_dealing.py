"""Batches are dealt to ranks in rounds: nothing lost, nothing left over, and as accelerate deals them."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler

from memadvisor.engines.dealing import num_rounds, rounds_of

SIZES = {
    "num_samples": st.integers(0, 60),
    "batch_size": st.integers(1, 9),
    "num_ranks": st.integers(1, 5),
    "drop_last": st.booleans(),
}


def dealt(num_samples, batch_size, num_ranks, drop_last):
    sampler = BatchSampler(range(num_samples), batch_size, drop_last)
    rounds = list(rounds_of(sampler, num_ranks, batch_size=batch_size, drop_last=drop_last))
    assert len(rounds) == num_rounds(len(sampler), num_ranks, drop_last=drop_last)
    return rounds


@given(**SIZES)
def test_every_sample_is_dealt_in_order_in_full_batches(num_samples, batch_size, num_ranks, drop_last):
    rounds = dealt(num_samples, batch_size, num_ranks, drop_last)
    assert all(len(batches) == num_ranks for batches in rounds)
    batches = list(itertools.chain.from_iterable(rounds))
    assert all(len(batch) == batch_size for batch in batches)
    samples = list(itertools.chain.from_iterable(batches))
    a_round = num_ranks * batch_size
    if drop_last:
        assert samples == list(range(num_samples // a_round * a_round))
    else:
        assert samples[:num_samples] == list(range(num_samples))
        assert 0 <= len(samples) - num_samples < a_round
        assert samples[num_samples:] == [
            again % min(num_samples, a_round) for again in range(len(samples) - num_samples)
        ]


@given(**SIZES)
def test_each_rank_gets_what_accelerate_would_give_it(num_samples, batch_size, num_ranks, drop_last):
    data_loader = pytest.importorskip("accelerate.data_loader")
    rounds = dealt(num_samples, batch_size, num_ranks, drop_last)
    for rank in range(num_ranks):
        sampler = BatchSampler(range(num_samples), batch_size, drop_last)
        theirs = list(data_loader.BatchSamplerShard(sampler, num_ranks, rank))
        assert [batches[rank] for batches in rounds] == theirs


@given(
    lengths=st.lists(st.integers(1, 5), max_size=12),
    num_ranks=st.integers(1, 4),
)
def test_batches_without_a_common_size_are_dealt_whole(lengths, num_ranks):
    batches = [[number] * length for number, length in enumerate(lengths)]
    rounds = list(rounds_of(batches, num_ranks, batch_size=None, drop_last=False))
    assert all(len(ones) == num_ranks for ones in rounds)
    flat = list(itertools.chain.from_iterable(rounds))
    assert flat[: len(batches)] == batches
    assert len(flat) - len(batches) < num_ranks
    assert all(batch in batches for batch in flat)
