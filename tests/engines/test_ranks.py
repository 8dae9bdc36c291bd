"""Ranks that are kept from one case to the next, as if each were the first."""

from __future__ import annotations

import torch

from memadvisor.run.compiled import has_compiled
from tests.engines.ranks import run_ranks


def compiled(rank: int) -> bool:
    before = has_compiled()
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
    return not before and has_compiled()


def test_no_case_is_told_of_what_another_one_has_compiled():
    """Nothing would be left behind an optimizer step then, nor updated in the backward."""
    for _ in range(2):
        assert all(run_ranks(compiled, 2))
