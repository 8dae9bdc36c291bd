"""How often Python looks for garbage while plans are searched.

A search makes millions of small objects beside a run of as many that stay. All die with their last reference: nothing in
a search refers to what it is held by. So there is no garbage to find, and looking for it at Python's own rate costs a
fifth of the search's time.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

_NUM_OBJECTS = 1_000_000  # made, and not gone again, between two looks


@contextlib.contextmanager
def collecting_seldom() -> Iterator[None]:
    """Within it the collector runs seldom, unless it is switched off anyway; afterwards as it did."""
    before = gc.get_threshold()
    if before[0]:
        gc.set_threshold(max(before[0], _NUM_OBJECTS), *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
