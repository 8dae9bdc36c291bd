"""The allocator's peaks, told by torch's own profiler alone: the tests' independent witness.

Runs a script (or trainings of the zoo) with the profiler on from before its first line, sums every allocation
and free, and prints the highest sum in each span from the end of one optimizer step to that of the next, as
JSON on stderr. Knows nothing of memadvisor.

    python true_peak.py SCRIPT [ARGS...]        {"peaks_bytes": [...]}
    python true_peak.py --zoo NAME...           {NAME: [...], ...}

Of several ranks (under RANK), where threads of the backend free memory that the profiler does not follow, the
allocator's own total is taken instead of the sum; it counts all threads while its flag is set.
"""

import ctypes
import json
import os
import runpy
import sys
import time
from bisect import bisect_left
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook


def memory_changes(profiler):
    """(time in ns, bytes allocated or freed) of every event of the allocator's, in order.

    Memory shared with other processes is reported too, with a total of 0, but is not the allocator's.
    """
    events = []
    pending = list(profiler.profiler.kineto_results.experimental_event_tree())
    while pending:
        node = pending.pop()
        pending += node.children
        if node.name == "[memory]":
            fields = node.extra_fields
            events.append((node.start_time_ns, fields.ptr, fields.alloc_size, fields.total_allocated))
    if "RANK" in os.environ:
        totals = [(time_ns, total_bytes) for time_ns, _, _, total_bytes in sorted(events) if total_bytes]
        return [(time_ns, now - before) for (_, before), (time_ns, now) in pairwise([(0, 0), *totals])]
    changes, alive = [], set()
    for time_ns, address, delta_bytes, total_bytes in sorted(events):
        if delta_bytes > 0 and total_bytes:
            alive.add(address)
        elif address in alive:
            alive.discard(address)
        else:
            continue
        changes.append((time_ns, delta_bytes))
    return changes


def peaks_bytes(changes, ends_ns):
    """The highest sum between each of these moments and the next; what is alive at the first counts."""
    alive, totals = 0, [0]
    for _, delta_bytes in changes:
        alive += delta_bytes
        totals.append(alive)
    places = [bisect_left(changes, (end_ns,)) for end_ns in ends_ns]
    return [max(totals[first : last + 1]) for first, last in pairwise(places)]


def highest_bytes(function):
    """What is there at most of what a call allocates."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profiler:
        function()
    alive = highest = 0
    for _, delta_bytes in memory_changes(profiler):
        alive += delta_bytes
        highest = max(highest, alive)
    return highest


def count_other_threads():
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    ctypes.c_bool.in_dll(library, "FLAGS_caffe2_report_cpu_memory_usage").value = True


def main():
    words = sys.argv[1:]
    if "RANK" in os.environ:
        count_other_threads()
    ends_ns = []
    told = {}
    register_optimizer_step_post_hook(lambda *_: ends_ns.append(time.time_ns()))

    @contextmanager
    def around(name):
        ends_ns.clear()
        yield
        told[name] = list(ends_ns)

    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
    profiler.start()
    if words[0] == "--zoo":
        sys.path.insert(0, str(Path(__file__).parent / "zoo"))
        from kinds import train_all

        train_all(words[1:], around)
    else:
        sys.argv = words
        sys.path[0] = str(Path(words[0]).resolve().parent)
        with around("peaks_bytes"):
            runpy.run_path(words[0], run_name="__main__")
    profiler.stop()
    changes = memory_changes(profiler)
    print(json.dumps({name: peaks_bytes(changes, ends) for name, ends in told.items()}), file=sys.stderr)


if __name__ == "__main__":
    main()
