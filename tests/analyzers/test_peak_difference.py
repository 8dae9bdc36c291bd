import dataclasses

from hypothesis import given, settings

from memadvisor.analyzers.analysis import analyze
from memadvisor.analyzers.before_after import Change
from memadvisor.analyzers.peak import ModuleBytes
from memadvisor.analyzers.peak_difference import ROOT, peak_units
from tests.analyzers.test_run_difference import RUNS
from tests.make_run import make_run


@settings(max_examples=15, deadline=None)
@given(RUNS, RUNS)
def test_units_sum_to_what_storages_hold_at_the_peak_and_each_to_its_categories(before, after):
    peaks = [analyze(run).ranks[0].peak for run in (before, after)]
    rows = peak_units(*peaks)
    if rows is None:
        assert None in peaks
        return
    for side, peak in zip(("before", "after"), peaks, strict=True):
        assert sum(getattr(row.size_bytes, side) for row in rows) == sum(peak.by_category_bytes.values())
        for row in rows:
            parts = (getattr(change, side) for change in row.by_category_bytes.values())
            assert sum(parts) == getattr(row.size_bytes, side)


def test_a_block_that_has_lost_its_activations_stands_first_with_them_as_its_difference():
    whole = analyze(make_run(num_ranks=1)).ranks[0].peak
    lost = [row for row in whole.by_module if row.unit == "blocks.0" and row.category == "activation"]
    less = dataclasses.replace(whole, by_module=tuple(row for row in whole.by_module if row not in lost))

    first, *others = peak_units(whole, less)

    lost_bytes = sum(row.size_bytes for row in lost)
    assert (first.unit, first.size_bytes.difference) == ("blocks.0", -lost_bytes)
    assert first.by_category_bytes["activation"] == Change(before=lost_bytes, after=0)
    assert all(row.size_bytes.difference == 0 for row in others)


def test_what_the_model_itself_holds_is_told_from_what_was_born_in_no_module():
    peak = analyze(make_run(num_ranks=1)).ranks[0].peak
    rows = (
        ModuleBytes(module="", unit="", category="temporary", size_bytes=10),
        ModuleBytes(module="lone", unit="", category="temporary", size_bytes=5),
        ModuleBytes(module="(AveragedModel)", unit="", category="weight_copy", size_bytes=3),
    )
    peak = dataclasses.replace(peak, by_module=rows, by_root_bytes={"temporary": 4})

    sizes = {row.unit: row.size_bytes.before for row in peak_units(peak, peak)}

    assert sizes == {ROOT: 4 + 5, None: 6, "(AveragedModel)": 3}


def test_a_run_without_a_peak_compares_with_none():
    whole = analyze(make_run(num_ranks=1)).ranks[0].peak

    assert peak_units(whole, None) is None
    assert peak_units(None, whole) is None
