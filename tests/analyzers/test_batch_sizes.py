"""Which storages shrink with the micro-batch, by their shapes."""

from dataclasses import replace
from fractions import Fraction

import pytest

from memadvisor.analyzers.batch_sizes import shrink_batch
from tests.make_run import make_run, storage

SAMPLES, SEQUENCE = 4, 32
(RANK,) = make_run(num_ranks=1, micro_batch_size=SAMPLES, sequence=SEQUENCE, vocabulary=512).ranks


@pytest.mark.parametrize(
    ("shape", "shrinks"),
    [
        ([SAMPLES, 7], True),
        ([7, SAMPLES], True),
        ([SAMPLES * SEQUENCE, 512], True),
        ([SAMPLES * (SEQUENCE - 1), 512], True),  # the logits of a loss whose labels are shifted by one
        ([SAMPLES * (SEQUENCE + 1), 512], False),
        ([512, 7], False),
        ([7, 7, SAMPLES], False),
    ],
)
def test_what_has_the_batch_in_its_shape_shrinks_with_it(shape, shrinks):
    row = storage(storage_id=10**6, shape=str(shape), size_bytes=4096, category="temporary", phase="backward")
    rank = replace(RANK, storages=(*RANK.storages, row))

    assert shrink_batch(rank, rank.traced_step, 2).get(10**6) == (2048 if shrinks else None)


def shrunk(*rows):
    """By their order, which of these storages shrink with half the micro-batch."""
    born = [
        storage(
            **{"storage_id": 10**6 + number, "size_bytes": 4096, "category": "temporary", "phase": "forward"}
            | row
        )
        for number, row in enumerate(rows)
    ]
    sizes = shrink_batch(replace(RANK, storages=tuple(born)), RANK.traced_step, 2)
    return [row.storage_id in sizes for row in born]


def test_the_batch_may_have_other_dimensions_of_its_samples_folded_in():
    """A map [4, 6, 14, 14] as rows of a codebook's distances; but 4 x 24 = 96 is the sequence of [4, 96, 24], too."""
    image = {"shape": f"[{SAMPLES}, 6, 14, 14]"}
    assert shrunk(image, {"shape": f"[1, {SAMPLES * 14 * 14}, 256]"}) == [True, True]
    assert shrunk(image, {"shape": f"[1, {SAMPLES * 13 * 14}, 256]"}) == [True, False]
    assert shrunk({"shape": f"[{SAMPLES}, 96, 24]"}, {"shape": "[96, 96]"}) == [True, False]


def test_what_an_operator_made_for_itself_shrinks_like_a_tensor_as_large():
    inner = {"shape": "", "operator": "inside aten::mkldnn_convolution"}
    assert shrunk({"shape": f"[{SAMPLES}, 6, 14, 14]"}, inner) == [True, True]
    assert shrunk({"shape": "[6, 14, 14]"}, inner) == [False, False]
    assert shrunk({"shape": f"[{SAMPLES}, 6]"}, {"shape": "[6, 14, 14]"}, inner) == [True, False, False]


def test_a_copy_in_another_dtype_inside_an_operator_shrinks_with_what_it_is_of():
    """A mean of bfloat16 over an image is summed in float32: a plan that splits was predicted to take 41 % too much."""
    cast = {"shape": "", "operator": "inside aten::_to_copy", "size_bytes": 8192}
    image = {"shape": f"[{SAMPLES}, 6, 14, 14]", "dtype": "bfloat16"}
    assert shrunk(image, cast) == [True, True]
    assert shrunk(image, {"shape": "[6, 14, 14]"}, cast) == [True, False, False]
    assert shrunk(image, {**cast, "operator": "inside aten::median"}) == [True, False]


def test_what_a_recurrent_layer_keeps_of_all_samples_shrinks():
    """oneDNN's and cuDNN's workspaces are bytes in one dimension."""
    row = {"shape": "[987654]", "operator": "aten::mkldnn_rnn_layer"}
    assert shrunk({**row, "dtype": "uint8"}, {**row, "dtype": "float32"}) == [True, False]


def test_the_last_steps_output_shrinks_where_this_steps_takes_its_place():
    """`output = model(x)` holds the old logits until the new ones are there; a data set is dropped for nothing."""
    output = {"shape": f"[{SAMPLES}, 512]"}
    before = {**output, "phase": "baseline", "category": "other"}
    assert shrunk({**output, "death_s": None}, {**before, "death_s": 1.0}) == [True, True]
    assert shrunk({**output, "death_s": None}, {**before, "death_s": None}) == [True, False]
    assert shrunk({**output, "death_s": 1.0}, {**before, "death_s": 1.0}) == [True, False]


def test_a_batch_that_was_there_before_grows_and_is_not_taken_to_shrink():
    """A loader that is a batch ahead; of a smaller micro-batch the script may hold the whole batch as before."""
    before = storage(
        shape=f"[{SAMPLES}, 7]", size_bytes=4096, category="input", phase="baseline", storage_id=1
    )
    rows = (before, replace(before, category="other", storage_id=2))
    rank = replace(RANK, storages=rows)

    assert shrink_batch(rank, rank.traced_step, Fraction(1, 2)) == {1: 8192}
    assert shrink_batch(rank, rank.traced_step, 2) == {}


def test_attention_stacks_samples_and_heads_and_three_tensors_of_them():
    """nn.MultiheadAttention works on [time, samples, width]; two heads of a width of 10 are 8 matrices of 5 channels."""
    wide = {"shape": f"[48, {SAMPLES}, 10]"}
    heads, scores = {"shape": f"[48, {SAMPLES * 2}, 5]"}, {"shape": f"[{SAMPLES * 2}, 48, 48]"}
    assert shrunk(wide, {"shape": f"[3, 48, {SAMPLES}, 10]"}, heads, scores) == [True] * 4
    assert shrunk({"shape": f"[3, 48, {SAMPLES}, 10]"}, heads, scores) == [False] * 3
    assert shrunk(wide, heads, {"shape": f"[{SAMPLES * 3}, 48, 48]"}) == [True, True, False]
