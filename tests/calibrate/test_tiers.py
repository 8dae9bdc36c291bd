"""The disk's bandwidth is measured on a file of its own, and is unknown where there is no room for one."""

from memadvisor.calibrate.tiers import measure_disk


def test_reading_and_writing_take_time():
    found = measure_disk(2**16)

    assert 0 < found.read_bytes_per_s < 1e13
    assert 0 < found.write_bytes_per_s < 1e13


def test_a_directory_that_takes_no_file_has_no_bandwidth(monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", "/proc")

    assert measure_disk(2**16) is None
