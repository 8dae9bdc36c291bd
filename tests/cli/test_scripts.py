"""Public training scripts come in many kinds; each runs profiled as it does plain, and is seen."""

import importlib.util
import os
import re
import shutil
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from memadvisor.run.store import load_run
from tests.torch_exit import ABORTED, TIMES
from tests.warm_python import warm_python

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "tests" / "scripts" / "kinds"
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port")
# --multi_gpu is its word for several processes of one machine: with --cpu it starts a single one.
ACCELERATE = (
    "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1",
    "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port",
)  # fmt: skip
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "COLUMNS": "100"}
# Of what torch.compile keeps, C++ alone: each process makes its own graphs and code.
COMPILES = {"TORCHINDUCTOR_FX_GRAPH_CACHE": "0", "TORCHINDUCTOR_AUTOGRAD_CACHE": "0"}
for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
    ENVIRONMENT.pop(name, None)


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A script, and what its run must hold."""

    words: tuple[str, ...]
    code: int = 0
    num_steps: int = 5  # of each rank
    num_ranks: int = 1
    typed: str = ""
    launcher: tuple[str, ...] = ()  # of two ranks; its last word wants a port
    ended: bool = True  # it comes to its end in Python, so that the run says how
    traced: bool = True
    note: str | None = None  # part of what the run must say
    needs: str | None = None  # a package, or a program, that is not among the tests' own
    is_warm: bool = False  # profiled by a warm interpreter; the other kinds show what one of its own does
    in_turn: bool = False  # so the profiled script finds the C++ that the plain one has built


KINDS = {
    "settings": Kind(words=("settings.py", "--out", "x", "--nproc", "7", "--trace-step", "y", "-m", "z"), typed="typed"),
    "ends badly": Kind(words=("ends_badly.py",), code=5),
    "signals": Kind(words=("signals.py",), code=-15, num_steps=8, ended=False, is_warm=True),
    "a thread, mixed precision, accumulation": Kind(words=("mixed_precision.py",)),
    "closures": Kind(words=("closures.py",), num_steps=4, is_warm=True),
    "executes itself": Kind(words=("executes_itself.py", "a b")),
    "written by hand": Kind(words=("hand_written.py",), num_steps=7, note="each backward pass counts as one step", is_warm=True),
    "inference": Kind(words=("inference.py",), num_steps=0, traced=False, note="a model was called, with no backward pass", is_warm=True),
    "its own profiler, compiled": Kind(words=("own_profiler.py",), num_steps=9),
    "compiled into C++": Kind(words=("inductor.py",), needs="g++", in_turn=True),
    "fork": Kind(words=("workers.py", "fork"), num_steps=3, is_warm=True),
    "spawn": Kind(words=("workers.py", "spawn"), num_steps=3, is_warm=True),
    "forkserver": Kind(words=("workers.py", "forkserver"), num_steps=3, is_warm=True),
    "Hogwild": Kind(words=("hogwild.py",), num_steps=0, traced=False, note="processes that it started took"),
    "data parallel": Kind(words=("ranks.py", "replicas"), launcher=TORCHRUN, num_ranks=2, is_warm=True),
    "fully sharded": Kind(words=("ranks.py", "shards"), launcher=TORCHRUN, num_ranks=2, is_warm=True),
    "spawned ranks": Kind(words=("spawns_ranks.py",), num_ranks=2),
    "a spawned rank that fails": Kind(words=("spawns_ranks.py", "fail"), code=3, num_ranks=2, ended=False, is_warm=True),
    "pipeline": Kind(words=("ranks.py", "pipeline"), launcher=TORCHRUN, num_ranks=2, is_warm=True),
    "transformers": Kind(words=("hugging_face.py",), num_steps=4, needs="transformers"),
    "accelerate": Kind(words=("accelerated.py",), num_steps=4, needs="accelerate"),
    "accelerate launch": Kind(words=("accelerated.py",), launcher=ACCELERATE, num_steps=4, num_ranks=2, needs="accelerate"),
    "lightning": Kind(words=("lit.py",), num_steps=4, needs="lightning"),
    "lightning launches ranks": Kind(words=("lit.py", "ddp"), num_steps=4, num_ranks=2, needs="lightning"),
    "lightning spawns ranks": Kind(words=("lit.py", "ddp_spawn"), num_steps=4, num_ranks=2, needs="lightning"),
    "lightning forks ranks": Kind(words=("lit.py", "ddp_fork"), num_steps=4, num_ranks=2, needs="lightning"),
}  # fmt: skip


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def start(kind, place, profiled_into=None):
    """The script in an empty working directory of its own, plain or profiled into a relative directory."""
    script = [str(SCRIPTS / kind.words[0]), *kind.words[1:]]
    ours = ["-m", "memadvisor", "profile", "--out", profiled_into] if profiled_into else []
    launcher = [*kind.launcher, free_port()] if kind.launcher else []
    # A warm interpreter's traceback has frames of its own, and to a compiler it would be another Python.
    is_plain = profiled_into is None and (kind.code <= 0 or kind.is_warm) and kind.needs is None
    is_warm = is_plain or kind.is_warm
    place.mkdir(parents=True)
    return subprocess.Popen(
        [warm_python() if is_warm else sys.executable, *launcher, *ours, *script],
        cwd=place,
        env={**ENVIRONMENT, **COMPILES, "TORCHINDUCTOR_CACHE_DIR": str(place.parent / "compiled")},
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def run_both(kind, tmp_path):
    """[(exit code, stdout, stderr)] without the tool and with it; most run at the same time."""

    def ended(process):
        texts = process.communicate(kind.typed, timeout=150)
        return process.returncode, *texts

    plain = start(kind, tmp_path / "plain")
    first = [ended(plain)] if kind.in_turn else []
    profiled = start(kind, tmp_path / "profiled", "the run")
    return [*(first or [ended(plain)]), ended(profiled)]


def files_below(place):
    """{name: content} of what the script has written."""
    found = (path for path in place.rglob("*") if path.is_file() and "the run" not in path.parts)
    return {str(path.relative_to(place)): path.read_bytes() for path in found}


def is_within(text, longer):
    """Whether all the lines stand in the longer text, in the same order; addresses and times differ anyhow."""
    lines, rest = (re.sub("0x[0-9a-f]+|[0-9]+", "0", each).splitlines() for each in (text, longer))
    remaining = iter(rest)
    return all(line in remaining for line in lines)


def _is_there(name: str) -> bool:
    return shutil.which(name) is not None if name == "g++" else importlib.util.find_spec(name) is not None


@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", KINDS)
def test_a_script_of_this_kind_runs_as_without_the_tool_and_is_seen(name, tmp_path):
    """Same exit code, stdout, files and words on stderr; every step, every rank and one traced step's peak."""
    kind = KINDS[name]
    if kind.needs is not None and not _is_there(kind.needs):
        pytest.skip(f"{kind.needs} is not installed")
    for attempt in range(TIMES):
        place = tmp_path / str(attempt)
        plain, ours = run_both(kind, place)
        if kind.num_ranks == 1 or ABORTED not in plain[2] + ours[2]:
            break
    tmp_path = place
    run = load_run(tmp_path / "profiled" / "the run")

    assert ours[:2] == plain[:2], ours[2]
    assert ours[0] == kind.code, ours[2]
    assert files_below(tmp_path / "profiled") == files_below(tmp_path / "plain")
    if kind.num_ranks == 1:  # ranks speak in any order, and torchrun's and Lightning's ends are races
        assert is_within(plain[2], ours[2]), ours[2]
    assert ours[2].count("Traceback") == plain[2].count("Traceback")
    assert "stopped recording" not in ours[2]
    assert run.problems == ()
    assert run.missing_ranks == ()
    assert [rank.process.rank for rank in run.ranks] == list(range(kind.num_ranks))
    if kind.words[0] == "workers.py":  # worker processes find the script's classes, and write no journal
        assert len(list((tmp_path / "profiled" / "the run").glob("*.journal"))) == 1
    for rank in run.ranks:
        assert len(rank.steps) == kind.num_steps, rank.notes
        assert (rank.ending is not None) == kind.ended or kind.code == 3
        assert (
            rank.traced_step is not None and rank.traced_step.peak_allocated_bytes is not None
        ) == kind.traced
        assert kind.note is None or any(kind.note in note.text for note in rank.notes), rank.notes
