"""Storages that are rounded between forward and backward, by hand: what is in memory in each segment, and the time."""

from dataclasses import replace

from memadvisor.activation_bits import restoring_scratch_bytes, rounded_bytes, rounding_scratch_bytes
from memadvisor.cost.rounded_activations import (
    RoundableStorage,
    RoundedActivations,
    RoundingCost,
    Save,
    TimedChange,
    Timeline,
)

# A tensor of 1000 elements that block "a" makes in segment 0 and keeps, and "b" takes in segment 1 and keeps too; the
# backward of "b" is segment 3, that of "a" segment 4.
SIZE = 4000
STORAGE = RoundableStorage(
    category="activation",
    dtype="float32",
    size_bytes=SIZE,
    num_elements=1000,
    is_mask=False,
    death_s=4.6,
    held_until_s=1.5,
    input_until_s={"b": 4.0},
    saves=(Save("a", True, 0.5, 4.4, 4.6), Save("b", True, 1.4, 3.3, 3.6)),
)
TIMELINES = tuple(
    Timeline(float(start), {"captured": changes})
    for start, changes in enumerate(
        [[TimedChange(0.4, SIZE, "activation")], [], [], [], [TimedChange(4.6, -SIZE, "activation")], []]
    )
)
CODES = rounded_bytes(1000, 4)
ROUNDING, RESTORING = rounding_scratch_bytes(1000, "cpu"), restoring_scratch_bytes(1000, 4, "float32", "cpu")


def played(bits, storage=STORAGE, recomputed=()):
    """Bytes at the start of each segment, and at its highest instant; captured: SIZE from segment 0 to 4."""
    found = RoundedActivations([storage], TIMELINES, bits, recomputed, "cpu")
    captured = [0, SIZE, SIZE, SIZE, SIZE, 0]
    starts = [level + sum(change.values()) for level, change in zip(captured, found.at_start, strict=True)]
    peaks = [
        sum(found.peak(position, "captured", {"activation": level}).values())
        for position, level in enumerate(captured)
    ]
    return found, starts, peaks


def test_codes_from_the_first_save_on_the_original_to_its_last_use_and_again_where_it_is_asked_for():
    found, starts, peaks = played({"a": 4, "b": 4})
    assert starts == [0, SIZE + CODES, CODES, CODES, CODES, 0]
    assert peaks == [
        SIZE + CODES + ROUNDING,
        SIZE + CODES,
        CODES,
        CODES + SIZE + RESTORING,
        CODES + SIZE + RESTORING,
        0,
    ]
    cost = RoundingCost(
        rounding_tensor_s=2e-4, rounding_element_s=1e-6, restoring_tensor_s=3e-5, restoring_element_s=1e-7
    )
    spent = [found.seconds(position, cost) for position in range(6)]
    assert [round(seconds * 1e6) for seconds in spent] == [1200, 0, 0, 130, 130, 0]


def test_what_another_unit_keeps_as_it_is_is_there_for_both():
    """And rounding has gained nothing until that unit's backward is over."""
    _, starts, peaks = played({"a": 4})
    assert starts == [0, SIZE + CODES, SIZE + CODES, SIZE + CODES, CODES, 0]
    assert peaks[4] == CODES + SIZE + RESTORING
    assert played({"a": 4}, recomputed=("b",))[1] == [0, *[SIZE + CODES] * 3, CODES, 0]
    early = replace(STORAGE, saves=(Save("a", True, 0.5, 3.4, 3.5), STORAGE.saves[1]))
    assert played({"a": 4}, early)[2][3] == CODES + SIZE  # the original is there yet
    held = replace(STORAGE, held_until_s=4.6)
    assert played({"a": 4, "b": 4}, held)[1] == [0, *[SIZE + CODES] * 4, 0]


def test_a_mask_is_one_bit_an_element_and_what_no_unit_rounds_is_as_it_was():
    mask = replace(STORAGE, is_mask=True)
    assert played({"a": 8, "b": 8}, mask)[1][2] == rounded_bytes(1000, 1) == 4 * (8 + 32)
    for bits in ({}, {"c": 8}):
        assert played(bits)[1:] == ([0, *[SIZE] * 4, 0], [*[SIZE] * 5, 0])
