"""Which modules a loop calls, seen in the first step: until then the cut into units knows only how the model is made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from memadvisor.capture.module_info import ModuleInfo
from memadvisor.run.looped_blocks import SeenCalls


@dataclass(slots=True)
class _Frame:
    """A call that is under way: of what, how many are around it, and what it has called, by itself and in all."""

    of: int
    depth: int
    own: Counter[int] = field(default_factory=Counter)
    within: Counter[int] = field(default_factory=Counter)


class LoopCounter:
    """Told of the calls of all modules in the first step; those without gradients, or in a backward, do not count.

    Modules are told apart by what is known of them: where a name turns out to be another module's, that is another object.
    """

    def __init__(self) -> None:
        self._seen = SeenCalls()
        self._infos: dict[int, ModuleInfo] = {}  # by id, so that none of them is another's
        self._script = _Frame(0, 0)
        self._frames: list[_Frame] = []

    def enter(self, info: ModuleInfo, stack: Sequence[ModuleInfo]) -> None:
        """`stack`: with the module that is called."""
        self._close_from(len(stack))
        if not torch.is_grad_enabled() or (
            len(stack) > 1 and stack[-2].name == info.name
        ):  # a model's wrapper
            return
        self._infos[id(info)] = info
        # What is lent to another unit is a part of that one's forward.
        if not any(_lends(each, info) for each in stack[:-1]):
            around = self._frames[-1] if self._frames else self._script
            around.own[id(info)] += 1
        self._frames.append(_Frame(id(info), len(stack)))

    def leave(self, stack: Sequence[ModuleInfo]) -> None:
        """`stack`: without it."""
        self._close_from(len(stack) + 1)

    def see_backward(self) -> None:
        """What the script has called before it is of one micro-batch."""
        self.end()
        self._script = _Frame(0, 0)

    def end(self) -> SeenCalls:
        self._close_from(0)
        self._see(self._script)
        return self._seen

    def _close_from(self, depth: int) -> None:
        """Calls so deep are over; more than one where an exception has cut them short."""
        while self._frames and self._frames[-1].depth >= depth:
            frame = self._frames.pop()
            self._see(frame)
            within = {self._infos[key].name: number for key, number in frame.within.items()}
            self._seen.see_call(self._infos[frame.of].name, within)
            around = self._frames[-1] if self._frames else self._script
            around.within.update(frame.within)
            around.within[frame.of] += 1

    def _see(self, frame: _Frame) -> None:
        for key, number in frame.own.items():
            self._seen.see_loop(self._infos[key].name, number)


def _lends(caller: ModuleInfo, info: ModuleInfo) -> bool:
    is_block = caller.is_unit and not caller.is_root
    return is_block and not info.name.startswith(f"{caller.name}.")
