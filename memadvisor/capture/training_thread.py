"""Whose calls are the training's: one thread's at a time.

torch's hooks are global: they tell of the modules, passes and updates of every thread, while a step is what one of
them does after another. The first thread that calls a model is the training's. Another takes its place where it begins
something while that one does nothing (an executor's threads, a step each), or trains where that one only calls models
(an actor beside its learner); not where it evaluates beside a thread that has trained, which is left out. Once two were
at work at once, the one that is not the training's is left out.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from torch._C import _current_graph_task_id

from memadvisor.capture.position import Position

OTHERS = (
    "Models were called in several threads at once. The account is of one thread's training; "
    "of the others it holds no steps and no names, and memory that they take or free meanwhile may be unexplained."
)


class TrainingThread:
    """Asked at each beginning and end of a module, a backward pass and an update.

    `on_others` is told once that there are others, `on_change` that another thread is the training's from here on.
    """

    def __init__(
        self, position: Position, on_others: Callable[[], None], on_change: Callable[[], None]
    ) -> None:
        self.ident: int | None = None
        self._position = position
        self._on_others = on_others
        self._on_change = on_change
        self._has_trained = False
        self._others: set[int] = set()
        self._has_others = False

    def begins(self, *, trains: bool) -> bool:
        """Something begins in this thread; `trains`: a backward pass, or an update. False: it is not the training's."""
        ident = threading.get_ident()
        if ident == self.ident or self._is_engines(ident):
            pass
        elif self._only_evaluates(trains):
            return False
        elif not self._takes_place(ident, trains):
            self._others.add(ident)
            if not self._has_others:
                self._has_others = True
                self._on_others()
            return False
        self._has_trained |= trains
        return True

    def is_ours(self) -> bool:
        """Whether what ends in this thread began as the training's."""
        ident = threading.get_ident()
        return ident == self.ident or self._is_engines(ident)

    def _is_idle(self) -> bool:
        position = self._position
        return not (position.stack or position.backward_depth or position.in_optimizer)

    def _only_evaluates(self, trains: bool) -> bool:
        """A model is called without gradients between two calls of the one that trains, and may be while it goes on."""
        return (
            self._has_trained
            and not trains
            and not torch.is_grad_enabled()
            and self._is_idle()
            and self._lives()
        )

    def _takes_place(self, ident: int, trains: bool) -> bool:
        is_first_to_train = trains and not self._has_trained
        if (
            self.ident is not None
            and not is_first_to_train
            and (self._has_others or not self._is_idle())
            and self._lives()
        ):
            return False
        had_other, self.ident = self.ident is not None, ident
        self._others.discard(ident)
        if had_other:
            self.withdraw()
            self._on_change()
        return True

    def withdraw(self) -> None:
        """What another thread is in the midst of is no place of the training's."""
        position = self._position
        position.stack.clear()
        position.backward_depth, position.in_optimizer = 0, False
        position.settle()

    def _lives(self) -> bool:
        return any(thread.ident == self.ident for thread in threading.enumerate())

    def _is_engines(self, ident: int) -> bool:
        """On devices, autograd runs the training's own backward, and what is recomputed there, in threads of its own."""
        return (
            self._position.backward_depth > 0 and ident not in self._others and _current_graph_task_id() != -1
        )
