"""The allocator's peak of one step, told by torch's own profiler alone: the tests' independent witness.

Runs a script with the profiler on from before its first line, sums every allocation and free, and
prints the highest sum between the ends of two optimizer steps. Knows nothing of memadvisor.
"""

import json
import runpy
import sys
import time
from pathlib import Path

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook


def main() -> None:
    first_end, last_end, script, *arguments = sys.argv[1:]
    ends_ns: list[int] = []
    register_optimizer_step_post_hook(lambda *_: ends_ns.append(time.time_ns()))
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
    profiler.start()
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).resolve().parent)
    runpy.run_path(script, run_name="__main__")
    profiler.stop()
    events = []
    pending = list(profiler.profiler.kineto_results.experimental_event_tree())
    while pending:
        node = pending.pop()
        pending += node.children
        if node.name == "[memory]":
            events.append((node.start_time_ns, node.extra_fields.alloc_size))
    alive, peak = 0, 0
    first, last = ends_ns[int(first_end)], ends_ns[int(last_end)]
    before = 0
    for time_ns, delta in sorted(events):
        if time_ns > last:
            break
        before = alive if time_ns > first and not peak else before
        alive += delta
        if time_ns > first:
            peak = max(peak, before, alive)
    print(json.dumps({"true_peak_bytes": peak}), file=sys.stderr)


main()
