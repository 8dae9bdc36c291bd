"""Which layer a loss in chunks is of, and what of a recorded step it leaves as it is."""

from __future__ import annotations

import pytest

import memadvisor
import tests.planning.test_chunked_loss as trainings
from memadvisor.analyzers.chunked_step import chunked_step
from memadvisor.chunked_loss import ChunkedLoss
from memadvisor.errors import UsageError
from tests.planning.test_chunked_loss import BATCH, LENGTH, ROWS, WIDTH, WORDS, Gpt, recorded


def test_the_layer_is_the_widest_outside_of_blocks_and_has_more_rows_than_a_chunk(tmp_path):
    plain = recorded(tmp_path / "plain", "")
    rank = plain.ranks[0]
    assert chunked_step(rank, rank.traced_step, ChunkedLoss()) is None  # 256 rows are one chunk
    assert "chunked_loss" not in {
        change.kind for change in memadvisor.advise(plain, memory="1GiB").script_changes
    }
    found = chunked_step(rank, rank.traced_step, ChunkedLoss(rows=ROWS))
    assert found is not None
    layer = found.layer
    assert (layer.num_rows, layer.num_features, layer.num_classes) == (BATCH * LENGTH, WIDTH, WORDS)


class NoLoss(Gpt):
    def loss(self, words):
        return self(words).square().mean(), None


def test_where_no_loss_takes_scores_by_rows_nothing_is_planned(tmp_path, monkeypatch):
    monkeypatch.setattr(trainings, "Gpt", NoLoss)
    plain = recorded(tmp_path / "plain", "")
    with pytest.raises(UsageError, match="--chunked-loss is for a loss of more rows"):
        memadvisor.advise(plain, memory="1GiB", chunked_loss=ROWS)
    rank = plain.ranks[0]
    assert chunked_step(rank, rank.traced_step, ChunkedLoss(rows=ROWS)) is None


def test_left_open_layer_and_rows_are_settled_from_the_run(tmp_path):
    rank = recorded(tmp_path / "plain", "").ranks[0]
    found = chunked_step(rank, rank.traced_step, ChunkedLoss(rows=10))
    assert found.chunked_loss == ChunkedLoss(layer="head", rows=10)


@pytest.mark.parametrize(("kind", "units"), [("", {"head"}), ("tied", {"tokens"})])
def test_its_weights_are_those_of_the_unit_that_they_are_tied_to(kind, units, tmp_path):
    rank = recorded(tmp_path / "plain", kind).ranks[0]
    assert chunked_step(rank, rank.traced_step, ChunkedLoss(layer="head", rows=ROWS)).units == units


def test_bytes_go_and_come_with_the_scores_alone(tmp_path):
    rank = recorded(tmp_path / "plain", "kept").ranks[0]
    chunked = chunked_step(rank, rank.traced_step, ChunkedLoss(rows=ROWS)).without_scores()
    numbers = {row.storage_id for row in rank.storages}
    gone = [
        row
        for row in rank.storages
        if row not in chunked.storages and row.size_bytes >= WORDS * BATCH * LENGTH
    ]
    assert all(row.category not in ("parameter", "gradient", "optimizer_state") for row in gone)
    added = [row for row in chunked.storages if row.storage_id not in numbers]
    scores_bytes = 4 * WORDS * BATCH * LENGTH
    assert added and max(row.size_bytes for row in added) <= scores_bytes * ROWS / (BATCH * LENGTH)
    assert {row.storage_id for row in chunked.saved} <= {row.storage_id for row in chunked.storages}
