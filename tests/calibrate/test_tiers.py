"""Bandwidths of disk and page cache are measured on files of their own, and unknown where there is no room for one."""

from memadvisor.calibrate.tiers import measure_disk, measure_page_cache


def test_reading_and_writing_take_time():
    cache = measure_page_cache(2**16)

    for found in (measure_disk(2**16), cache.bandwidth):
        assert 0 < found.read_bytes_per_s < 1e13
        assert 0 < found.write_bytes_per_s < 1e13
    assert cache.size_bytes > 2**20


def test_a_directory_that_takes_no_file_has_no_bandwidth(monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", "/proc")

    assert measure_disk(2**16) is None
    assert measure_page_cache(2**16) is None
