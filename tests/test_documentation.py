"""README.md and docs/ say what the code of today does: its options, its commands, its keys of JSON and its tables."""

import argparse
import contextlib
import dataclasses
import io
import json
import re
import shlex
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest
import torch

from memadvisor.analyzers.analysis import analysis_to_json, analyze
from memadvisor.analyzers.checkpointing import Checkpointing
from memadvisor.analyzers.run_difference import run_difference
from memadvisor.capture.script import split_command
from memadvisor.cli.diff_json import difference_to_json
from memadvisor.cli.main import COMMANDS
from memadvisor.run.journal import table_columns
from memadvisor.run.records import TABLES
from tests.analyzers.test_comparison import PLAN
from tests.analyzers.test_utilization import HARDWARE
from tests.make_checkpointing import checkpointed
from tests.make_run import make_run
from tests.report.test_script_changes import CHANGE
from tests.tui.test_endings import OUT_OF_MEMORY

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = {
    path.name: path.read_text(encoding="utf-8")
    for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
}
_OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
_WORD = re.compile(r"[a-z][a-z0-9_]+")
_OF_PYTEST = {"--dist"}
# Maps whose keys are the program's own: operators, modules.
_OPEN = ("by_operator_bytes", "still_kept_bytes")


@cache
def parser_of(command):
    parser = argparse.ArgumentParser(prog=command, allow_abbrev=False)
    import_module(f"memadvisor.cli.{command}").configure(parser)
    return parser


def options_of(command):
    """Each by all of its names; not those that only processes of ours are given."""
    return [
        action.option_strings
        for action in parser_of(command)._actions
        if action.option_strings
        and action.help != argparse.SUPPRESS
        and "--help" not in action.option_strings
    ]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_of_a_command_is_documented(command):
    written = {option for page in PAGES.values() for option in _OPTION.findall(page)}
    rows = [line for line in README.splitlines() if line.startswith("| `")]
    missing = [names for names in options_of(command) if not {*names} & written and "-o" not in names]

    assert missing == []
    assert any(re.match(rf"\| `{command}\b", row) for row in rows)


def test_every_option_that_the_readme_names_is_one():
    known = {name for command in COMMANDS for names in options_of(command) for name in names}

    assert {*_OPTION.findall(README)} - known - _OF_PYTEST == set()


@pytest.mark.parametrize("command", COMMANDS)
def test_the_readmes_row_of_a_command_names_options_of_that_command(command):
    rows = [line for line in README.splitlines() if re.match(rf"\| `{command} ", line)]
    known = {name for names in options_of(command) for name in names}

    for line in rows:
        assert {*_OPTION.findall(line)} <= known | {"--optimizer-bits"}


def commands_in(page):
    """Lines of code that begin with `memadvisor COMMAND`, each with what it is continued by."""
    blocks = re.findall(r"^```sh\n(.*?)^```", page, flags=re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    lines += [line[4:] for line in page.splitlines() if line.startswith("    memadvisor ")]
    found = [part.strip() for line in lines for part in line.split("&&")]
    return [line for line in found if re.match(r"memadvisor [a-z]+ ", line)]


LINES = [(name, line) for name, page in sorted(PAGES.items()) for line in commands_in(page)]


def test_there_are_commands_to_be_held_against_the_code():
    assert len(LINES) > 20


@pytest.mark.parametrize(("name", "line"), LINES)
def test_every_command_line_that_is_shown_can_be_parsed(name, line):
    words = [word for word in shlex.split(line, comments=True)[1:] if word != "..."]
    if getattr(import_module(f"memadvisor.cli.{words[0]}"), "TAKES_SCRIPT", False):
        words, target = split_command(words)
        assert target is not None
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        try:
            _, strange = parser_of(words[0]).parse_known_args(words[1:])
        except SystemExit:
            pytest.fail(f"{name}: {line}: {said.getvalue()}")

    assert strange == []


def test_the_python_that_the_readme_shows_runs(tmp_path, monkeypatch):
    [program] = re.findall(r"^```python\n(.*?)^```", README, flags=re.DOTALL | re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train():
        for _ in range(4):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    said = io.StringIO()
    names = {"train": train, "model": model, "optimizer": optimizer}
    with contextlib.redirect_stdout(said):
        exec(compile(program, "README.md", "exec"), names)

    assert said.getvalue().strip() == str(names["prof"].directory)
    assert names["advice"].plans[0].fits


def keys_of(value):
    """All names of fields, however deep."""
    if isinstance(value, list):
        return {key for each in value for key in keys_of(each)}
    if not isinstance(value, dict):
        return set()
    inner = (keys_of(each) for name, each in value.items() if name not in _OPEN)
    return {*value, *(key for keys in inner for key in keys)}


def part_of_json_page(command):
    page = PAGES["json.md"]
    start = page.index(f"# JSON of `memadvisor {command}")
    end = page.find("\n# JSON of", start)
    return page[start : end if end > 0 else len(page)]


def words_of(text):
    """Those that are written as code."""
    return set(_WORD.findall(" ".join(re.findall(r"`([^`]*)`", text))))


@cache
def shown():
    """Keys of runs that between them have a plan, a rank without an ending, memory that ran out, modules to checkpoint, and a
    script to change."""
    run = make_run(num_ranks=1, exit_code=None)
    rank = dataclasses.replace(run.ranks[0], out_of_memory=(OUT_OF_MEMORY,))
    analysis = analyze(dataclasses.replace(run, ranks=(rank,)))
    modules = Checkpointing(peak_bytes=9, rows=(checkpointed("blocks.0", 1),), num_left_out=0)
    analysis = dataclasses.replace(
        analysis,
        ranks=(dataclasses.replace(analysis.ranks[0], checkpointing=modules, script_changes=(CHANGE,)),),
    )
    analyses = [analyze(make_run(plan=PLAN), HARDWARE), analysis]
    return keys_of([json.loads(json.dumps(analysis_to_json(each))) for each in analyses])


def test_every_key_of_show_is_documented():
    assert shown() - words_of(part_of_json_page("show RUN")) == set()


def test_every_key_that_stands_first_in_a_table_of_show_is_one():
    rows = [line for line in part_of_json_page("show RUN").splitlines() if line.startswith("| `")]
    first = {word.split(".")[-1] for row in rows for word in re.findall(r"`([a-z_.]+)`", row.split("|")[1])}

    assert len(first) > 60
    assert first - shown() == set()


def test_every_key_of_diff_is_documented():
    value = difference_to_json(run_difference(analyze(make_run(plan=PLAN)), analyze(make_run())))
    documented = words_of(part_of_json_page("diff RUN RUN")) | words_of(part_of_json_page("show RUN"))

    assert keys_of(json.loads(json.dumps(value))) - documented == set()


def test_every_table_of_a_run_is_documented_and_every_column_that_is_named_is_one():
    page = PAGES["run-format.md"]
    rows = page.partition("| tables | of what |")[2].partition("These columns")[0]
    listed = "\n".join(row.partition("|")[2].partition("|")[0] for row in rows.splitlines())
    columns = re.findall(r"`([a-z_]+)\.([a-z_]+)`", page)

    assert {*re.findall(r"`([a-z_]+)`", listed)} == {*TABLES}
    for table, column in columns:
        if table in TABLES:
            assert column in {name for name, _ in table_columns(TABLES[table])}
