"""`memadvisor report`: where the file goes, and what it says when it cannot."""

import dataclasses
import stat

import pytest

from memadvisor.cli.closing import print_closing
from memadvisor.cli.main import main
from tests.make_run import make_run, write_run


@pytest.fixture
def run_directory(tmp_path):
    return write_run(make_run(num_blocks=1), tmp_path / "run")


def test_the_report_lies_in_the_run_and_stdout_is_its_path(run_directory, capsys):
    assert main(["report", str(run_directory)]) == 0

    path = run_directory / "report.html"
    assert capsys.readouterr().out == f"{path}\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.read_text().startswith("<!doctype html>")


def test_a_run_with_a_report_in_it_is_still_a_run(run_directory, tmp_path, capsys):
    assert main(["report", str(run_directory)]) == 0
    assert main(["report", str(run_directory), "-o", str(tmp_path / "again.html")]) == 0

    assert (tmp_path / "again.html").read_bytes() == (run_directory / "report.html").read_bytes()


def test_the_page_that_closes_a_run_is_this_one_and_knows_the_devices_data_sheet(tmp_path):
    run = make_run(num_blocks=1)
    process = dataclasses.replace(run.ranks[0].process, device_name="NVIDIA H100 80GB HBM3")
    ranks = (dataclasses.replace(run.ranks[0], process=process), *run.ranks[1:])
    directory = write_run(dataclasses.replace(run, ranks=ranks), tmp_path / "run")
    print_closing(directory, here=tmp_path, with_report=True)
    assert main(["report", str(directory), "-o", str(tmp_path / "again.html")]) == 0

    page = (directory / "report.html").read_text()
    assert page == (tmp_path / "again.html").read_text()
    assert "kind-datasheet" in page.split('id="figures"')[0]


def test_a_peak_given_by_the_user_gives_an_mfu_labelled_so(run_directory, capsys):
    assert main(["report", str(run_directory), "--peak-tflops", "0.01"]) == 0

    assert "kind-given" in (run_directory / "report.html").read_text().split('id="figures"')[0]


@pytest.mark.parametrize("place", ["absent/report.html", "run"])
def test_an_unwritable_place_is_one_line_and_code_2(run_directory, tmp_path, capsys, place):
    assert main(["report", str(run_directory), "-o", str(tmp_path / place)]) == 2

    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert "cannot be written" in captured.err


def test_what_is_no_run_is_one_line_and_code_2(tmp_path, capsys):
    assert main(["report", str(tmp_path)]) == 2

    assert capsys.readouterr().err.count("\n") == 1
