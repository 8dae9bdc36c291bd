"""Parameters are replaced where their memory is let go of in the traced step, and other memory is theirs when it ends."""

import dataclasses

from memadvisor.analyzers.replaced_parameters import replaces_parameters
from tests.make_run import make_run


def with_storages(change):
    """A rank whose first parameter's storage is what `change` makes of it."""
    rank = make_run(num_ranks=1).ranks[0]
    first = next(row for row in rank.storages if row.category == "parameter" and row.phase == "baseline")
    others = tuple(row for row in rank.storages if row is not first)
    return dataclasses.replace(rank, storages=(*others, *change(first, rank.traced_step)))


def let_go(row, step):
    return dataclasses.replace(row, death_s=step.start_s + 0.5 * step.duration_s)


def made(row, step):
    return dataclasses.replace(
        row, storage_id=10**6, birth_s=step.start_s + 0.4 * step.duration_s, phase="outside"
    )


def test_one_for_another_is_a_replacement():
    assert replaces_parameters(with_storages(lambda row, step: [let_go(row, step), made(row, step)]))


def test_what_stays_is_none_and_neither_is_what_is_made_beside_it_or_goes_without_another():
    assert not replaces_parameters(make_run(num_ranks=1).ranks[0])
    assert not replaces_parameters(with_storages(lambda row, step: [row, made(row, step)]))
    assert not replaces_parameters(with_storages(lambda row, step: [let_go(row, step)]))
