"""What of a step the training's thread waits for its DataLoaders.

This runs at every batch, so it asks little. A loader that is read by the data set of another one is part of that one's
wait.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable
from threading import get_ident
from typing import Any

import torch
from torch import is_grad_enabled

from memadvisor.capture.clock import DeviceMark
from memadvisor.capture.loader_hooks import BATCH, FIRST
from memadvisor.capture.loader_setups import LoaderSetups
from memadvisor.capture.position import Position
from memadvisor.capture.spans import SpanLog
from memadvisor.capture.training_thread import TrainingThread

_MOST_MODELS = 8
_NUM_STEPS = 8  # in which the models are looked at
# One end of a wait in so many is timed, and stands for the others.
_TIMED_SHARE = 16


class DataWaits:
    """Told by the hooks of DataLoaders; writes into the step under way. `spans`: None before the first model is called.

    `is_aside` while nothing is recorded: a stream is captured into a CUDA graph, which a mark could end, or recording is
    over, and wrappers that cannot be taken away go on asking.
    """

    def __init__(
        self, thread: TrainingThread, position: Position, fail: Callable[[BaseException], None]
    ) -> None:
        self.spans: SpanLog | None = None
        self.is_aside = False
        self.setups = LoaderSetups()
        self._thread = thread
        self._position = position
        self._fail = fail
        self._is_waiting = False
        self._thread_start_s = 0.0  # of the wait, where marks are the device's
        self._num_waits = 0
        self._trained: list[weakref.ref[torch.nn.Module]] = []
        self._read_in_training: set[int] = set()  # loaders

    def begin(self) -> float | DeviceMark | None:
        """None: of another thread, inside another wait, or before there is a step."""
        spans = self.spans
        if spans is None or self._is_waiting or self.is_aside or get_ident() != self._thread.ident:
            return None
        try:
            mark = spans.mark()
            if not isinstance(mark, float):
                self._thread_start_s = time.monotonic()
        except Exception as error:
            self._fail(error)
            return None
        self._is_waiting = True
        return mark

    def end(self, begun: float | DeviceMark, iterator: Any, what: int) -> None:
        """`iterator`: None where none could be made."""
        self._is_waiting = False
        try:
            if self.spans is None or iterator is None:
                return
            mark, step = self.spans.mark(), self.spans.step
            end_s = mark if isinstance(mark, float) else time.monotonic()
            start_s = begun if isinstance(begun, float) else self._thread_start_s
            if what == BATCH and iterator._num_yielded == 1:
                what = FIRST
            loader = self.setups.number_of(iterator)
            is_evaluation = self._is_evaluation(loader)
            place = self._position
            is_outside = not (place.stack or place.backward_depth or place.in_optimizer)
            phase = "outside" if is_outside else place.phase
            if step.waits is None:
                step.waits = []
            step.waits.append((loader, phase, is_evaluation, what, begun, mark, end_s - start_s))
            self._num_waits += 1
            if not self._num_waits % _TIMED_SHARE:
                step.recorder_s += _TIMED_SHARE * (time.monotonic() - end_s)
        except Exception as error:
            self._fail(error)

    def meet(self, iterator: Any, loader: Any) -> None:
        """A loader has made its iterator, or gives out its lasting one again."""
        if self.is_aside or self._thread.ident not in (None, get_ident()):
            return
        try:
            self.setups.meet(iterator, loader)
        except Exception as error:
            self._fail(error)

    def see_models(self, step: int, roots: Callable[[], Iterable[tuple[str, torch.nn.Module]]]) -> None:
        """When a step ends: those of the models in training mode that have something to train. Others, a teacher that is
        always in evaluation mode, say nothing of what a batch is for; nor does a model that is trained in that mode."""
        if step >= _NUM_STEPS:
            return
        known = [reference() for reference in self._trained]
        for _, root in roots():
            is_new = root.training and not any(root is each for each in known)
            if is_new and any(parameter.requires_grad for parameter in root.parameters()):
                self._trained.append(weakref.ref(root))
        del self._trained[_MOST_MODELS:]

    def _is_evaluation(self, loader: int) -> bool:
        """The mode alone would not do: after an evaluation Hugging Face's trainer asks for the next batch to train on before
        it puts the model into training mode again."""
        if not is_grad_enabled():
            return True
        trains = evaluates = False
        for reference in self._trained:
            root = reference()
            if root is not None:
                trains |= root.training
                evaluates = True
        if trains:
            self._read_in_training.add(loader)
            return False
        return evaluates and loader not in self._read_in_training
