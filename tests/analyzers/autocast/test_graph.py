"""Evaluations of a model that trains are forwards under autocast too; a teacher is no model of a plan."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from memadvisor.analyzers.autocast.graph import StepGraph
from memadvisor.analyzers.autocast.step import required_autocast
from tests.analyzers.autocast.test_step import LENGTH, WORDS, Block, Words, peak_bytes, recorded


def evaluated(model, _):
    """Of many more words than a step trains on, and without gradients: the peak is there."""
    with torch.no_grad():
        words = torch.randint(WORDS, (256, LENGTH))
        F.cross_entropy(model(words).flatten(0, 1), words.flatten())
    words = torch.randint(WORDS, (8, LENGTH))
    yield F.cross_entropy(model(words).flatten(0, 1), words.flatten())


def test_a_peak_in_an_evaluation_is_that_of_autocast_by_hand(tmp_path):
    plain = recorded(tmp_path / "plain", lambda: Words(Block(), Block()), of=evaluated).ranks[0]
    by_hand = recorded(tmp_path / "hand", lambda: Words(Block(), Block()), of=evaluated, by_hand=True).ranks[
        0
    ]
    measured = by_hand.traced_step.peak_allocated_bytes
    assert measured < 0.9 * plain.traced_step.peak_allocated_bytes
    assert peak_bytes(required_autocast(plain)) == pytest.approx(measured, rel=0.002)


def test_an_evaluation_is_one_call_and_of_the_forwards_that_train_none(tmp_path):
    plain = recorded(tmp_path / "plain", lambda: Words(Block()), of=evaluated).ranks[0]
    graph = StepGraph(plain)
    ((call, result),) = graph.evaluations
    assert result.shape == str([256 * LENGTH, WORDS])
    inside = {row.module for row in plain.operators if call.start_s <= row.start_s <= call.end_s}
    assert "tokens" in inside and "head" in inside
    assert len(graph.outermost) == 2 and call in graph.outermost


def test_a_model_that_does_not_train_stays_as_it_is(tmp_path):
    torch.manual_seed(1)
    teacher = nn.Sequential(nn.Embedding(WORDS, WORDS), nn.Linear(WORDS, WORDS))

    def taught(model, _):
        words = torch.randint(WORDS, (16, LENGTH))
        with torch.no_grad():
            told = teacher(words).softmax(-1)
        yield F.cross_entropy(model(words).flatten(0, 1), told.flatten(0, 1))

    plain = recorded(tmp_path / "plain", lambda: Words(Block()), of=taught).ranks[0]
    assert StepGraph(plain).evaluations == []
