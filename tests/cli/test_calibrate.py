"""`memadvisor calibrate`: figures on the screen and in a file that `--hardware` reads."""

from memadvisor.cli.main import main
from memadvisor.hardware.load import load_hardware


def test_what_was_measured_is_printed_and_kept(tmp_path, capsys):
    path = tmp_path / "hardware.json"
    assert main(["calibrate", "--ranks", "1", "-o", str(path)]) == 0

    text = capsys.readouterr().out
    assert "float32 matrix product" in text and "measured" in text
    assert load_hardware(str(path)).kind == "measured"


def test_a_number_of_ranks_that_is_none_is_one_line(capsys):
    assert main(["calibrate", "--ranks", "0"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
