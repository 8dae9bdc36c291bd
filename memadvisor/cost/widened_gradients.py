"""What stage 1 casts of gradients for an optimizer that updates masters in a wider dtype (engines/updates/cast_updates.py)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from fractions import Fraction

from memadvisor.cost.states import UnitSizes


class WidenedGradients:
    """Bytes beside the whole gradients while the optimizer steps: of one unit, this rank's pieces in the masters' dtype.

    Units that cast are updated one after another, and all others at once.
    """

    def __init__(self, sizes: Mapping[str, UnitSizes], stages: Mapping[str, int]) -> None:
        cast = {name: each.master_bytes for name, each in sizes.items() if stages[name] == 1}
        self._bytes = {name: size for name, size in cast.items() if size}
        self._now = max(
            self._bytes, key=self._bytes.__getitem__, default=None
        )  # the unit that is being updated

    def held(self) -> dict[tuple[str, str], int]:
        """Those of the unit that is being updated, by category and unit."""
        return {} if self._now is None else {("gradient", self._now): self._bytes[self._now]}

    def fullest(
        self,
        temporary_bytes: int,
        names: Collection[str],
        share_of: Callable[[Iterable[str]], float | Fraction],
    ) -> float | Fraction:
        """Be where a step that updates these units has most beside the states, and give `share_of` what is updated there.

        temporary_bytes: what the optimizer itself allocates meanwhile, times that share.
        """
        rest = [name for name in names if name not in self._bytes]
        shares: dict[str | None, float | Fraction] = {n: share_of((n,)) for n in names if n in self._bytes}
        if rest or not shares:
            shares[None] = share_of(rest)
        self._now = max(
            shares, key=lambda n: shares[n] * temporary_bytes + (0 if n is None else self._bytes[n])
        )
        return shares[self._now]
