"""The step under way: its spans, and how much of it memadvisor's own hooks take.

This is what runs in every step of the training, so it appends plain lists and makes rows of them later.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch._C._autograd import _get_sequence_nr

from memadvisor.capture.clock import HostClock
from memadvisor.capture.closures import ClosurePasses
from memadvisor.capture.listening import Listening
from memadvisor.capture.module_info import ModuleInfo
from memadvisor.capture.open_step import Given, Mark, OpenSpan, OpenStep
from memadvisor.capture.position import Position
from memadvisor.capture.samples import (
    FirstBatch,
    LengthFirst,
    SeenBatches,
    batch_of,
    is_result,
    is_without_graph,
    num_elements_of,
)
from memadvisor.capture.updates import gradient_bytes_of
from memadvisor.never_compiled import never_compiled

_MICRO_BATCH, _START, _END, _HAS_GRADIENTS = 2, 3, 4, 5
# One hook call in so many is timed; timing each would cost as much as the hook.
_TIMED_SHARE = 16
_STARTS = "memadvisor_starts"  # in a node's metadata


class SpanLog:
    """Told of units, backwards and optimizers as they come and go; writes into `step`."""

    def __init__(
        self, position: Position, mark: Callable[[], Mark], on_unit_backward: Callable[[str], None]
    ) -> None:
        self.step = OpenStep(index=0, start=mark())
        self.mark = self.device_mark = mark
        self.first_batch = FirstBatch()
        self.has_gradients: Callable[[str | None], bool] | None = None  # of a module's model, or of any
        self.length_first = LengthFirst()
        self._position = position
        self._on_unit_backward = on_unit_backward
        self._units: list[tuple[list[OpenSpan], int]] = []  # with the number of the next node of autograd's
        self._backward: OpenSpan | None = None
        self._unit_backward: OpenSpan | None = None
        self._optimizer: OpenSpan | None = None
        self._closure = ClosurePasses()
        self._num_calls = 0
        self._starts: dict[str, _BackwardStart] = {}
        self.has_unit_spans = True
        self._listening = Listening()
        self._estimate_s = (
            0.0  # what listening to modules took in the last full step, by the calls that were timed
        )
        self._batches_of_backwards: dict[int, int] = {}
        self._until_update = self.step, 0, 0, 0

    def begin(self, index: int, start: Mark, *, traced: bool) -> None:
        """The next step; what was open in the last one is forgotten."""
        last = self.step
        was_full = None if last.traced or last.is_pieced or last.is_disturbed else self.has_unit_spans
        wants = self._listening.turn_to(index, was_full=was_full, estimate_s=self._estimate_s, must=traced)
        self.has_unit_spans = wants
        self.step = OpenStep(index=index, start=start, traced=traced)
        self._units.clear()

    def change_clock(self, *, traced: bool) -> Mark:
        """Now, as it is told from here on. In a traced step, whose length tells nothing, that is by the host: when memory is
        asked for and given back is known on the host alone, which on a GPU may be ahead of the kernels by all of a step."""
        self.mark = HostClock.mark if traced else self.device_mark
        return self.mark()

    def note_update(self) -> None:
        """An update has ended which the step may turn out to have ended with."""
        step = self.step
        given = {name: replace(each) for name, each in step.given.items()}
        until_now = replace(step, spans=[], waits=None, given=given)
        self._until_update = until_now, len(step.spans), len(step.waits or ()), self._position.micro_batch
        step.largest_input_since_update = 0

    def end_with_update(self, end: Mark) -> OpenStep:
        """The step had ended at `end`, with the update noted last; what has been seen since is the next one's."""
        ended, num_spans, num_waits, num_micro_batches = self._until_update
        rest = self.step
        ended.spans = rest.spans[:num_spans]
        del rest.spans[:num_spans]
        if rest.waits is not None:
            ended.waits = rest.waits[:num_waits]
            del rest.waits[:num_waits]
        for span in rest.spans:
            span[_MICRO_BATCH] -= num_micro_batches
        self._position.micro_batch -= num_micro_batches
        rest.index, rest.start = ended.index + 1, end
        rest.num_backwards -= ended.num_backwards
        rest.num_derivatives -= ended.num_derivatives
        rest.seen = None
        rest.given = {name: each.since(ended.given.get(name, Given())) for name, each in rest.given.items()}
        rest.largest_input = rest.largest_input_since_update
        rest.gradient_bytes = 0
        ended.is_pieced = rest.is_pieced = True
        self._note_micro_batches(ended)
        return ended

    def _note_micro_batches(self, step: OpenStep) -> None:
        """A thin step has as many micro-batches as the last full one with the same number of backwards."""
        num_backwards = (step.num_backwards - step.num_derivatives) or step.num_backwards
        if not step.is_thin:
            num_forwards = max((given.num_calls for given in step.given.values()), default=0)
            least = min(num_forwards, num_backwards) or num_forwards or num_backwards
            self._batches_of_backwards[num_backwards] = least
        step.num_micro_batches = self._batches_of_backwards.get(num_backwards, num_backwards)

    def be_thin(self) -> None:
        """Nobody listens to the modules of the step that has just begun."""
        self.step.is_thin = True

    def see_first_call(self, args: Any, kwargs: Any) -> None:
        """Of a thin step, or after one of its backwards."""
        begin_s = time.monotonic()
        self._note_size(num_elements_of(args, kwargs))
        self.spend_since(begin_s)

    def _note_size(self, num_elements: int) -> None:
        step = self.step
        step.largest_input = max(step.largest_input, num_elements)
        step.largest_input_since_update = max(step.largest_input_since_update, num_elements)

    def stop_listening(self, quiet_s: float) -> None:
        """The step ends; `quiet_s` is what the modules took of it that the hooks let pass."""
        step = self.step
        self._note_micro_batches(step)  # before anybody may write it
        if self.has_unit_spans and not step.traced:
            self._estimate_s = step.listening_s + quiet_s
            step.recorder_s += self._listening.took_s(self._estimate_s)
        else:
            step.recorder_s += step.listening_s + quiet_s

    def enter_unit(self, info: ModuleInfo) -> None:
        position = self._position
        is_outermost = len(position.stack) == 1 and not position.backward_depth
        if not (self.has_unit_spans or info.is_root or is_outermost):
            return
        kinds = []
        if position.backward_depth:
            kinds.append("unit_recompute")
        elif is_outermost:  # the model, or a part of it that the script calls itself
            kinds.append("forward" if torch.is_grad_enabled() else "evaluation")
        # The span of a model's wrapper stands for the model inside it, too.
        if info.has_own_span and self.has_unit_spans and kinds in ([], ["forward"]):
            kinds.append("unit_forward")
        spans = [self._open(kind, info.unit) for kind in kinds]
        if kinds[:1] == ["forward"]:
            self._look_for_gradients(spans[0], info.name)
        self._units.append((spans, _get_sequence_nr()))

    def leave_unit(
        self, info: ModuleInfo, args: Any, kwargs: Any, output: Any, *, was_recompute: bool
    ) -> None:
        is_outermost = not self._position.stack and not self._position.backward_depth
        if not (self.has_unit_spans or info.is_root or is_outermost):
            return
        first_node = 0
        if self._units:
            end = self.mark()
            spans, first_node = self._units.pop()
            for span in spans:
                span[_END] = end
        if torch.is_grad_enabled():
            if is_outermost and not was_recompute:
                self._count_inputs(info, args, kwargs, output)
            # Of a reentrant checkpoint, whose first forward has no graph, the second one's is what the backward takes.
            if info.is_unit and self.has_unit_spans:
                nodes = _nodes_of(output, first_node)
                start = (
                    self._start_of(info.unit) if len(nodes) < 2 else _FirstStart(weakref.ref(self), info.unit)
                )
                for node in nodes:
                    _begin_backward_at(node, start)

    def forget_units(self) -> None:
        """What is open turned out to be no forward."""
        self._units.clear()

    def enter_backward(self, is_derivative: bool) -> None:
        self._closure.before_backward(self.step)
        self.first_batch.see_backward()
        self._backward = self._open("backward", "")
        self._look_for_gradients(self._backward, None)
        self.step.num_backwards += 1
        self.step.num_derivatives += is_derivative

    def leave_backward(self) -> None:
        end = self.mark()
        self._close_unit_backward(end)
        if self._backward is not None:
            self._backward[_END] = end
            self._backward = None
        if self._optimizer is not None:  # a closure has run the model; the update itself begins here
            self._optimizer[_START] = end
            self._closure.after_backward(self.step)

    def reach_backward_of(self, unit: str) -> None:
        """The gradient of a unit's output is known: its backward begins, and the one before it ends."""
        begin_s = self.begin_timing()
        span = self._open("unit_backward", unit)
        self._close_unit_backward(span[_START])
        self._unit_backward = span
        self.end_timing(begin_s)

    def enter_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        if self.has_unit_spans:
            self.step.gradient_bytes = max(self.step.gradient_bytes, gradient_bytes_of(optimizer))
        self._optimizer = self._open("optimizer", "")
        self._closure.enter(optimizer)

    def leave_optimizer(self) -> Mark:
        end = self.mark()
        if self._optimizer is not None:
            self._optimizer[_END] = end
            self._optimizer = None
        self._closure.leave()
        return end

    def _open(self, kind: str, unit: str) -> OpenSpan:
        span = [kind, unit, self._position.micro_batch, self.mark(), None, None]
        self.step.spans.append(span)
        return span

    def _look_for_gradients(self, span: OpenSpan, module: str | None) -> None:
        """A gradient's memory may be there while no parameter has it: a bucket of DDP's lasts."""
        if self.step.traced and self.has_gradients is not None:
            span[_HAS_GRADIENTS] = self.has_gradients(module)

    def _close_unit_backward(self, end: Mark) -> None:
        if self._unit_backward is not None:
            self._unit_backward[_END] = end
            self._unit_backward = None

    def _start_of(self, unit: str) -> _BackwardStart:
        start = self._starts.get(unit)
        if start is None:
            start = self._starts[unit] = _BackwardStart(weakref.ref(self), unit)
        return start

    def announce_backward_of(self, unit: str) -> None:
        self._on_unit_backward(unit)

    def _count_inputs(self, info: ModuleInfo, args: Any, kwargs: Any, output: Any) -> None:
        if not is_without_graph(output):
            self._note_size(num_elements_of(args, kwargs))
        step, name = self.step, info.name
        given = step.given.setdefault(name, Given(model=info.model))
        given.num_calls += 1
        is_length_first = self.length_first.leave_model(name, args, kwargs)
        num_samples, num_tokens = batch_of(args, kwargs, is_length_first=is_length_first)
        is_known = num_samples is not None or num_tokens is not None
        num_losses = step.num_backwards - step.num_derivatives
        if not is_result(args, kwargs):
            given.takes_data, given.fed_at = True, num_losses
        elif given.fed_at == num_losses:  # a solver's next point: the same samples, worked on further
            return
        if is_known:
            if step.seen is None:
                step.seen = SeenBatches()
            if step.seen.is_repeated(name, args, kwargs, self._position.micro_batch):
                return
        if num_samples is not None and (step.traced or not info.may_be_length_first):
            self.first_batch.see_call(name, num_samples)
        given.num_samples = _sum(given.num_samples, num_samples)
        given.num_tokens = _sum(given.num_tokens, num_tokens)

    def begin_timing(self) -> float | None:
        """Of hooks that are called often: one call in so many is timed, and stands for the others."""
        self._num_calls += 1
        return None if self._num_calls % _TIMED_SHARE else time.monotonic()

    def end_timing(self, begin_s: float | None) -> None:
        if begin_s is not None:
            self.step.listening_s += _TIMED_SHARE * (time.monotonic() - begin_s)

    def spend_since(self, begin_s: float) -> None:
        """Memadvisor itself has been at work since `begin_s`."""
        self.step.recorder_s += time.monotonic() - begin_s


