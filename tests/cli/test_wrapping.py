"""`memadvisor profile script.py` is to the script, and to whoever started it, as `python script.py`."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from memadvisor.plan import Plan, UnitPlan
from memadvisor.plan_file import save_plan
from memadvisor.run.process import is_there
from memadvisor.run.store import load_run
from tests.torch_exit import completed
from tests.warm_python import warm_python

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "tests" / "scripts"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "COLUMNS": "100"}
for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
    ENVIRONMENT.pop(name, None)


def profiled(out, *options, python=sys.executable):
    return [python, "-m", "memadvisor", "profile", "--out", str(out), *options]


def cold_python():
    return sys.executable


def heed_interrupts():
    """Whoever starts the tests in the background has them, and all that they start, ignore SIGINT, or SIGHUP."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def start(command, words, *, cwd=SCRIPTS):
    return subprocess.Popen(
        [*command, *words],
        cwd=cwd,
        env=ENVIRONMENT,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=heed_interrupts,
    )


def run_both(out, *words, text="", cwd=SCRIPTS, plain=sys.executable, ours=sys.executable):
    """(exit code, stdout, stderr) without the tool and with it; both run at the same time."""
    both = [start(command, words, cwd=cwd) for command in ([plain], profiled(out, python=ours))]
    ended = [process.communicate(text, timeout=120) for process in both]
    return [(process.returncode, *texts) for process, texts in zip(both, ended, strict=True)]


@pytest.fixture
def out(tmp_path):
    return tmp_path / "run"


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """tiny.py with one of its endings, without the tool and with it, and the run directory; once each."""
    results = {}

    def run(ending):
        if ending not in results:
            directory = tmp_path_factory.mktemp(ending) / "run"
            ours = sys.executable if ending in OF_COLD_INTERPRETERS else warm_python()
            both = run_both(directory, "tiny.py", ending, plain=warm_python(), ours=ours)
            results[ending] = (*both, directory)
        return results[ending]

    return run


ENDINGS = {
    "none": (0, 0, None),
    "raise": (1, 1, "ValueError"),
    "exit": (3, 3, None),
    "exit-text": (1, 1, None),
    "interrupt": (-signal.SIGINT, 130, "KeyboardInterrupt"),
    "handled": (143, 143, None),  # SIGHUP and SIGTERM, by handlers of the script's own
}
# One of each sort: by itself, by an exception, by a signal. A warm interpreter's traceback has frames of its own.
OF_COLD_INTERPRETERS = ("none", "raise", "interrupt", "terminate")


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_script_ends_as_it_does_without_the_tool(ended, ending):
    """Same stdout, same exit code, and the run says how it ended."""
    code, recorded_code, exception = ENDINGS[ending]
    plain, ours, out = ended(ending)
    run = load_run(out)
    [rank] = run.ranks

    assert ours[:2] == plain[:2]
    assert ours[0] == code
    assert (rank.ending.exit_code, rank.ending.exception) == (recorded_code, exception)
    assert len(rank.steps) == plain[1].count("step ") == (10 if ending == "none" else 6)
    assert rank.traced_step.index == 2
    assert run.problems == ()


def test_an_exceptions_traceback_is_the_scripts(ended):
    """First our frames are gone, then every line of the script's is there, and the message comes last."""
    plain, ours, _ = ended("raise")
    frames = [line for line in plain[2].splitlines() if "tiny.py" in line]
    theirs = [line for line in ours[2].splitlines() if '/tiny.py", line' in line or 'File "tiny.py"' in line]

    assert [Path(re.search('"(.*)"', line).group(1)).name for line in theirs] == ["tiny.py"] * len(frames)
    assert [line.rpartition(",")[2] for line in theirs] == [line.rpartition(",")[2] for line in frames]
    assert (
        ours[2].splitlines()[-2:] == plain[2].splitlines()[-2:] == ["ValueError: the loss is", "not a number"]
    )
    assert "memadvisor/" not in ours[2] and "runpy" not in ours[2]


def test_the_words_of_an_exit_stay_on_stderr(ended):
    plain, ours, _ = ended("exit-text")

    assert plain[2] == "gave up\n"
    assert ours[2].endswith("gave up\n")


KILLED = {"kill": -signal.SIGKILL, "terminate": -signal.SIGTERM, "os-exit": 4}


