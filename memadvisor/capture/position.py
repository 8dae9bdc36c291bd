"""Where the training stands: the stack of running modules, the phase, the micro-batch."""

from __future__ import annotations

from dataclasses import dataclass, field

from memadvisor.capture.loops import LoopCounter
from memadvisor.capture.module_info import ModuleInfo


@dataclass(slots=True)
class Position:
    """Changed by the hooks, read by whoever records.

    `is_quiet`: nothing depends on the plain modules that are now called inside the innermost known one, so
    the hooks let them pass: no step is traced or watched, and no backward runs, where a module means a recomputation.
    `loops`: until the first step is over.
    """

    stack: list[ModuleInfo] = field(default_factory=list)
    backward_depth: int = 0
    in_optimizer: bool = False
    micro_batch: int = 0
    backward_unit: str = ""
    stack_depth_before_backward: int = 0
    is_traced: bool = False
    is_watched: bool = False  # every operator is, under --memory-limit
    is_quiet: bool = False
    loops: LoopCounter | None = field(default_factory=LoopCounter)

    def push(self, info: ModuleInfo) -> None:
        self.stack.append(info)
        if self.loops is not None and not self.backward_depth:
            self.loops.enter(info, self.stack)
        self.settle()

    def pop(self) -> ModuleInfo:
        info = self.stack.pop()
        if self.loops is not None and not self.backward_depth:
            self.loops.leave(self.stack)
        self.settle()
        return info

    def enter_backward(self) -> bool:
        """A pass begins; True: it is in no other one."""
        self.backward_depth += 1
        if self.backward_depth > 1:
            return False
        if self.loops is not None:
            self.loops.see_backward()
        self.stack_depth_before_backward = len(self.stack)
        self.backward_unit = ""
        self.settle()
        return True

    def leave_backward(self) -> bool:
        """A pass ends, with whatever an exception left open in it; True: it was in no other one."""
        self.backward_depth = max(0, self.backward_depth - 1)
        if self.backward_depth:
            return False
        del self.stack[self.stack_depth_before_backward :]
        self.settle()
        return True

    def settle(self) -> None:
        """`is_quiet` after a change. Never inside a plain module: its own end must find it on the stack."""
        stack = self.stack
        is_seen = self.is_traced or self.is_watched or self.backward_depth
        self.is_quiet = not is_seen and bool(stack) and not stack[-1].is_plain

    @property
    def may_be_unseen(self) -> bool:
        """Whether nobody would miss the modules that are called from here on: none is running, none is watched."""
        return not self.stack and not self.is_watched

    def is_outermost_recompute(self, num_entered: int) -> bool:
        """Whether the module that is entered (1) or was left (0) is the first one of a recomputation."""
        depth = self.stack_depth_before_backward + num_entered
        return self.backward_depth > 0 and len(self.stack) == depth

    @property
    def is_entry(self) -> bool:
        """Whether the innermost module is a model, or a part of one, that the script itself has called."""
        return len(self.stack) == 1 and not self.backward_depth and self.stack[0].is_of_model

    @property
    def phase(self) -> str:
        """One of records.PHASES without `baseline`."""
        if self.backward_depth:
            return "recompute" if len(self.stack) > self.stack_depth_before_backward else "backward"
        if self.stack:  # also inside an optimizer step: a closure runs the model there
            return "forward"
        return "optimizer" if self.in_optimizer else "outside"

    @property
    def module(self) -> str:
        if self.backward_depth and len(self.stack) <= self.stack_depth_before_backward:
            return self.backward_unit
        return self.stack[-1].name if self.stack else ""

    @property
    def unit(self) -> str:
        if self.backward_depth and len(self.stack) <= self.stack_depth_before_backward:
            return self.backward_unit
        return self.stack[-1].unit if self.stack else ""
