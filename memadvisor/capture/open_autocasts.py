"""How many `torch.autocast` are open around what runs, whether they switch it on or off.

Of a script that computes in float32 the one that is open in the midst of a forward switches it off: it would be on else.
"""

from __future__ import annotations

from time import time_ns

import torch

# torch tells how many are open where it counts one more. It does nothing else there: what closes the last one and empties
# the cache of casts is Python code of `torch.autocast` itself.
_one_more, _one_less = torch.autocast_increment_nesting, torch.autocast_decrement_nesting


class OpenAutocasts:
    """`nestings`: (when, how many were open from then on), wherever that was seen to have changed."""

    def __init__(self, nestings: list[tuple[int, int]]) -> None:
        self._nestings = nestings
        self._last = -1

    def count(self) -> None:
        num_open = _one_more() - 1
        _one_less()
        if num_open != self._last:
            self._last = num_open
            self._nestings.append((time_ns(), num_open))