@pytest.mark.parametrize("ending", KILLED)
def test_after_a_death_in_mid_step_the_run_is_readable_up_to_the_last_flush(ended, ending):
    """Steps are flushed at least every 250 ms, and a traced one at once: with 50 ms a step at most 5 are lost."""
    plain, ours, out = ended(ending)
    run = load_run(out)
    [rank] = run.ranks

    assert ours[:2] == plain[:2]
    assert ours[0] == KILLED[ending]
    assert 3 <= len(rank.steps) <= 6
    assert [step.index for step in rank.steps] == list(range(len(rank.steps)))
    assert rank.traced_step.index == 2
    assert rank.storages and rank.operators
    assert run.problems == ()
    assert (rank.ending, rank.is_alive) == (None, False)  # no handler of ours: nobody was left to say more


@pytest.mark.parametrize(("number", "python"), [(signal.SIGTERM, cold_python), (signal.SIGHUP, warm_python)])
def test_a_signal_from_outside_ends_the_script_and_costs_the_step_under_way_alone(out, number, python):
    """Sent to the process that was started, as a scheduler does it; steps as long as these are written one by one."""
    process = start(profiled(out, python=python()), ["ticking.py", "100", "0.3"])
    for line in process.stdout:
        if line.startswith("step 4"):
            break
    process.send_signal(number)
    process.communicate(timeout=60)
    run = load_run(out)

    assert process.returncode == -number
    assert len(run.ranks[0].steps) >= 5
    assert (run.ranks[0].ending, run.ranks[0].is_alive, run.problems) == (None, False, ())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_the_launcher_reaches_its_ranks(out, tmp_path, number):
    """None is left behind, and the code is that of a shell."""
    (tmp_path / "waits.py").write_text(
        "import os, time\nos.write(1, b'%d\\n' % os.getpid())\ntime.sleep(60)\n"
    )
    process = start(profiled(out, "--nproc", "2"), ["waits.py"], cwd=tmp_path)
    ranks = [int(process.stdout.readline()) for _ in range(2)]
    process.send_signal(number)
    process.communicate(timeout=60)

    assert process.returncode == 128 + number
    for rank in ranks:
        with pytest.raises(ProcessLookupError):
            os.kill(rank, 0)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's signal for it is Linux's")
def test_ranks_end_with_a_launcher_that_is_killed(out, tmp_path):
    """Nobody else would end them. What their scripts have forked is the scripts' own, and so is what they do on SIGTERM."""
    (tmp_path / "waits.py").write_text(
        "import os, signal, sys, time\n"
        "def heed(number, frame):\n"
        "    os.write(1, b'told %d\\n' % number)\n"
        "    sys.exit(3)\n"
        "if os.environ['RANK'] == '1':\n"
        "    signal.signal(signal.SIGTERM, heed)\n"
        "child = os.fork() if os.environ['RANK'] == '0' else 0\n"
        "os.write(1, b'%d %d\\n' % (os.getpid(), child))\n"
        "time.sleep(120)\n"
    )
    process = start(profiled(out, "--nproc", "2"), ["waits.py"], cwd=tmp_path)
    lines = [process.stdout.readline().split() for _ in range(3)]  # the forked one's own is among them
    (child,) = {int(forked) for _, forked in lines} - {0}
    ranks = {int(number) for number, _ in lines} - {child}
    process.kill()
    process.wait()
    try:
        assert process.stdout.readline() == f"told {int(signal.SIGTERM)}\n"
        deadline_s = time.monotonic() + 60
        while any(is_there(rank) for rank in ranks):
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
        assert is_there(child)
    finally:
        os.kill(child, signal.SIGKILL)
        process.communicate(timeout=60)


def test_a_script_that_closes_all_descriptors_trains_on(out):
    plain, ours = run_both(out, "tiny.py", "close-descriptors", plain=warm_python(), ours=warm_python())

    assert ours[:2] == plain[:2]
    assert ours[0] == 0
    assert "memadvisor stopped recording" in ours[2]
    assert len(load_run(out).ranks[0].steps) >= 3


def test_a_script_sees_the_same_world(out):
    """argv, __main__, pickling, sources, first path, working directory, its own `analyzers` and `tui`, stdin."""
    plain, ours = run_both(out, "world.py", "--out", "theirs", "-m", "--", "x y", text="typed in")

    assert ours[1].replace(f"{SCRIPTS}/world.py", "world.py") == plain[1].replace(
        f"{SCRIPTS}/world.py", "world.py"
    )
    assert ours[0] == plain[0] == 0
    assert "theirs the script's own the script's own" in plain[1]
    assert "words on stderr" in ours[2]


def test_a_script_elsewhere_finds_its_siblings_and_keeps_the_working_directory(out, tmp_path):
    plain, ours = run_both(out, str(SCRIPTS / "world.py"), cwd=tmp_path)

    assert ours[:2] == plain[:2]
    assert str(tmp_path) in plain[1]


