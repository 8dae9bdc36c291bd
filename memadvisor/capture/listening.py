"""In which steps the modules are listened to, so that it costs a training at most a two-hundredth of its time.

For a model of many tiny layers, hooks around every module take as long as a good part of the step. So the first
steps are listened to, and from then on each one has to be paid for: every step puts a two-hundredth of its length into
an account, and the next one is listened to when there is as much in it as that will cost. Where a step earns its own
cost (most models: a few hundred microseconds in a step of a tenth of a second), all of them are.
"""

from __future__ import annotations

import time
from collections import deque
from statistics import median

BUDGET = 0.005  # of the time of all steps after the first ones
NUM_FIRST = 8
# The estimate of the cost (calls timed in a loop) comes out too low by a factor of two or three, so where it is
# this much of a step, some steps without listening follow the first ones, and the difference tells, within bounds
# that keep a noisy machine from misleading it.
_WORTH_MEASURING, _NUM_COMPARED, _LEAST_BY_ESTIMATE, _MOST_BY_ESTIMATE = 0.0015, 8, 2, 5


class Listening:
    """Told of every timed step that has ended, says of the next one.

    `cost_s` is what listening takes in a step, by the calls that were timed, and by comparison where there was one.
    """

    def __init__(self) -> None:
        self.cost_s = 0.0
        self._estimate_s = 0.0
        self._is_dear = False
        self._saved_s = 0.0
        self._num_thin = 0
        # Of the last steps of either kind.
        self._lengths_s: deque[float] = deque(maxlen=_NUM_COMPARED)
        self._full_s: deque[float] = deque(maxlen=_NUM_COMPARED)
        self._thin_s: deque[float] = deque(maxlen=_NUM_COMPARED)
        self._begin_s = time.monotonic()
        self._begin_busy_s: float | None = time.thread_time()  # None: the step is compared with no other

    def turn_to(self, index: int, *, was_full: bool | None, estimate_s: float, must: bool) -> bool:
        """A step ends in this thread, which was listened to or not (None: its length tells nothing), and that of `index`
        begins: whether to listen to it, as one `must` or `wants`."""
        now_s, begin_busy_s = time.monotonic(), self._begin_busy_s
        now_busy_s = None if begin_busy_s is None else time.thread_time()
        if was_full is not None:
            length_s = now_s - self._begin_s
            busy_s = None if now_busy_s is None or begin_busy_s is None else now_busy_s - begin_busy_s
            if was_full and busy_s is not None:
                self.note_full(length_s, busy_s, estimate_s)
            elif not was_full:
                self.note_thin(length_s, busy_s)
        wanted = must or self.wants(index)
        # To ask how long a thread was at work takes as long as much else that a step without listening is charged with.
        is_compared = wanted or self._num_thin < _NUM_COMPARED or self._num_thin % _NUM_COMPARED == 0
        if is_compared and now_busy_s is None:
            now_busy_s = time.thread_time()
        self._begin_s, self._begin_busy_s = now_s, now_busy_s if is_compared else None
        return wanted

    def note_thin(self, length_s: float, busy_s: float | None = None) -> None:
        """A step without listening took `length_s`, of which its thread was at work for `busy_s`: known of each of the first
        ones, and then of one in so many."""
        self._num_thin += 1
        if busy_s is not None:
            self._lengths_s.append(length_s)
            self._thin_s.append(busy_s)
            if self._num_thin == _NUM_COMPARED:
                self._weigh()
        if self._num_thin >= _NUM_COMPARED:
            # No more than one step's cost, or a long pause would be followed by many dear steps.
            self._saved_s = min(self._saved_s + BUDGET * length_s, self.cost_s)

    def note_full(self, length_s: float, busy_s: float, estimate_s: float) -> None:
        """A step with listening, whose calls took `estimate_s` by those that were timed."""
        self._lengths_s.append(length_s)
        self._full_s.append(busy_s)
        self._estimate_s = estimate_s
        self._weigh()
        self._saved_s = BUDGET * length_s if self._num_thin >= _NUM_COMPARED else 0.0

    def took_s(self, estimate_s: float) -> float:
        """What it took in a step whose timed calls say `estimate_s`, by how far such estimates were off in the comparison.

        Steps differ: in one of reinforcement learning the model may have been called a hundred times for actions, in the
        next one not once.
        """
        return estimate_s * self.cost_s / self._estimate_s if self._estimate_s else estimate_s

    def wants(self, index: int) -> bool:
        """Whether to listen to the step of this index."""
        if index < NUM_FIRST or not self._is_dear:
            return True
        return self._num_thin >= _NUM_COMPARED and self._saved_s >= self.cost_s

    def _weigh(self) -> None:
        self._is_dear = self._estimate_s >= _WORTH_MEASURING * median(self._lengths_s)
        self.cost_s = self._estimate_s
        if self._num_thin >= _NUM_COMPARED and self._full_s:
            longer_s = median(self._full_s) - median(self._thin_s)
            least_s, most_s = _LEAST_BY_ESTIMATE * self._estimate_s, _MOST_BY_ESTIMATE * self._estimate_s
            self.cost_s = min(max(longer_s, least_s), most_s)
