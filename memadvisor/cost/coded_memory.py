"""What the optimizer state of a unit takes that is kept in codes between updates (memadvisor/engines/lanes/coded_tier.py)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from memadvisor.coded_states import coded_bytes, scratch_bytes
from memadvisor.cost.flats import piece_elements
from memadvisor.cost.states import UnitStates


@dataclass(frozen=True, slots=True, kw_only=True)
class CodedMemory:
    """`resting_bytes`: codes, and what stays as it is. `decoded_bytes`: what is expanded for the update.
    `scratch_bytes`: beside that, while it is coded.
    """

    resting_bytes: int = 0
    decoded_bytes: int = 0
    scratch_bytes: int = 0


def coded_memory(
    units: Mapping[str, tuple[UnitStates, int, Fraction]], device: str
) -> dict[str, CodedMemory]:
    """By unit, of the rank that holds most in all.

    units: with the number of ranks that share its optimizer state (1 where each rank has all of it), and how much wider
    an element is where the optimizer has another dtype than in the plain run.
    """
    num_ranks = max((num_sharing for _, num_sharing, _ in units.values()), default=1)
    found = [
        {
            name: _of_rank(states, num, rank if num > 1 else 0, wider, device)
            for name, (states, num, wider) in units.items()
        }
        for rank in range(num_ranks)
    ]
    return max(found, key=lambda memories: sum(memory.resting_bytes for memory in memories.values()))


def _of_rank(states: UnitStates, num_ranks: int, rank: int, widening: Fraction, device: str) -> CodedMemory:
    resting = decoded = Fraction(0)
    largest = 0
    for name, count in piece_elements(states, num_ranks, rank).items():
        for item_bytes, is_coded in states.state_items.get(name, ()) if count else ():
            plain = count * item_bytes * widening
            if is_coded:
                largest = max(largest, count)
                decoded += plain
            resting += coded_bytes(count) if is_coded else plain
    return CodedMemory(
        resting_bytes=math.ceil(resting),
        decoded_bytes=math.ceil(decoded),
        scratch_bytes=scratch_bytes(largest, device),
    )
