"""What convolutions and recurrent layers make for themselves goes with the batch as far as their shapes tell."""

from dataclasses import replace

from memadvisor.analyzers.inner_workspaces import workspaces
from memadvisor.run.records import Operator
from tests.make_run import make_run, storage

SAMPLES, MAPS = 4, (4, 6, 14, 14)
FILTERS = "[[4, 6, 14, 14], [10, 6, 3, 3]]"
(RANK,) = make_run(num_ranks=1).ranks


def of_samples(name, shapes, inner, *sizes):
    """Of storages that the operator made, how many bytes go with the samples; None where nothing tells."""
    operator = Operator(
        name=name, module="", unit="", phase="backward", start_s=1.0, end_s=2.0, executed_flops=0, model_flops=0, shapes=shapes
    )  # fmt: skip
    made = {"operator": inner, "birth_s": 1.5, "shape": "", "dtype": "uint8", "phase": "backward"}
    rows = [storage(storage_id=number, size_bytes=size, **made) for number, size in enumerate(sizes)]
    rank = replace(RANK, operators=(operator,), storages=tuple(rows))
    found = workspaces(rank, {MAPS}, {SAMPLES})
    return [found.get(row.storage_id) for row in rows]


def test_copies_of_maps_go_with_the_samples_and_copies_of_filters_do_not():
    """oneDNN's own layouts fill 6 channels up to 8 or 16, and 10 to 16."""
    plain, in_eights, in_sixteens = (4 * SAMPLES * channels * 14 * 14 for channels in (6, 8, 16))
    filters = 4 * 16 * 8 * 3 * 3
    sizes = plain, in_eights, in_sixteens, filters, 12_345
    for name in ("aten::convolution", "aten::convolution_backward"):
        found = of_samples(name, FILTERS, f"inside {name}", *sizes)
        assert found == [plain, in_eights, in_sixteens, 0, 0]


def test_one_copy_of_weights_that_are_as_large_as_maps_is_of_weights():
    """A generator's maps shrink as its filters grow, so sizes are alike; where samples are copied without doubt, filters are
    once, behind them. With channels last, where nothing else is copied, several may be of filters."""
    maps = 4 * SAMPLES * 6 * 14 * 14
    alike = 4 * SAMPLES * 16 * 14 * 14
    shapes = "[[4, 6, 14, 14], [16, 16, 7, 7]]"  # filters of 16 * 16 * 49 elements, as maps of 16 channels
    name = "aten::convolution"
    assert alike == 4 * 16 * 16 * 7 * 7
    assert of_samples(name, shapes, f"inside {name}", maps, alike, alike) == [maps, 0, alike]
    assert of_samples(name, shapes, f"inside {name}", alike, alike, maps) == [alike, 0, maps]
    assert of_samples(name, shapes, f"inside {name}", alike, alike) == [0, 0]


def test_onednns_own_buffer_has_a_rest_that_stays():
    maps = 4 * SAMPLES * 16 * 14 * 14
    name = "aten::convolution"
    assert of_samples(name, FILTERS, f"inside {name}", maps + 128) == [maps]


def test_a_recurrent_layers_workspace_goes_with_the_samples_but_for_what_is_over():
    """[sequence, batch, input] and [gates x hidden, input]: whole states of all samples and times, and a rest."""
    states = 4 * 32 * SAMPLES * 64
    found = of_samples(
        "aten::mkldnn_rnn_layer", "[[32, 4, 16], [256, 16]]", "aten::mkldnn_rnn_layer", 9 * states + 320
    )
    assert found == [9 * states]


def test_what_other_operators_make_for_themselves_is_left_to_others():
    assert of_samples("aten::mm", "[[4, 6], [6, 10]]", "inside aten::mm", 96) == [None]
