import dataclasses

from memadvisor.analyzers.activations import activations
from memadvisor.analyzers.checkpoint_frames import traced_calls
from memadvisor.run.records import ModuleCall, Saved, Span
from tests.make_run import make_run, step, storage

TOKENS = 4 * 32


def rank_of(storages, saved):
    rank = make_run(num_ranks=1).ranks[0]
    return dataclasses.replace(
        rank, steps=(step(end_s=10.0, traced=True),), spans=(), storages=tuple(storages), saved=tuple(saved)
    )


def saved(storage_id, saved_s, released_s=None, *, module="a", unit="a", micro_batch=0, size_bytes=100):
    return Saved(storage_id, module, unit, micro_batch, size_bytes, "(25,)", saved_s, None, released_s)


def test_a_block_keeps_the_outputs_of_its_layers():
    """Four linear layers of 3h, h, 4h and h float32 values a token: 9 x 64 x 4 bytes each."""
    kept = activations(traced_calls(make_run().ranks[0]))
    block = next(unit for unit in kept.units if unit.name == "blocks.1")

    assert block.saved_bytes == TOKENS * 9 * 64 * 4
    assert block.by_operator_bytes == {"aten::mm": TOKENS * 9 * 64 * 4}
    assert block.num_storages == 4


def test_units_and_modules_sum_to_what_is_kept():
    kept = activations(traced_calls(make_run(num_micro_batches=3).ranks[0]))

    assert sum(unit.saved_bytes for unit in kept.units) == kept.saved_bytes
    assert sum(module.saved_bytes for module in kept.modules) == kept.saved_bytes


def test_micro_batches_do_not_add_up():
    """Each keeps its activations until its own backward, so one's are what is kept at a time."""
    one, three = (activations(traced_calls(make_run(num_micro_batches=n).ranks[0])) for n in (1, 3))

    assert one.saved_bytes == three.saved_bytes
    assert len(three.lifetimes) == 3 * len(one.lifetimes)


def test_a_storage_saved_twice_counts_once_for_the_first():
    rows = [
        saved(0, 3.0, 6.0, module="second", unit="second"),
        saved(0, 2.0, 7.0, module="first", unit="first"),
    ]
    kept = activations(traced_calls(rank_of([storage(birth_s=1.0, last_use_s=6.5)], rows)))
    life = kept.lifetimes[0]

    assert kept.saved_bytes == 100
    assert [unit.name for unit in kept.units] == ["first"]
    assert (life.born_s, life.saved_s, life.last_used_s, life.released_s) == (1.0, 2.0, 6.5, 7.0)
    assert life.kept_s == 5.0


def test_what_somebody_still_holds_is_not_released():
    kept = activations(traced_calls(rank_of([storage()], [saved(0, 2.0, 5.0), saved(0, 3.0)])))

    assert kept.lifetimes[0].released_s is None
    assert kept.longest == ()


def test_saved_parameters_and_what_was_there_before_do_not_count():
    rows = [
        storage(storage_id=0, category="parameter", phase="baseline"),
        storage(storage_id=1, category="other", phase="baseline"),
        storage(storage_id=2, category="gradient"),
        storage(storage_id=3, category="input", phase="outside", size_bytes=8),
    ]
    kept = activations(traced_calls(rank_of(rows, [saved(i, 1.0) for i in range(4)])))

    assert kept.saved_bytes == 8


def test_the_storage_says_how_many_bytes_not_the_view():
    kept = activations(traced_calls(rank_of([storage(size_bytes=4096)], [saved(0, 1.0, size_bytes=64)])))

    assert kept.saved_bytes == 4096


def test_what_was_moved_and_is_back_counts_once_and_codes_beside_an_original_count():
    rows = [storage(storage_id=i, size_bytes=size) for i, size in enumerate((64, 64, 16))]
    rows[0] = dataclasses.replace(rows[0], operator="aten::tanh")
    back = dataclasses.replace(saved(1, 5.0, 6.0), copy_of=0)
    codes = dataclasses.replace(saved(2, 2.0, 6.0), copy_of=0, original_bytes=64)
    kept = activations(traced_calls(rank_of(rows, [saved(0, 1.0, 3.0), back, codes])))
    lives = {life.storage_id: life for life in kept.lifetimes}

    assert (kept.saved_bytes, kept.moved_bytes) == (64 + 16, 64)
    assert [lives[i].returned_of for i in range(3)] == [None, 0, None]
    assert [lives[i].operator for i in range(3)] == ["aten::tanh"] * 3
    assert lives[0].released_s < lives[1].saved_s


def test_the_first_block_keeps_longest():
    """The backward runs in reverse, so what is saved first is released last."""
    kept = activations(traced_calls(make_run().ranks[0]))

    assert kept.longest[0].unit == "embedding"
    assert [life.size_bytes for life in kept.largest] == sorted(
        (life.size_bytes for life in kept.largest), reverse=True
    )


def test_recomputed_blocks_keep_their_input_in_the_forward():
    plain = activations(traced_calls(make_run(num_ranks=1).ranks[0]))
    recomputed = activations(traced_calls(make_run(num_ranks=1, recompute=("blocks.1",)).ranks[0]))

    in_forward = [
        life.size_bytes
        for life in recomputed.lifetimes
        if life.unit == "blocks.1" and life.module == "blocks.1"
    ]
    assert in_forward == [TOKENS * 64 * 4]
    assert plain.saved_bytes < recomputed.saved_bytes  # the recomputation saves again, for a short while


def test_without_a_traced_step_nothing_is_known():
    assert activations(traced_calls(make_run(traced_step=None).ranks[0])) is None


def test_where_hooks_of_the_scripts_were_asked_nothing_is_known_rather_than_none_kept():
    rank = dataclasses.replace(make_run().ranks[0], saved=())
    assert activations(traced_calls(rank)) is None


def test_what_a_second_forward_saves_lives_for_one_backward_and_is_in_no_sum():
    """A reentrant checkpoint saves in the backward, one block after another: eight blocks' sum was twice the peak."""
    rows = [storage(storage_id=i, size_bytes=64) for i in range(3)]
    again = ModuleCall(0, "blocks.0", "blocks.0", "recompute", 0, 4.0, 5.0)
    saves = [saved(0, 1.0, 6.0), saved(1, 4.2, 5.5), saved(2, 4.4, 5.5)]
    rank = dataclasses.replace(rank_of(rows, saves), module_calls=(again,))
    kept = activations(traced_calls(rank))

    assert kept.saved_bytes == sum(unit.saved_bytes for unit in kept.units) == 64
    assert [life.is_made_again for life in kept.lifetimes] == [False, True, True]


def test_what_no_backward_was_left_to_take_is_in_no_sum():
    """Of a spiking layer the reset is made with a graph and used without: each of 25 calls let go of the last one's, and
    19 MiB were kept of a step that peaked at 15."""
    rank = rank_of(
        [storage(birth_s=1.0, storage_id=number, size_bytes=100) for number in range(2)],
        [saved(0, 2.0, 3.0), saved(1, 2.5, 6.0)],
    )

    assert activations(traced_calls(rank)).saved_bytes == 200  # no backward was seen
    spans = (Span(rank.steps[0].index, "backward", "", 0, 5.0, 7.0),)
    kept = activations(traced_calls(dataclasses.replace(rank, spans=spans)))

    assert kept.saved_bytes == 100
    assert [life.is_dropped for life in kept.lifetimes] == [True, False]
