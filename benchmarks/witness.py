"""Runs a script and notes peak and duration of each step by torch's own means. Knows nothing of memadvisor.

On CUDA the peak is `max_memory_allocated`, reset after each step. On CPU it is the sum over the memory events of
torch's profiler, which slows the steps down; so there either the peak is witnessed (--peak) or the time.

    python benchmarks/witness.py [--peak] RESULT.json SCRIPT [ARGS...]
"""

import json
import runpy
import sys
import time
from pathlib import Path

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

ON_CUDA = torch.cuda.is_available()


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


def main():
    words = sys.argv[1:]
    witness_peak = words[0] == "--peak"
    result, script, *arguments = words[1:] if witness_peak else words
    witness = Witness()
    register_optimizer_step_post_hook(witness.end_step)
    profiler = None
    if witness_peak and not ON_CUDA:
        activities = [torch.profiler.ProfilerActivity.CPU]
        profiler = torch.profiler.profile(activities=activities, profile_memory=True)
        profiler.start()
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).resolve().parent)
    runpy.run_path(script, run_name="__main__")
    if profiler is not None:
        profiler.stop()
        witness.peaks_bytes = cpu_peaks_bytes(memory_events(profiler), witness.ends_ns)
    told = {"peaks_bytes": witness.peaks_bytes, "durations_s": witness.durations_s()}
    Path(result).write_text(json.dumps(told))


main()
