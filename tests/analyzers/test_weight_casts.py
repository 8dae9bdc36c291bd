"""Copies of weights that autocast makes: with its cache, and without."""

import dataclasses

import pytest
import torch

from memadvisor.analyzers.weight_casts import cached_casts, is_weight_cast
from tests.planning.test_called_again import predicted_and_measured
from tests.planning.test_moved_activations import BATCH, LENGTH, VOCABULARY, Gpt, recorded


class Casting(Gpt):
    """Its forward's end is the fullest moment, where autocast's context is still open."""

    caches = True

    def loss(self):
        words = torch.randint(VOCABULARY, (BATCH, LENGTH))
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=self.caches):
            return self(words).repeat(1, 1, 24).softmax(-1).mean()


class CastingAnew(Casting):
    """As Lightning's Trainer has it."""

    caches = False


@pytest.mark.parametrize("kind", [Casting, CastingAnew])
def test_units_that_run_again_keep_the_copies_only_where_autocast_caches_them(kind):
    predicted, measured, losses = predicted_and_measured(kind, 1, (0, 1, 2), bf16=False)

    assert losses[0] == losses[1]
    assert measured == pytest.approx(predicted, rel=1e-3)


@pytest.mark.parametrize(("kind", "has_cached"), [(Casting, True), (CastingAnew, False)])
def test_what_the_cache_holds_is_seen_to_be_held(kind, has_cached):
    rank = recorded(kind, 1, False)[0].ranks[0]
    saved = {row.storage_id for row in rank.saved}
    casts = {row.storage_id for row in rank.storages if is_weight_cast(row, rank.parameters)} & saved

    assert casts
    assert cached_casts(rank) & casts == (casts if has_cached else set())


def test_a_run_that_does_not_tell_who_held_what_counts_all_copies_as_held():
    rank = recorded(CastingAnew, 1, False)[0].ranks[0]
    untold = [dataclasses.replace(row, last_held_s=None) for row in rank.storages]
    casts = {row.storage_id for row in untold if is_weight_cast(row, rank.parameters)}

    assert casts
    assert cached_casts(dataclasses.replace(rank, storages=untold)) == casts


def test_whole_numbers_of_a_weight_s_shape_are_none():
    rank = recorded(CastingAnew, 1, False)[0].ranks[0]
    cast = next(row for row in rank.storages if is_weight_cast(row, rank.parameters))

    assert not is_weight_cast(dataclasses.replace(cast, dtype="int64"), rank.parameters)