class _BackwardStart:
    """Called at the node that a unit's backward begins with; knows the log only as long as that lives."""

    __slots__ = ("_log", "_unit")

    def __init__(self, log: weakref.ref[SpanLog], unit: str) -> None:
        self._log = log
        self._unit = unit

    @never_compiled
    def __call__(self, gradients: Any) -> None:
        log = self._log()
        if log is not None:
            log.announce_backward_of(self._unit)


class _FirstStart(_BackwardStart):
    """Of a call that returns what several nodes have made: the first of them that a backward comes to."""

    __slots__ = ("_begun",)

    def __init__(self, log: weakref.ref[SpanLog], unit: str) -> None:
        super().__init__(log, unit)
        self._begun: tuple[int, int] | None = None

    @never_compiled
    def __call__(self, gradients: Any) -> None:
        log = self._log()
        if log is None:
            return
        backward = log.step.index, log.step.num_backwards
        if backward != self._begun:
            self._begun = backward
            log.announce_backward_of(self._unit)


class _StartsAtNode:
    """Prehook of a node that the backwards of several units may begin with.

    A model that returns what its last unit does ends in that unit's node: what runs from there is the unit's, which left
    first and is announced last.
    """

    __slots__ = ("starts",)

    def __init__(self) -> None:
        self.starts: list[_BackwardStart] = []

    @never_compiled
    def __call__(self, gradients: Any) -> None:
        for start in reversed(self.starts):
            start(gradients)


