"""From a trace's logs to what the journal says of casts and of autocasts that did nothing."""

from __future__ import annotations

from bisect import bisect_right
from operator import itemgetter

from memadvisor.capture.tracer import Trace
from memadvisor.run.autocast_records import AutocastOff, IdleCast

Times = tuple[int, int]  # start and end in nanoseconds


def idle_cast_rows(trace: Trace) -> list[IdleCast]:
    """Those in calls of models, and inside of no backward that no model is called in."""
    calls = _outermost_calls(trace)
    starts = [start_ns for start_ns, _ in calls]
    rows = []
    for cast in trace.idle_casts:
        place = bisect_right(starts, cast.time_ns) - 1
        storage_id = trace.account.given_at(cast.address, cast.time_ns)
        if place < 0 or cast.time_ns > calls[place][1] or storage_id is None:
            continue
        like_id = trace.account.given_at(cast.like, cast.time_ns) if cast.like else None
        if cast.like and like_id is None:
            continue
        time_s = (cast.time_ns + trace.offset_ns) / 1e9
        rows.append(IdleCast(time_s, storage_id, cast.operator, cast.shape, like_id))
    return rows


def autocast_off_rows(trace: Trace) -> list[AutocastOff]:
    """Where more autocasts were open than as the outermost call of a model began, around which the script may have any."""
    nestings, offset_ns = trace.nestings, trace.offset_ns
    times = [time_ns for time_ns, _ in nestings]
    rows = []
    for start_ns, end_ns in _outermost_calls(trace):
        first = max(0, bisect_right(times, start_ns) - 1)
        last = bisect_right(times, end_ns)
        since_ns = None
        for time_ns, num_open in [*nestings[first:last], (end_ns, -1)]:
            is_off = num_open > nestings[first][1]
            if is_off and since_ns is None:
                since_ns = time_ns
            elif not is_off and since_ns is not None:
                rows.append(AutocastOff((since_ns + offset_ns) / 1e9, (time_ns + offset_ns) / 1e9))
                since_ns = None
    return rows


def _outermost_calls(trace: Trace) -> list[Times]:
    """Of modules, in order of time."""
    found: list[Times] = []
    ended = ((call.start_ns, call.end_ns) for call in trace.module_calls if call.end_ns is not None)
    for start_ns, end_ns in sorted(ended, key=itemgetter(0)):
        if not found or start_ns >= found[-1][1]:
            found.append((start_ns, end_ns))
    return found
