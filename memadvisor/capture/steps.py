"""Where a training step ends, by what is updated.

An update is one optimizer's `step`; optimizers of the same parameters are one (those made anew each epoch). A
training step holds no update twice. Which is its last one must be known when it happens, so it is expected: at
first, the step ends once every optimizer that then exists has stepped; later, with the update that ended the step
before. Where that turns out wrong:

- A step whose next update it holds already had ended with the one before ("late").
- An update after the end belongs to the ended step if no backward pass came in between, and is then the one that
  the next step is expected to end with; after a backward pass it opens the next step.

- Where steps end late again and again, no update is the right end: an actor is updated twice after every second update of
  its critics (SAC in cleanrl). Once `settle` says so, each step ends with the update that was made most often, the first
  of these, whatever else it holds, as long as that is made.

- Where nobody is left who could make the expected update (a search whose trials each have a model and an optimizer), what a
  step ends with is expected anew, as at first.

So optimizers that step one after another, each of its own parameters, make one step; so do a GAN's two; a critic
that is updated twice a round makes two; an optimizer that steps every k-th time changes nothing. What is left when
the script ends is a step of its own if it holds an update that was never made before, or more often than there are
steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection

_MOST_OF_A_KIND = 8  # updates in a step, until the one that steps end with counts as made no more


class StepCycle:
    """Told of every update by a number of its own; says when a training step has ended.

    `existing` gives the updates that could be made by now; it is asked once, and again when `is_gone` says of what steps end
    with that nobody could make it any more.
    """

    def __init__(
        self, existing: Callable[[], Collection[int]], is_gone: Callable[[int], bool] = lambda update: False
    ) -> None:
        self._existing = existing
        self._is_gone = is_gone
        self._expected: frozenset[int] | None = None  # of the first step
        self._last: int | None = None  # what a step is expected to end with
        self._is_settled = False
        self._this: list[int] = []
        self._ended: set[int] = set()
        self._num_made: Counter[int] = Counter()
        self._num_ended = 0
        self._has_passed_backward = False

    def see_backward(self) -> None:
        self._has_passed_backward = True

    def before(self, update: int) -> bool:
        """True: the training step had ended with the previous update, and nobody has said so yet."""
        if self._this.count(update) < (_MOST_OF_A_KIND if self._is_settled else 1):
            return False
        self._is_settled = False
        self._end()
        return True

    def settle(self) -> None:
        """A step was to end in time, and again did not."""
        self._is_settled = True
        [(self._last, _)] = self._num_made.most_common(1)

    def after(self, update: int) -> bool:
        """True: this update ends the training step."""
        self._num_made[update] += 1
        if self._belongs_to_ended(update):
            self._ended.add(update)
            if not self._is_settled:
                self._last = update
            return False
        self._this.append(update)
        if self._is_last(update):
            self._end()
            return True
        return False

    @property
    def has_open_step(self) -> bool:
        """At the end of the script: whether the updates since the last step are one."""
        made = [self._num_made[update] for update in self._this]
        return any(number == 1 or number > self._num_ended for number in made)

    def _belongs_to_ended(self, update: int) -> bool:
        has_just_ended = bool(self._ended) and not self._this and not self._has_passed_backward
        return has_just_ended and update not in self._ended

    def _is_last(self, update: int) -> bool:
        if self._last is not None and update != self._last and self._is_gone(self._last):
            self._last = self._expected = None
            self._is_settled = False
        if self._last is not None:
            return update == self._last
        if self._expected is None:
            self._expected = frozenset(self._existing())
        return self._expected <= set(self._this)

    def _end(self) -> None:
        if not self._is_settled:
            self._last = self._this[-1]
        self._ended = set(self._this)
        self._num_ended += 1
        self._this.clear()
        self._has_passed_backward = False
