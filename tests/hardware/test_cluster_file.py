"""A cluster file is read whole or refused in one line."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memadvisor.errors import MemadvisorError
from memadvisor.hardware.cluster_file import cluster_from_toml, load_cluster

WHOLE = """
[cluster]
accelerator = "H100"
nodes = 4
per_node = 8
[inside]
kind = "NVLink"
rate = "900GB/s"
latency_us = 2
[across]
rate = "400Gbps"
rails = 4
oversubscription = 2
latency_us = 5.0
[host]
rate = "32GB/s"
"""


def test_rates_are_each_accelerators(tmp_path):
    (tmp_path / "cluster.toml").write_text(WHOLE)
    cluster = load_cluster(tmp_path / "cluster.toml")

    assert cluster.num_accelerators == 32
    assert (cluster.inside.bytes_per_s, cluster.inside.alpha_s) == (900e9, pytest.approx(2e-6))
    assert cluster.across.bytes_per_s == 4 * 50e9 / 8 / 2
    assert cluster.across.card_bytes_per_s == 50e9 / 2
    assert cluster.across.alpha_s == pytest.approx(5e-6)
    assert cluster.host.bytes_per_s == 32e9
    assert cluster.accelerator.name == "H100-SXM-80GB"


def test_what_is_left_out_is_published():
    cluster = cluster_from_toml({"cluster": {"accelerator": "A100", "nodes": 2, "per_node": 8}}, "it")
    assert (cluster.inside.bytes_per_s, cluster.across.bytes_per_s, cluster.host.bytes_per_s) == (
        300e9,
        25e9,
        32e9,
    )


def test_a_byte_order_mark_is_read_over_and_other_text_than_utf_8_is_said_to_be_none(tmp_path):
    path = tmp_path / "cluster.toml"
    path.write_text(WHOLE, encoding="utf-8-sig")
    with_mark = load_cluster(path)
    path.write_text(WHOLE)
    assert load_cluster(path) == with_mark

    path.write_text(WHOLE, encoding="utf-16")
    with pytest.raises(MemadvisorError, match=r"is not TOML: it is not text in UTF-8\."):
        load_cluster(path)
    path.write_text("x = " + "[" * 100_000)
    with pytest.raises(MemadvisorError, match="it nests too deeply"):
        load_cluster(path)


@pytest.mark.parametrize(
    "change",
    [("[cluster]", "[clusters]"), ("nodes = 4", "nodes = 0"), ("nodes = 4", "nodes = 1.5"), ("rails = 4", "rail = 4"),
     ('rate = "400Gbps"', "rate = 400"), ('rate = "400Gbps"', 'rate = "fast"'), ('"H100"', '"Z80"'), ('"H100"', "3"),
     ("oversubscription = 2", "oversubscription = -1"), ("oversubscription = 2", "oversubscription = nan"), ("[host]", "[[host]]"),
     ("[cluster]", "[cluster")],
)  # fmt: skip
def test_nonsense_is_one_line(tmp_path, change):
    assert change[0] in WHOLE
    (tmp_path / "cluster.toml").write_text(WHOLE.replace(*change))
    with pytest.raises(MemadvisorError) as caught:
        load_cluster(tmp_path / "cluster.toml")
    assert "\n" not in caught.value.one_line()


_VALUES = st.one_of(st.integers(-1, 9), st.floats(), st.booleans(), st.sampled_from(["H100", "1GB/s", "x"]))
_KEYS = st.sampled_from(["accelerator", "nodes", "per_node", "rate", "rails", "latency_us", "kind", "other"])


@given(
    st.dictionaries(
        st.sampled_from(["cluster", "inside", "across", "host", "x"]), st.dictionaries(_KEYS, _VALUES)
    )
)
def test_any_tables_give_a_cluster_or_one_line(tables):
    with contextlib.suppress(MemadvisorError):
        assert cluster_from_toml(tables, "it").num_accelerators >= 1
