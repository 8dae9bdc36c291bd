"""How exact each account of a training step's memory is: memadvisor beside torch's own MemTracker and MemoryProfile.

For every kind of training in tests/capture/zoo (or those named), each measured in a process of its own:
the true peak of one step (torch's profiler from the first line on, every allocation and free summed); the captured
peak with its unexplained and "other" shares; the peak that `torch.distributed._tools.mem_tracker.MemTracker`
gives, or what it raises; and the peak of `torch.profiler._memory_profiler`'s MemoryProfile with the share of it
that it cannot name ("Unknown"). Peaks of others are told as errors against the true one.

    python benchmarks/exactness.py [NAME...]
"""

import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CAPTURE = ROOT / "tests" / "capture"
LIMIT_S = 120
# The traced step: the third. Of two optimizers, whose order is learnt first, the fifth and sixth calls' step.
WINDOWS = {"gan": (3, 5), "actor_critic": (3, 5)}
PEERS = ("tracker", "profile")


def main():
    if sys.argv[1:2] == ["--measure"]:
        measure(*sys.argv[2:])
        return
    sys.path[:0] = [str(ROOT), str(CAPTURE / "zoo")]
    from kinds import KINDS

    print(
        f"{'model':27}{'true peak':>11}{'ours':>9}{'unexpl.':>9}{'other':>7}  {'MemTracker':22}MemoryProfile, Unknown"
    )
    for name in sys.argv[1:] or KINDS:
        print(row_of(name), flush=True)


def row_of(name):
    first, last = WINDOWS.get(name, (1, 2))
    told, failure = call("true_peak.py", "--zoo", name)
    if failure:
        return f"{name:27}no witness: {failure}"
    true_bytes = max(json.loads(told)[name][first:last])
    peak_bytes, unexplained_bytes, other_bytes = captured(name)
    tracker, profile = (peer(kind, name) for kind in PEERS)
    if isinstance(tracker, int):
        tracker = f"{tracker / true_bytes - 1:+.3%}"
    if isinstance(profile, list):
        profile = f"{profile[0] / true_bytes - 1:+.3%}, {profile[1]:.1%}"
    return (
        f"{name:27}{true_bytes:11,}{peak_bytes / true_bytes - 1:+9.3%}{unexplained_bytes / true_bytes:9.3%}"
        f"{other_bytes / true_bytes:7.1%}  {tracker:22}{profile}"
    )


def captured(name):
    """Peak, highest unexplained bytes, and "other" bytes at the peak, by memadvisor."""
    from memadvisor.run.store import load_run

    with tempfile.TemporaryDirectory() as directory:
        _, failure = call("profile_zoo.py", directory, name)
        if failure:
            raise SystemExit(f"{name} failed under memadvisor: {failure}")
        rank = load_run(Path(directory) / name).ranks[0]
    changes = [(row.birth_s, 1, row) for row in rank.storages]
    changes += [(row.death_s, 0, row) for row in rank.storages if row.death_s is not None]
    alive_bytes = other_bytes = peak_bytes = other_at_peak_bytes = 0
    for _, is_birth, row in sorted(changes, key=lambda change: change[:2]):
        delta_bytes = row.size_bytes if is_birth else -row.size_bytes
        alive_bytes += delta_bytes
        other_bytes += delta_bytes if row.category == "other" else 0
        if alive_bytes > peak_bytes:
            peak_bytes, other_at_peak_bytes = alive_bytes, other_bytes
    unexplained_bytes = max(abs(row.unexplained_bytes) for row in rank.residuals)
    return rank.traced_step.peak_allocated_bytes, unexplained_bytes, other_at_peak_bytes


def peer(kind, name):
    told, failure = call(Path(__file__), "--measure", kind, name)
    return failure or json.loads(told)


def call(script, *words):
    """The last line on stderr, and what went wrong ("" if nothing did)."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    try:
        done = subprocess.run(
            [sys.executable, str(CAPTURE / script), *words],
            capture_output=True, text=True, timeout=LIMIT_S, env=environment, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return "", f"over {LIMIT_S} s"
    last = (done.stderr.strip().splitlines() or [""])[-1]
    if done.returncode == 0:
        return last, ""
    return "", last.partition(":")[0].rpartition(".")[2][:21] or f"exit code {done.returncode}"


def measure(kind, name):
    """In a process of its own: train, and tell what the peer says of the step on the last line of stderr."""
    sys.path.insert(0, str(CAPTURE / "zoo"))
    from kinds import train_all
    from torch.optim import Optimizer

    begin, end = {"tracker": (begin_tracker, end_tracker), "profile": (begin_profile, end_profile)}[kind]
    first, last = WINDOWS.get(name, (1, 2))
    num_steps, state, results = 0, [], []
    wrap = Optimizer.profile_hook_step

    def after_step():
        nonlocal num_steps
        if num_steps == first:
            state.append(begin())
        elif num_steps == last:
            results.append(end(state[0]))
        num_steps += 1

    def wrap_and_count(step):
        # Around the whole step: the tracker installs hooks of the optimizer's, which no hook of its own may do.
        wrapped = wrap(step)

        @functools.wraps(step)
        def counted(*args, **kwargs):
            out = wrapped(*args, **kwargs)
            after_step()
            return out

        return counted

    Optimizer.profile_hook_step = staticmethod(wrap_and_count)
    train_all([name])
    print(json.dumps(results[0]), file=sys.stderr)


def begin_tracker():
    import gc

    import torch
    from torch.distributed._tools.mem_tracker import MemTracker

    modules = [item for item in gc.get_objects() if issubclass(type(item), torch.nn.Module)]
    inner = {id(child) for module in modules for child in module.children()}
    optimizers = [item for item in gc.get_objects() if issubclass(type(item), torch.optim.Optimizer)]
    models = [
        module
        for module in modules
        if id(module) not in inner and next(module.parameters(), None) is not None
    ]
    tracker = MemTracker()
    tracker.track_external(*models, *optimizers)
    tracker.__enter__()
    return tracker


def end_tracker(tracker):
    tracker.__exit__(None, None, None)
    return max(sizes["Total"] for sizes in tracker.get_tracker_snapshot("peak").values())


def begin_profile():
    import torch

    profiler = torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, record_shapes=True, with_stack=True
    )  # fmt: skip
    profiler.start()
    return profiler


def end_profile(profiler):
    from torch.profiler._memory_profiler import _CATEGORY_TO_INDEX, MemoryProfileTimeline

    profiler.stop()
    _, sizes = MemoryProfileTimeline(profiler._memory_profile())._coalesce_timeline("cpu")
    peak = max(sizes, key=sum)
    return sum(peak), peak[_CATEGORY_TO_INDEX[None] + 1] / sum(peak)


if __name__ == "__main__":
    main()
