"""What a terminal cannot show, for want of letters or of width, is shown as near as may be."""

import io
import sys

import pytest
from rich.console import Console
from rich.text import Text

from memadvisor.cli.printing import LEAST_WIDTH, PLAIN_WIDTH, Labelled, print_plainly, stdout_console


class Terminal(io.TextIOWrapper):
    def isatty(self):
        return True


@pytest.fixture
def stdout(monkeypatch):
    def make(kind, encoding):
        written = io.BytesIO()
        monkeypatch.setattr(sys, "stdout", kind(written, encoding=encoding))
        return written

    return make


def test_bars_are_of_hashes_where_the_encoding_has_no_blocks(stdout):
    written = stdout(io.TextIOWrapper, "ascii")
    print_plainly("parameter ███▋ 数 layers[/0]", stdout_console())
    sys.stdout.flush()

    assert written.getvalue() == b"parameter #### ? layers[/0]\n"


@pytest.mark.parametrize(("columns", "width"), [("20", LEAST_WIDTH), ("90", 90)])
def test_a_narrow_terminal_breaks_lines_itself(stdout, monkeypatch, columns, width):
    """Tables that are made to fit twenty columns lose all that is in them."""
    monkeypatch.setenv("COLUMNS", columns)
    stdout(Terminal, "utf-8")

    assert stdout_console().width == width


def test_a_file_gets_one_width_whatever_the_terminal(stdout, monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    stdout(io.TextIOWrapper, "utf-8")

    assert stdout_console().width == PLAIN_WIDTH


@pytest.mark.parametrize("width", [30, 80])
def test_lines_beside_a_label_stand_beneath_each_other(width):
    written = io.StringIO()
    text = "activation 193 MiB, optimizer state 37.7 MiB, parameter 18.8 MiB, temporary 10.0 MiB"
    print_plainly(Labelled("peak", Text(text)), Console(file=written, width=width))
    first, *further = written.getvalue().splitlines()

    assert first.startswith("peak         activation")
    assert further and all(line[:13] == " " * 13 and line[13] != " " for line in further)
    assert all(len(line) <= width for line in (first, *further))
    assert " ".join(line[13:] for line in (first, *further)) == text


def test_a_number_stays_beside_its_unit():
    """A closing summary ended in "unexplained 0", and "B" on a line of its own."""
    text = "peak 25.3 MiB in backward, step 12 ms, 3 us a call, 7 B left of 8 samples; 5.25 k tokens/s, 7 samples/s"
    for width in range(30, 90):
        written = io.StringIO()
        print_plainly(Labelled("peak", Text(text)), Console(file=written, width=width))
        lines = [line[13:] for line in written.getvalue().splitlines()]

        assert " ".join(lines) == text
        assert not any(
            line.startswith(("MiB", "ms", "us", "B ", "k ", "tokens/s", "samples/s")) for line in lines
        )


@pytest.mark.parametrize("width", range(24, 60))
def test_no_line_of_words_ends_between_a_number_and_its_unit(stdout, monkeypatch, width):
    written = stdout(io.TextIOWrapper, "utf-8")
    monkeypatch.setattr("memadvisor.cli.printing.PLAIN_WIDTH", width)
    words = "it takes 174 ms more a step, needs 328 KiB more, 34.1 % of it is activations, 4.35 k tokens/s"
    stdout_console().print(Text(words, style="bold"))
    sys.stdout.flush()

    lines = written.getvalue().decode().splitlines()
    assert " ".join(lines) == words
    assert not any(line[-1].isdigit() for line in lines)


def test_what_is_to_be_copied_stays_on_one_line(stdout):
    written = stdout(io.TextIOWrapper, "utf-8")
    command = "  memadvisor advise " + "x" * 200 + " --memory 24GiB"
    stdout_console().print(Text(command), soft_wrap=True)
    sys.stdout.flush()

    assert written.getvalue().decode() == command + "\n"
