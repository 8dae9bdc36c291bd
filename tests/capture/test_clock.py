"""The monotonic clock against the wall's."""

import pytest

from memadvisor.capture import clock


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
