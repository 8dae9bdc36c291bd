"""The monotonic clock against the wall's, and marks on a device's stream (a fake one here)."""

import time
from types import SimpleNamespace

import pytest
import torch

import memadvisor
from memadvisor.capture import clock, recorder
from memadvisor.capture.clock import DeviceClock, lag_s


@pytest.mark.parametrize("late", [0, 1, 2])
def test_a_thread_that_waited_between_the_clocks_is_asked_again(monkeypatch, late):
    """Every reading of a clock takes 100 ns; each third one is preceded by 5 ms of another thread's turn."""
    now_ns, asked = [10**9], [0]

    def read():
        now_ns[0] += 100 + (asked[0] % 3 == late and asked[0] < 20) * 5_000_000
        asked[0] += 1
        return now_ns[0]

    monkeypatch.setattr(clock.time, "monotonic_ns", read)
    monkeypatch.setattr(clock.time, "time_ns", lambda: read() + 7_000)

    assert clock.monotonic_less_wall_ns() == -7_000


class Event:
    """Takes a moment of a stream whose time passes by 1 ms from record to record."""

    num_made = 0
    now_ms = 0.0

    def __init__(self, enable_timing):
        assert enable_timing
        Event.num_made += 1

    def record(self, stream):
        Event.now_ms += 1.0
        self.at_ms, self.stream = Event.now_ms, stream

    def query(self):
        return True

    def elapsed_time(self, later):
        return later.at_ms - self.at_ms


@pytest.fixture
def device_clock(monkeypatch):
    monkeypatch.setattr(Event, "num_made", 0)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream {stream[0]}")
    monkeypatch.setattr(torch._C, "_cuda_getCurrentStream", lambda index: tuple(stream), raising=False)
    stream = [7, 0, 1]
    made = clock.clock_for(torch.device("cuda", 0))
    made.stream = stream
    return made


def test_marks_that_somebody_holds_keep_their_moments(device_clock):
    marks = [device_clock.mark() for _ in range(3)]
    first, second, third = (mark.seconds() for mark in marks)

    assert (second - first, third - second) == pytest.approx((1e-3, 1e-3))


def test_an_event_is_used_again_when_its_mark_is_gone(device_clock):
    held = device_clock.mark()
    for _ in range(100):
        device_clock.mark()

    assert Event.num_made == 3  # the clock's own, the held one's, and one for all the others
    assert device_clock.mark().seconds() - held.seconds() == pytest.approx(101e-3)


def test_a_mark_is_on_the_stream_that_is_current_then(device_clock):
    marks = [device_clock.mark()]
    device_clock.stream[0] = 8
    marks.append(device_clock.mark())

    assert [mark._event.stream for mark in marks] == ["stream 7", "stream 8"]


class Late:
    """The clock of a device that is an hour behind the host."""

    late_s = 3600.0

    def mark(self):
        return time.monotonic() + self.late_s


@pytest.mark.parametrize("trace_step", [0, 2])
def test_a_traced_step_is_told_by_the_host_as_its_memory_is(tmp_path, monkeypatch, trace_step):
    """What a unit's forward makes is born inside it, however far behind the device is; other steps are the device's."""
    monkeypatch.setattr(recorder, "clock_for", lambda device: Late())
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    with memadvisor.profile(tmp_path / "run", trace_step=trace_step) as prof:
        for _ in range(6):
            model(torch.ones(4, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    rank = prof.run.ranks[0]
    step = rank.traced_step
    assert step is not None and [each.index for each in rank.steps] == [*range(6)]

    forwards = {s.unit: s for s in rank.spans if s.step == step.index and s.kind == "unit_forward"}
    made = [row for row in rank.storages if row.phase == "forward" and row.unit in forwards]
    assert {row.unit for row in made} == {"0", "2"}
    assert all(forwards[row.unit].start_s <= row.birth_s <= forwards[row.unit].end_s for row in made)
    now_s = time.monotonic()
    for other in (each for each in rank.steps if each.index > max(1, trace_step + 1)):
        assert other.start_s > now_s + Late.late_s / 2 and 0 < other.duration_s < 60


class Passed:
    """An event of a device that has passed it."""

    def record(self, stream):
        pass

    def query(self):
        return True


def test_how_far_a_device_is_behind_the_host_is_of_the_moment_at_which_the_host_asked(monkeypatch):
    device_clock = object.__new__(DeviceClock)
    device_clock.free_events, device_clock.base_s = [], 100.0
    device_clock.base = SimpleNamespace(elapsed_time=lambda event: 500.0)
    monkeypatch.setattr(device_clock, "record_event", Passed, raising=False)
    monkeypatch.setattr(time, "monotonic", lambda: 100.2)
    mark = device_clock.mark()

    assert lag_s(mark, mark.seconds()) == pytest.approx(0.3)
    assert lag_s(100.2, 100.2) is None
