"""A hardware file is read whole or refused in one line; a name is looked up and never guessed."""

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memadvisor.errors import MemadvisorError, UnknownHardwareError, UsageError
from memadvisor.hardware.catalogue import CATALOGUE
from memadvisor.hardware.hardware import (
    CollectiveCurve,
    EngineCost,
    Hardware,
    LinkPiece,
    MatmulRate,
    OptimizerRate,
    OverlapSlowdown,
    PageCache,
    PagingCost,
    TierBandwidth,
)
from memadvisor.hardware.load import hardware_from_json, load_hardware, named_hardware, save_hardware

MEASURED = Hardware(
    name="this machine",
    kind="measured",
    source="a test",
    memory_bytes=None,
    memory_bandwidth_bytes_per_s=3e10,
    peak_flops_per_s={"float32": 1e11},
    collectives=(
        CollectiveCurve(
            operation="all_reduce",
            num_ranks=2,
            sizes_bytes=(1024, 4096),
            durations_s=(1e-4, 2e-4),
            pieces=(LinkPiece(from_bytes=1024, alpha_s=0.0, bytes_per_s=1e7, residual_fraction=0.1),),
        ),
    ),
    alternatives=(
        CollectiveCurve(
            operation="all_gather",
            num_ranks=4,
            sizes_bytes=(1024,),
            durations_s=(1e-4,),
            algorithm="doubling",
        ),
    ),
    disk=TierBandwidth(read_bytes_per_s=2e9, write_bytes_per_s=1e9),
    page_cache=PageCache(
        bandwidth=TierBandwidth(read_bytes_per_s=5e9, write_bytes_per_s=3e9), size_bytes=2**30
    ),
    coder=TierBandwidth(read_bytes_per_s=4e9, write_bytes_per_s=2e9),
    overlap=OverlapSlowdown(compute=1.2, collective=1.5, late_s=1e-3, spread=0.0),
    engine=EngineCost(gradient_s=0.0, collective_s=1e-4, lane_s=2e-4, piece_s=2e-5, shown_s=3e-5),
    paging=PagingCost(transfer_s=1e-4, shown_s=4e-5, update_s=0.0, moved_s=2e-4),
    matmuls=(MatmulRate(dtype="float32", rows=8, columns=16, depth=32, flops_per_s=1e11),),
    optimizers=(OptimizerRate(optimizer="AdamW", implementation="fused", elements_per_s=2e9),),
    page_cache_both_ways=TierBandwidth(read_bytes_per_s=4e9, write_bytes_per_s=2e9),
)
ENGINE = ("gradient_s", "collective_s", "lane_s", "piece_s", "shown_s")


def test_a_saved_file_reads_back_the_same(tmp_path):
    save_hardware(MEASURED, tmp_path / "hardware.json")

    assert load_hardware(str(tmp_path / "hardware.json")) == MEASURED
    assert (tmp_path / "hardware.json").stat().st_mode & 0o077 == 0


def test_a_file_of_before_other_tiers_knows_of_none(tmp_path):
    save_hardware(MEASURED, tmp_path / "hardware.json")
    value = json.loads((tmp_path / "hardware.json").read_text())
    later = {"disk", "host", "page_cache", "coder", "overlap", "matmuls", "optimizers", "engine", "paging"}
    value = {name: what for name, what in value.items() if name not in later and "both_ways" not in name}
    del value["collectives"][0]["pieces"]

    found = hardware_from_json(value, "it")
    assert {found.disk, found.host, found.page_cache, found.coder} == {None}
    assert {found.overlap, found.engine, found.paging} == {None}
    assert found.matmuls == found.optimizers == found.collectives[0].pieces == ()


def test_a_file_of_before_lateness_was_measured_knows_of_none(tmp_path):
    save_hardware(MEASURED, tmp_path / "hardware.json")
    value = json.loads((tmp_path / "hardware.json").read_text())
    del value["overlap"]["late_s"], value["overlap"]["spread"]
    assert hardware_from_json(value, "it").overlap == OverlapSlowdown(compute=1.2, collective=1.5)


def test_what_is_faster_in_company_than_alone_is_no_slowdown(tmp_path):
    save_hardware(MEASURED, tmp_path / "hardware.json")
    value = json.loads((tmp_path / "hardware.json").read_text())
    value["overlap"]["collective"] = 0.9
    with pytest.raises(UsageError, match="overlap"):
        hardware_from_json(value, "it")


@pytest.mark.parametrize("entry", CATALOGUE, ids=lambda entry: entry.name)
def test_every_name_and_alias_finds_its_data_sheet_and_every_figure_names_its_source(entry):
    for name in (entry.name, *entry.aliases):
        assert named_hardware(f" {name.upper()} ").name == entry.name
    assert set(entry.sources) - {"matmul"} == {"memory", "bandwidth", "flops"}
    assert ("matmul" in entry.sources) == (entry.matmul_share is not None)
    assert load_hardware(entry.name).kind == "datasheet"


@pytest.mark.parametrize("entry", CATALOGUE, ids=lambda entry: entry.name)
def test_rates_are_dense_and_go_down_with_the_width_of_numbers(entry):
    rates = entry.peak_flops_per_s
    ordered = [rates[name] for name in ("float16", "tf32", "float32", "float64") if name in rates]
    assert ordered == sorted(ordered, reverse=True)
    if "tf32" in rates:  # half as many as of 16 bits on every tensor core; with sparsity it would be the same
        assert rates["float16"] == rates["bfloat16"] == pytest.approx(2 * rates["tf32"], rel=0.02)
    for name in rates:
        if name.startswith("float8") and "float16" in rates:  # Gaudi 3's are as fast as those of bfloat16
            assert rates[name] == pytest.approx(2 * rates["float16"], rel=0.02)


