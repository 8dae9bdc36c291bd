"""memadvisor's saved-tensor hooks, set aside while a collective is begun.

Work of a process group keeps the state of the thread that began it, with the saved-tensor hooks in force, for as long as
Gloo's own threads have it. The last of them would let go of the hooks' Python objects, and wait for the GIL to do so;
a DistributedDataParallel that dies as the last owner of its group holds the GIL, and waits for that thread: for ever.
Without memadvisor nothing of Python's is in that state, so nothing may be with it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch._C import _autograd

_OURS = f"{__name__.partition('.')[0]}."


@contextlib.contextmanager
def own_hooks_aside() -> Iterator[None]:
    """No saved-tensor hook of memadvisor's is in force on this thread, unless one of the script's lies above it."""
    aside: list[tuple[Callable[[Any], Any], Callable[[Any], Any]]] = []
    while (top := _autograd._top_saved_tensors_default_hooks(False)) and _is_ours(top[0]):
        _autograd._pop_saved_tensors_default_hooks()
        aside.append(top)
    try:
        yield
    finally:
        while aside:
            _autograd._push_saved_tensors_default_hooks(*aside.pop())


def _is_ours(pack: Any) -> bool:
    return (getattr(pack, "__module__", None) or "").startswith(_OURS)
