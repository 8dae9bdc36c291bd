"""Runs a script and notes peak and duration of each step by torch's own means. Knows nothing of memadvisor.

On CUDA the peak is `max_memory_allocated`, reset after each step. On CPU it is the sum over the memory events of
torch's profiler, which slows the steps down; so there either the peak is witnessed (--peak) or the time. With --waits
it counts instead how often torch reports, in the steps after the third, that the host waited for the device; each rank
but the first then adds its number to the name of the result.

    python benchmarks/witness.py [--peak | --waits] RESULT.json SCRIPT [ARGS...]
"""

import json
import os
import runpy
import sys
import time
import warnings
from pathlib import Path

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

ON_CUDA = torch.cuda.is_available()
WARM_STEPS = 3


class Witness:
    """Ends of steps by the wall clock, and on CUDA the peak of each."""

    def __init__(self):
        self.ends_ns = []
        self.peaks_bytes = []

    def end_step(self, *_):
        if ON_CUDA:
            torch.cuda.synchronize()
            self.peaks_bytes.append(torch.cuda.max_memory_allocated())
            torch.cuda.reset_peak_memory_stats()
        self.ends_ns.append(time.time_ns())

    def durations_s(self):
        return [(end - start) / 1e9 for start, end in zip(self.ends_ns, self.ends_ns[1:], strict=False)]


def memory_events(profiler):
    """(time, bytes allocated or freed) of every allocation, in order."""
    events = []
    pending = list(profiler.profiler.kineto_results.experimental_event_tree())
    while pending:
        node = pending.pop()
        pending += node.children
        if node.name == "[memory]":
            events.append((node.start_time_ns, node.extra_fields.alloc_size))
    return sorted(events)


def cpu_peaks_bytes(events, ends_ns):
    """The highest sum of allocations in each step after the first; what is alive when a step begins counts."""
    peaks, alive, position = [], 0, 0
    for end_ns in ends_ns:
        peak = alive
        while position < len(events) and events[position][0] <= end_ns:
            alive += events[position][1]
            peak = max(peak, alive)
            position += 1
        peaks.append(peak)
    return peaks


class WaitCounter:
    """Torch's own warnings of waits, once a few steps have warmed up."""

    def __init__(self):
        self.num_steps = self.num_waits = 0
        register_optimizer_step_post_hook(self.end_step)
        self._show, warnings.showwarning = warnings.showwarning, self.see
        warnings.filterwarnings("always", message=".*synchroniz")

    def end_step(self, *_):
        self.num_steps += 1
        if self.num_steps == WARM_STEPS and ON_CUDA:
            torch.cuda.set_sync_debug_mode("warn")

    def see(self, message, *rest):
        if "synchroniz" in str(message):
            self.num_waits += 1
        else:
            self._show(message, *rest)


def count_waits(result, script, *arguments):
    counter = WaitCounter()
    run(script, arguments)
    rank = os.environ.get("RANK", "0")
    name = result if rank == "0" else f"{result}.{rank}"
    Path(name).write_text(json.dumps({"num_waits": counter.num_waits}))


def run(script, arguments):
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).resolve().parent)
    runpy.run_path(script, run_name="__main__")


def main():
    words = sys.argv[1:]
    if words[0] == "--waits":
        count_waits(*words[1:])
        return
    witness_peak = words[0] == "--peak"
    result, script, *arguments = words[1:] if witness_peak else words
    witness = Witness()
    register_optimizer_step_post_hook(witness.end_step)
    profiler = None
    if witness_peak and not ON_CUDA:
        activities = [torch.profiler.ProfilerActivity.CPU]
        profiler = torch.profiler.profile(activities=activities, profile_memory=True)
        profiler.start()
    run(script, arguments)
    if profiler is not None:
        profiler.stop()
        witness.peaks_bytes = cpu_peaks_bytes(memory_events(profiler), witness.ends_ns)
    told = {"peaks_bytes": witness.peaks_bytes, "durations_s": witness.durations_s()}
    Path(result).write_text(json.dumps(told))


main()
