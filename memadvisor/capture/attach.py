"""Start the recorder when the script imports torch, not before.

What the script sets up before that import (OMP_NUM_THREADS, CUDA_VISIBLE_DEVICES) must still work.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any


def when_torch_is_imported(callback: Callable[[], None]) -> None:
    """Call `callback` once: now if torch is there already, else right after its import has finished."""
    if "torch" in sys.modules:
        callback()
    else:
        sys.meta_path.insert(0, _TorchFinder(callback))


class _TorchFinder(importlib.abc.MetaPathFinder):
    """Finds torch as everybody else would, and adds one call after its code has run.

    It stays until then: who asks whether torch is there (`importlib.util.find_spec`) need not import it.
    """

    def __init__(self, callback: Callable[[], None]) -> None:
        self._callback = callback

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "torch":
            return None
        for finder in [each for each in sys.meta_path if each is not self]:
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    _call_after_loading(spec.loader, self._loaded)
                return spec
        return None

    def _loaded(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)
            self._callback()


def _call_after_loading(loader: Any, callback: Callable[[], None]) -> None:
    original = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        original(module)
        del loader.exec_module
        callback()

    loader.exec_module = exec_module