def test_a_module_runs_as_with_python_m(out):
    plain, ours = run_both(out, "-m", "package.train", "--epochs", "3")

    assert ours[:2] == plain[:2]
    assert ours[0] == 0
    assert "argv ['train.py', '--epochs', '3']" in ours[1]


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("found.py", "Try using 'found' instead of 'found.py'"),
        ("os.nope", "for 'os.nope'"),
        ("folder", "'folder' is a package and cannot be directly executed"),
    ],
)
def test_a_module_that_cannot_be_run_is_the_one_line_of_python_m(out, tmp_path, module, text):
    """Of the same code; `python -m found.py` has run found.py by then, and so have we."""
    (tmp_path / "found.py").write_text("print('imported')\n")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "__init__.py").write_text("")
    # The executable's name begins the line.
    plain, ours = run_both(out, "-m", module, cwd=tmp_path)
    line = plain[2].strip()

    assert plain[0] == 1
    assert ours[:2] == plain[:2]
    assert text in line and "\n" not in line
    assert ours[2].splitlines()[-1].partition(": ")[2] == line.partition(": ")[2]
    assert "Traceback" not in ours[2]


def test_an_import_error_of_the_modules_own_keeps_its_traceback(out, tmp_path):
    (tmp_path / "inner.py").write_text("import runpy\nrunpy.run_module('os.nope')\n")
    plain, ours = run_both(out, "-m", "inner", cwd=tmp_path)

    assert ours[:2] == plain[:2]
    assert "inner.py" in ours[2] and ours[2].splitlines()[-1] == plain[2].splitlines()[-1]


def test_two_ranks_and_the_code_of_the_one_that_fails(out, tmp_path):
    """The first failure ends the launch with its code, and every rank's journal is there."""
    script = tmp_path / "ranks.py"
    script.write_text(
        "import os, sys, time, torch\n"
        "m = torch.nn.Linear(2, 1); o = torch.optim.SGD(m.parameters(), lr=0.1)\n"
        "for _ in range(4):\n"
        "    m(torch.ones(1, 2)).sum().backward(); o.step(); o.zero_grad()\n"
        "if os.environ['RANK'] == '1':\n"
        "    time.sleep(0.5); sys.exit(7)\n"
    )
    done = completed(
        [*profiled(out, "--nproc", "2", python=warm_python()), str(script)], env=ENVIRONMENT, timeout=120
    )
    run = load_run(out)

    assert done.returncode == 7, done.stderr
    assert [rank.process.rank for rank in run.ranks] == [0, 1]
    assert run.ranks[1].ending.exit_code == 7
    assert run.missing_ranks == ()


def test_a_script_reached_by_a_link_whose_names_hold_spaces_and_letters_of_all_kinds(tmp_path):
    """Its siblings are those of the file that the link leads to; its own name is the link's."""
    real = tmp_path / "dir \u00fc" / "real"
    real.mkdir(parents=True)
    (real / "sibling.py").write_text("STEPS = 4\n")
    (real / "tr\u00e4in it.py").write_text(
        "import sys, sibling, torch\n"
        "print(sys.argv, __file__, sys.path[0])\n"
        "m = torch.nn.Linear(2, 1); o = torch.optim.SGD(m.parameters(), lr=0.1)\n"
        "for _ in range(sibling.STEPS):\n"
        "    m(torch.ones(1, 2)).sum().backward(); o.step(); o.zero_grad()\n"
    )
    (tmp_path / "link \u00e9.py").symlink_to(real / "tr\u00e4in it.py")
    plain, ours = run_both("out dir", "link \u00e9.py", "a b", "\u00fc", cwd=tmp_path, plain=warm_python())
    run = load_run(tmp_path / "out dir")

    assert ours[:2] == plain[:2], ours[2]
    assert plain[0] == 0
    assert (run.manifest.script, run.manifest.arguments) == ("link \u00e9.py", ("a b", "\u00fc"))
    assert len(run.ranks[0].steps) == 4


