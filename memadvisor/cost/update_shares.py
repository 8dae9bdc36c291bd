"""How much of an optimizer step this rank does, as fractions of what the captured one did: of its time, and of what the
optimizer allocates beside its state."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from fractions import Fraction
from functools import partial

from memadvisor.cost.own_updates import OwnUpdates
from memadvisor.cost.owners import Owned
from memadvisor.cost.states import UnitSizes
from memadvisor.cost.unit_sizes import largest_piece_share
from memadvisor.cost.widened_gradients import WidenedGradients

NOTHING_OWNED = Owned()


class UpdateShares:
    """Of the built-in engine. `trainable_bytes`, `sizes`, `stages`: by unit. `owned`: what the rank with most owns as wholes.

    early: units that are updated in the backward. apart: those that the optimizer step updates one after another, as
    where their state comes from elsewhere for that.
    together: whether an optimizer's temporaries are of all parameters at once. own: what they are of some units.
    """

    def __init__(
        self,
        trainable_bytes: Mapping[str, int],
        sizes: Mapping[str, UnitSizes],
        stages: Mapping[str, int],
        owned: Mapping[str, Owned],
        widened: WidenedGradients,
        *,
        num_ranks: int,
        early: Collection[str],
        apart: Collection[str],
        together: bool,
        own: OwnUpdates,
    ) -> None:
        self._trainable_bytes = trainable_bytes
        self._sizes = sizes
        self._stages = stages
        self._owned = owned
        self._widened = widened
        self._num_ranks = num_ranks
        self._late = [name for name in stages if name not in early]
        self._apart = apart
        self._together = together
        self._own = own
        self._all_bytes = sum(trainable_bytes.values())

    def late_temporaries(self, temporary_bytes: int, position: int) -> float | Fraction:
        """`temporaries` of what the optimizer step itself updates, where it has most; `temporary_bytes`: times that."""
        share_of = partial(self._late_temporaries, position=position)
        return self._widened.fullest(temporary_bytes, self._late, share_of)

    def _late_temporaries(self, names: Iterable[str], position: int) -> float | Fraction:
        """Where units are updated one after another, the one with most; or all others, which are updated at once."""
        names = tuple(names)
        rest = self.temporaries([name for name in names if name not in self._apart], position)
        return max((rest, *(self.temporaries((name,), position) for name in names if name in self._apart)))

    def late_time(self) -> float:
        """`time` of what the optimizer step itself updates at once."""
        return self.time(name for name in self._late if name not in self._apart)

    def temporaries(self, names: Collection[str], position: int | None = None) -> float | Fraction:
        """What an optimizer allocates beside its state to update these units in one step, in a segment of it; without one,
        where it is most.

        Its temporaries are as large as what it updates: one parameter after another, or all of a group together. So the
        fraction is this rank's largest piece of the largest parameter, or all its pieces of what the units' parameters had.
        """
        if self._together:
            return self._of_all_together(names, position)
        if not any(self._stages.values()):
            return 1.0
        return largest_piece_share(self._sizes, names)

    def _of_all_together(self, names: Collection[str], position: int | None) -> float | Fraction:
        updated = self.time(names)
        whole_bytes = sum(self._trainable_bytes[name] for name in names)
        whole = whole_bytes / self._all_bytes if self._all_bytes else 1.0
        own = self._own.share(names, position, whole)
        if own is None or not whole:
            return updated
        return own if updated == whole else float(own) * updated / whole

    def time(self, names: Iterable[str]) -> float:
        """Elements of these units that this rank updates, of those of all units."""
        own = 0.0
        for name in names:
            size_bytes = self._trainable_bytes[name]
            if not self._stages[name]:
                own += size_bytes
                continue
            own += (size_bytes - self._sizes[name].whole_bytes) / self._num_ranks
            own += self._owned.get(name, NOTHING_OWNED).parameter_bytes
        return own / self._all_bytes if self._all_bytes else 1.0


def shares_of_one_by_one(
    trained_bytes: Mapping[str, int], *, apart: Collection[str], together: bool, own: OwnUpdates
) -> UpdateShares:
    """Of a script's optimizer that has what it had when captured, so much of each unit, and updates units `apart` one after
    another."""
    stages = dict.fromkeys(trained_bytes, 0)
    widened = WidenedGradients({}, stages)
    return UpdateShares(
        trained_bytes,
        {},
        stages,
        {},
        widened,
        num_ranks=1,
        early=(),
        apart=apart,
        together=together,
        own=own,
    )


class UnchangedUpdates:
    """Of who updates as was captured: FSDP2 in the script, where a plan leaves that as it is."""

    def late_temporaries(self, temporary_bytes: int, position: int) -> float:
        return 1.0

    def late_time(self) -> float:
        return 1.0

    def temporaries(self, names: Collection[str], position: int | None = None) -> float:
        return 1.0

    def time(self, names: Iterable[str]) -> float:
        return 1.0
