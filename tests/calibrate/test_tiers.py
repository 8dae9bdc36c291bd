"""Bandwidths of disk and page cache are measured on files of their own, and unknown where there is no room for one."""

from pathlib import Path

import pytest
import torch

from memadvisor.calibrate.both_ways import measure_both_ways_of_files
from memadvisor.calibrate.tiers import measure_coder, measure_disk, measure_page_cache
from memadvisor.cli.main import main


def test_reading_and_writing_take_time(tmp_path):
    cache = measure_page_cache(tmp_path, 2**16)

    both_ways = measure_both_ways_of_files(tmp_path, 2**16)

    for found in (
        measure_disk(tmp_path, 2**16),
        cache.bandwidth,
        measure_coder(torch.device("cpu")),
        *both_ways,
    ):
        assert 0 < found.read_bytes_per_s < 1e13
        assert 0 < found.write_bytes_per_s < 1e13
    assert cache.size_bytes > 2**20
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_takes_no_file_has_no_bandwidth():
    assert measure_disk(Path("/proc"), 2**16) is None
    assert measure_page_cache(Path("/proc"), 2**16) is None
    assert measure_both_ways_of_files(Path("/proc"), 2**16) == (None, None)


@pytest.mark.parametrize("value", ["nowhere", __file__])
def test_what_is_no_directory_is_one_clear_line(value, monkeypatch, capsys):
    monkeypatch.chdir(Path(__file__).parent)
    assert main(["calibrate", "--disk", value]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and repr(value) in told
