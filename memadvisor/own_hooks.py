"""memadvisor's saved-tensor hooks, set aside where the script would notice that they are there.

While a collective is begun. Work of a process group keeps the state of the thread that began it, with the saved-tensor
hooks in force, for as long as Gloo's own threads have it. The last of them would let go of the hooks' Python objects,
and wait for the GIL to do so; a DistributedDataParallel that dies as the last owner of its group holds the GIL, and
waits for that thread: for ever. Without memadvisor nothing of Python's is in that state, so nothing may be with it.

While a checkpoint asks whose hooks are in force, as those of torch 2.14 do. A selective one would warn the script of
hooks that it has not set, and gives what it keeps itself to those that it finds, where it is told to.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch.utils.checkpoint as checkpoint
from torch._C import _autograd

_OURS = f"{__name__.partition('.')[0]}."
_QUESTION = "_current_user_saved_tensors_hooks"  # of torch 2.14's checkpoints; earlier ones ask nothing


def own_hooks_aside() -> contextlib.AbstractContextManager[None]:
    """No saved-tensor hook of memadvisor's is in force on this thread, unless one of the script's lies above it."""
    return hooks_aside(is_ours)


@contextlib.contextmanager
def hooks_aside(is_aside: Callable[[Any], bool]) -> Iterator[None]:
    """Without those pairs of this thread's hooks, from the topmost on, whose pack `is_aside`."""
    aside: list[tuple[Callable[[Any], Any], Callable[[Any], Any]]] = []
    while (top := _autograd._top_saved_tensors_default_hooks(True)) and is_aside(top[0]):
        _autograd._pop_saved_tensors_default_hooks()
        aside.append(top)
    try:
        yield
    finally:
        while aside:
            _autograd._push_saved_tensors_default_hooks(*aside.pop())


class _Unseen:
    """Torch's checkpoints find none of our hooks between a call of `begin` and the call of what that returned."""

    def __init__(self) -> None:
        self._askers: set[object] = set()
        self._original: Callable[[], Any] | None = None

    def begin(self) -> Callable[[], None]:
        if not self._askers and hasattr(checkpoint, _QUESTION):
            self._original = original = getattr(checkpoint, _QUESTION)

            def hooks_of_the_script() -> Any:
                with own_hooks_aside():
                    return original()

            setattr(checkpoint, _QUESTION, hooks_of_the_script)
        asker = object()
        self._askers.add(asker)
        return lambda: self._end(asker)

    def _end(self, asker: object) -> None:
        self._askers.discard(asker)
        if not self._askers and self._original is not None:
            setattr(checkpoint, _QUESTION, self._original)
            self._original = None


unseen_by_checkpoints = _Unseen().begin


def is_ours(pack: Any) -> bool:
    """Whether a pack hook is memadvisor's own."""
    return (getattr(pack, "__module__", None) or "").startswith(_OURS)