def test_under_torchrun_every_rank_writes_into_one_run(out):
    torchrun = [warm_python(), "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    words = ["-m", "memadvisor", "profile", "--out", str(out), str(SCRIPTS / "tiny.py"), "none"]
    done = completed([*torchrun, *words], cwd=SCRIPTS, env=ENVIRONMENT, timeout=120)

    assert done.returncode == 0, done.stderr
    assert done.stdout.count("step 9 loss") == 2
    assert [rank.process.rank for rank in load_run(out).ranks] == [0, 1]
    assert done.stderr.count("memadvisor tui") == 1


def one_line_and_code_2(words, *, cwd, wanted, python=sys.executable):
    done = subprocess.run(
        [python, "-m", "memadvisor", *map(str, words)],
        cwd=cwd,
        env=ENVIRONMENT,
        text=True,
        capture_output=True,
        timeout=120,
    )
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert done.stderr.startswith("memadvisor")
    assert wanted in done.stderr


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("profile --out run missing.py", "missing.py"),
        ("profile --out run .", "directory"),
        ("profile --out run", "No script"),
        ("profile --out run -m", "No script"),
        ("profile --out full script.py", "not empty"),
        ("profile --out script.py script.py", "script.py"),
        ("profile --out script.py/run script.py", "script.py"),
        ("profile --nproc 0 script.py", "--nproc"),
        ("profile --trace-step x script.py", "--trace-step"),
        ("profile --unknown script.py", "--unknown"),
        ("show missing", "does not exist"),
        ("show full", "is not a run"),
        ("show script.py", "not a directory"),
        ("report missing", "does not exist"),
        ("tui missing", "does not exist"),
        ("advise full --memory 1GiB", "is not a run"),
        ("run script.py", "no plan"),
        ("run --plan missing.json script.py", "missing.json"),
        ("run --plan script.py script.py", "not JSON"),
        ("run --zero 4 script.py", "--zero"),
        ("run --zero 1 missing.py", "missing.py"),
        ("nonsense", "nonsense"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_begun(tmp_path, words, wanted):
    (tmp_path / "script.py").write_text("print('never runs')\n")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("x")
    before = sorted(tmp_path.rglob("*"))

    one_line_and_code_2(words.split(), cwd=tmp_path, wanted=wanted)

    assert sorted(tmp_path.rglob("*")) == before


def test_a_plan_for_another_model_is_one_line_before_the_first_step(tmp_path, out):
    plan = Plan(
        fingerprint="0" * 16,
        num_ranks=1,
        zero_stage=0,
        policy="chosen",
        units=(UnitPlan(name="blocks.0", zero_stage=0, recompute=True),),
    )
    save_plan(plan, tmp_path / "plan.json")
    words = ["run", "--plan", tmp_path / "plan.json", "--out", out, SCRIPTS / "tiny.py", "none"]

    one_line_and_code_2(words, cwd=tmp_path, wanted="another model", python=warm_python())

    assert not out.exists()


@pytest.fixture
def recorded(ended):
    return ended("none")[2]


def test_a_size_that_is_none_is_one_line(recorded, tmp_path):
    words = ["advise", recorded, "--memory", "10GBB", "-o", "plan.json"]
    one_line_and_code_2(words, cwd=tmp_path, wanted="'10GBB' is not a size")

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["show", "report", "advise --memory 1GiB"])
def test_a_run_of_which_no_rank_is_readable_is_one_line(recorded, tmp_path, command):
    damaged = tmp_path / "run"
    shutil.copytree(recorded, damaged)
    for journal in damaged.glob("*.journal"):
        journal.write_bytes(journal.read_bytes()[:50])
    verb, *options = command.split()

    one_line_and_code_2([verb, damaged, *options], cwd=tmp_path, wanted="no readable rank")

    assert list(tmp_path.iterdir()) == [damaged]


@pytest.mark.parametrize("command", ["show", "show --json", "report -o page.html"])
def test_a_truncated_run_is_shown_for_what_it_holds(recorded, tmp_path, command):
    truncated = tmp_path / "run"
    shutil.copytree(recorded, truncated)
    for journal in truncated.glob("*.journal"):
        whole = journal.read_bytes()
        journal.write_bytes(whole[: 3 * len(whole) // 4])
    verb, *options = command.split()
    done = subprocess.run(
        [sys.executable, "-m", "memadvisor", verb, str(truncated), *options],
        cwd=tmp_path,
        env=ENVIRONMENT,
        text=True,
        capture_output=True,
        timeout=120,
    )

    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_an_unwritable_out_is_one_line(tmp_path):
    (tmp_path / "script.py").write_text("")
    tmp_path.chmod(0o500)
    one_line_and_code_2(["profile", "--out", "run", "script.py"], cwd=tmp_path, wanted="--out")


def test_an_out_on_a_file_system_that_takes_nothing_is_one_line(tmp_path):
    """For root too: /proc is no place for a directory."""
    (tmp_path / "script.py").write_text("print('never runs')\n")

    one_line_and_code_2(["profile", "--out", "/proc/run", "script.py"], cwd=tmp_path, wanted="/proc/run")


def test_a_usage_error_needs_no_torch_and_no_views_package(tmp_path):
    command = [sys.executable, "-X", "importtime", "-m", "memadvisor", "profile", "missing.py"]
    done = subprocess.run(command, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=60)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if "|" in line}

    assert done.returncode == 2 and "argparse" in imported
    assert not imported & {"torch", "numpy", "scipy", "pandas", "plotly", "textual"}
