"""torch's two global hooks around optimizer steps, one pair for all recorders of the process.

torch goes through its tables of hooks while these run. One that came or went meanwhile, from inside of a hook or in
another thread, would end the script's `optimizer.step()` with an error ("OrderedDict mutated during iteration") where
others stand beside ours: an engine's, or the script's own. So recorders come and go here, and the pair itself only where
nobody can be going through the tables.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from torch.compiler import is_dynamo_compiling
from torch.optim import optimizer as torch_optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from memadvisor.never_compiled import never_compiled

_Told = Callable[[torch_optimizer.Optimizer], None]


class _CompiledUpdates:
    """`have_come`: an optimizer's step ran within a function that torch.compile compiled. Dynamo takes the hooks into its
    graph, where they can tell nobody; what they set it sets, each time that graph runs. It never reads this: it would guard it.
    """

    have_come = False

    def take(self) -> bool:
        """Whether one has come since this was last asked."""
        come, self.have_come = self.have_come, False
        return come


compiled_updates = _CompiledUpdates()


class _Pair:
    def __init__(self) -> None:
        self._told: tuple[tuple[_Told, _Told], ...] = ()
        self._handles: tuple[Any, ...] = ()
        self._num_inside = 0  # calls of ours that are under way

    def tell(self, before: _Told, after: _Told) -> Callable[[], None]:
        """Both are told of each step from now on, until what this returns is called. They raise nothing."""
        told = (before, after)
        self._told += (told,)
        if not self._handles:
            self._handles = (
                register_optimizer_step_pre_hook(self._hook(0)),
                register_optimizer_step_post_hook(self._hook(1)),
            )
        return partial(self._forget, told)

    def _hook(self, which: int) -> Callable[..., None]:
        def hook(optimizer: torch_optimizer.Optimizer, args: Any, kwargs: Any) -> None:
            if is_dynamo_compiling():
                compiled_updates.have_come = True
                return
            self._num_inside += 1
            try:
                for told in self._told:
                    told[which](optimizer)
            finally:
                self._num_inside -= 1

        return never_compiled(hook)

    def _forget(self, told: tuple[_Told, _Told]) -> None:
        self._told = tuple(each for each in self._told if each is not told)
        if not self._told and not self._may_be_gone_through():
            for handle in self._handles:
                handle.remove()
            self._handles = ()

    def _may_be_gone_through(self) -> bool:
        """The last of a table may go while it runs: torch asks for no other after it."""
        tables = (torch_optimizer._global_optimizer_pre_hooks, torch_optimizer._global_optimizer_post_hooks)
        has_others = any(len(table) > 1 for table in tables)
        return has_others and (self._num_inside > 0 or threading.active_count() > 1)


tell_of_updates = _Pair().tell