def test_names_and_aliases_are_unambiguous():
    names = [name for entry in CATALOGUE for name in (entry.name.lower(), *entry.aliases)]
    assert len(names) == len(set(names))


def test_an_unknown_device_is_refused_and_not_replaced_by_another():
    with pytest.raises(UnknownHardwareError, match="'B9000'"):
        load_hardware("B9000")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 2}, "format"),
        ({"kind": "guess"}, "kind"),
        ({"memory_bytes": -1}, "positive"),
        ({"memory_bandwidth_bytes_per_s": "fast"}, "number"),
        ({"peak_flops_per_s": {"float32": float("inf")}}, "positive"),
        ({"collectives": [{"operation": "all_reduce"}]}, r"'collectives\[0\]\.sizes_bytes' is missing"),
        ({"collectives": None}, "collectives is null, where a list belongs"),
        ({"name": 4}, "name is 4, where text belongs"),
        ({"peak_flops_per_s": {"float32": "x" * 99}}, r'peak_flops_per_s\.float32 is "x+\.\.\., where a pos'),
        ({"engine": dict.fromkeys(ENGINE, False)}, r"engine\.gradient_s is false"),
        ({"disk": 5}, "disk is 5, where an object belongs"),
        ({"overlap": {"compute": 1.0, "collective": 1.0, "late_s": []}}, r"overlap\.late_s is \[\]"),
    ],
)
def test_a_broken_file_is_one_line(tmp_path, change, message):
    path = tmp_path / "hardware.json"
    save_hardware(MEASURED, path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))

    with pytest.raises(UsageError, match=message) as caught:
        load_hardware(str(path))
    assert "\n" not in caught.value.one_line()


def test_sizes_that_do_not_ascend_are_refused():
    curve = {"operation": "all_reduce", "num_ranks": 2, "sizes_bytes": [4, 4], "durations_s": [1.0, 1.0]}
    value = {"format": 1, "name": "x", "kind": "given", "source": "", "memory_bytes": None}
    value |= {"memory_bandwidth_bytes_per_s": None, "peak_flops_per_s": {}, "collectives": [curve]}
    with pytest.raises(UsageError, match="ascend"):
        hardware_from_json(value, "it")


def test_a_byte_order_mark_is_read_over_and_a_broken_line_is_named(tmp_path):
    path = tmp_path / "hardware.json"
    save_hardware(MEASURED, path)
    path.write_text(text := path.read_text(), encoding="utf-8-sig")
    assert load_hardware(str(path)) == MEASURED

    path.write_text(text.replace('"kind":', "kind:"))
    line = 1 + text[: text.index('"kind":')].count("\n")
    with pytest.raises(UsageError, match=rf"is not JSON: .*, line {line}, column "):
        load_hardware(str(path))


def test_a_missing_file_and_a_file_that_is_no_json_are_one_line(tmp_path):
    (tmp_path / "bad.json").write_text("{")
    for name in ("bad.json", "absent.json"):
        with pytest.raises(UsageError):
            load_hardware(str(tmp_path / name))


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
_FIELDS = ("format", "name", "kind", "source", "memory_bytes", "peak_flops_per_s", "collectives")


@given(st.dictionaries(st.sampled_from(_FIELDS), _JSON) | _JSON)
def test_any_json_is_read_or_refused_and_never_crashes(value):
    with contextlib.suppress(MemadvisorError):
        hardware_from_json(value, "it")


@pytest.mark.parametrize(
    ("name", "found", "float16"),
    [
        ("GeForce RTX 3080 10GB", "RTX-3080-10GB", 59.5e12),  # GA102 white paper: 59.5 with sums in float32
        ("NVIDIA RTX A5000", "RTX-A5000-24GB", 111.1e12),  # half of the sheet's 222.2 with sparsity
        ("Quadro RTX 8000", "Quadro-RTX-8000-48GB", 130.5e12),
        ("RTX 4070 Ti SUPER 16GB", "RTX-4070-Ti-SUPER-16GB", 88.2e12),
    ],
)
def test_cards_by_their_cores_have_the_rates_that_their_makers_print(name, found, float16):
    hardware = load_hardware(name)

    assert hardware.name == found
    assert hardware.peak_flops_per_s["float16"] == pytest.approx(float16, rel=0.01)


def test_of_one_card_with_two_memories_the_name_alone_is_the_smaller():
    assert load_hardware("RTX 4060 Ti").memory_bytes == 8 * 10**9
    assert load_hardware("RTX 4060 Ti 16GB").memory_bytes == 16 * 10**9


@pytest.mark.parametrize(
    ("name", "first"),
    [("H1000", "H100-"), ("h100 smx5", "H100-"), ("B2000", "B200"), ("MI3000", "MI300")],
)
def test_a_name_that_is_nearly_a_devices_is_answered_with_the_nearest(name, first):
    """All of the catalogue stood there, 1,400 characters of it."""
    with pytest.raises(UnknownHardwareError) as caught:
        load_hardware(name)

    assert f"the nearest known are {first}" in caught.value.hint
    assert caught.value.hint.count(",") <= 4


def test_a_name_that_is_like_none_is_answered_with_what_names_begin_with():
    """All of them are more than a line can hold."""
    with pytest.raises(UnknownHardwareError) as caught:
        load_hardware("zzzzzz")

    shown = caught.value.hint.partition(";")[0].removeprefix("known names begin with ").split(", ")
    assert {entry.name.partition("-")[0] for entry in CATALOGUE} == {*shown}
    assert len(caught.value.hint) < 500
