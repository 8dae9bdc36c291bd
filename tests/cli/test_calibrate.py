"""`memadvisor calibrate`: figures on the screen and in a file that `--hardware` reads."""

from memadvisor.cli.main import main
from memadvisor.hardware.load import load_hardware


def test_what_was_measured_is_printed_and_kept(tmp_path, capsys):
    """One rank measures arithmetic alone."""
    path = tmp_path / "hardware.json"
    assert main(["calibrate", "--ranks", "1", "-o", str(path)]) == 0

    text = capsys.readouterr().out
    assert "float32 matrix product" in text and "measured" in text and "AdamW  fused" in text
    found = load_hardware(str(path))
    assert found.kind == "measured"
    best = max(rate.flops_per_s for rate in found.matmuls if rate.dtype == "float32")
    assert found.peak_flops_per_s["float32"] == best > 1e8
    assert found.memory_bandwidth_bytes_per_s > 1e8
    assert found.collectives == ()
    assert {row.implementation for row in found.optimizers} == {"fused", "foreach"}


def test_a_number_of_ranks_that_is_none_is_one_line(capsys):
    assert main(["calibrate", "--ranks", "0"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
