"""The runs that regret.py compares: `memadvisor run` of one plan each, stopped but for its turns."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import memadvisor
from memadvisor.analyzers.analysis import analyze
from memadvisor.errors import MemadvisorError

SCRIPT = Path(__file__).resolve().parents[1] / "samples" / "train_gpt.py"
RANKS = 2
_WARM_STEPS = 3  # after the traced one


class Running:
    """One plan's `memadvisor run`, a process group of its own, that is stopped but for its turns."""

    def __init__(self, out, name, space):
        self.name, self.directory = name, out / "runs" / name
        if self.directory.exists():
            shutil.rmtree(self.directory)
        self.directory.parent.mkdir(exist_ok=True)
        plan = space["plans"][name]
        shape = [*space["shape"], "--steps", "1000000"]
        self.command = [
            *("run", "--plan", str(out / "plans" / f"{name}.json"), "--nproc", str(RANKS)),
            *("--out", str(self.directory), str(SCRIPT), *shape),
            *("--micro-batch", str(plan["micro_batch"]), "--accum", str(plan["accum"])),
        ]
        self.log = out / "log.txt"
        self.process = None
        self.turns = []  # when each began and ended, and what CPU seconds its processes took

    def start(self):
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "memadvisor", *self.command],
                env=environment(),
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def stop_when_warm(self):
        """Whether some steps after the traced one are over; then it stands still."""
        if self.process.poll() is not None:
            sys.exit(f"regret.py: {self.name} did not train; see {self.log}")
        if is_warm := self._is_warm():
            os.killpg(self.process.pid, signal.SIGSTOP)
        return is_warm

    def _is_warm(self):
        with contextlib.suppress(MemadvisorError):
            ranks = memadvisor.load(self.directory).ranks
            return len(ranks) == RANKS and all(
                rank.traced_step is not None and rank.steps[-1].index > rank.traced_step.index + _WARM_STEPS
                for rank in ranks
            )
        return False

    def go_on(self, seconds):
        start_s, cpu_s = time.monotonic(), self._cpu_s()
        os.killpg(self.process.pid, signal.SIGCONT)
        time.sleep(seconds)
        os.killpg(self.process.pid, signal.SIGSTOP)
        self.turns.append((start_s, time.monotonic(), self._cpu_s() - cpu_s))

    def _cpu_s(self):
        """Of the launcher and its ranks, since they began."""
        ticks = 0
        for path in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                fields = path.read_text().rpartition(")")[2].split()
                if int(fields[2]) == self.process.pid:  # the process group
                    ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def end(self):
        if self.process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGCONT)
            time.sleep(0.5)  # the journal has its last steps then
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def rows(self):
        run = memadvisor.load(self.directory)
        peak_bytes = max(rank.peak.allocated_bytes for rank in analyze(run).ranks)
        for turn, (start_s, end_s, cpu_s) in enumerate(self.turns):
            steps_s = [
                [s.duration_s for s in rank.steps if start_s < s.start_s and s.end_s < end_s][1:]
                for rank in run.ranks
            ]
            ended = [sum(start_s < s.end_s <= end_s for s in rank.steps) for rank in run.ranks]
            row = {"name": self.name, "round": turn, "peak_bytes": peak_bytes}
            if all(steps_s):
                step_s = max(map(median, steps_s))
                yield {**row, "step_s": step_s, "cpu_s": cpu_s / RANKS, "num_steps": sum(ended) / RANKS}


def memadvisor_command(out, *arguments):
    """What the user would type; its words go to a log."""
    with (out / "log.txt").open("a") as log:
        code = subprocess.run(
            [sys.executable, "-m", "memadvisor", *arguments], env=environment(), stdout=log, stderr=log
        ).returncode
    if code:
        sys.exit(f"regret.py: memadvisor {arguments[0]} ended with {code}; see {out / 'log.txt'}")


def environment():
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(SCRIPT.parents[1])}