def _begin_backward_at(node: Any, start: _BackwardStart) -> None:
    there = node.metadata.get(_STARTS)
    if there is None:
        there = node.metadata[_STARTS] = _StartsAtNode()
        node.register_prehook(there)
    there.starts.append(start)


def _nodes_of(output: Any, first_node: int) -> list[Any]:
    """The nodes, from this number on, that have made what is returned; where there are none, that of the first tensor.

    Autograd goes through nodes in falling order of their numbers, so with the last one that the loss needs a unit's
    backward begins. Which of them that is, only the backward tells.
    """
    made = [tensor.grad_fn for tensor in _tensors_with_grad(output) if tensor.grad_fn is not None]
    if len(made) < 2:
        return made
    own = {number: node for node in made if (number := node._sequence_nr()) >= first_node}
    return list(own.values()) or made[:1]


def _tensors_with_grad(output: Any) -> Iterator[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        if output.requires_grad:
            yield output
        return
    values: Iterable[Any] = ()
    if isinstance(output, dict):
        values = output.values()
    elif isinstance(output, (list, tuple)):
        values = output
    elif is_dataclass(output) and not isinstance(output, type):
        values = (getattr(output, each.name, None) for each in fields(output))
    for value in values:
        yield from _tensors_with_grad(value)


def _sum(before: int | None, more: int | None) -> int | None:
    return None if before is None or more is None else before + more
