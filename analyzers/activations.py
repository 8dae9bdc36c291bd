"""What the forward keeps for the backward: by whom, how much, for how long."""

from __future__ import annotations

from dataclasses import dataclass

from memadvisor.run.run import RankRun


@dataclass(frozen=True, slots=True, kw_only=True)
class Lifetime:
    """One storage that autograd kept. Times are seconds since the traced step began.

    `module` and `unit` are those that saved it first; `operator` made it. `last_used_s` is its last use
    in the step, `released_s` when autograd let go of it; both None where that was not seen.
    """

    storage_id: int
    module: str
    unit: str
    micro_batch: int
    operator: str
    category: str
    dtype: str
    shape: str
    size_bytes: int
    born_s: float
    saved_s: float
    last_used_s: float | None
    released_s: float | None

    @property
    def kept_s(self) -> float | None:
        """From the first save to the release."""
        return None if self.released_s is None else self.released_s - self.saved_s


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedBytes:
    """What one unit or module keeps for the backward in one micro-batch (the one that kept most).

    A storage counts once, for the one that saved it first. Parameters, gradients and optimizer state do
    not count: they would be alive anyway. `by_operator_bytes` says which operators made it.
    """

    name: str
    unit: str
    saved_bytes: int
    num_storages: int
    by_operator_bytes: dict[str, int]  # largest first


@dataclass(frozen=True, slots=True, kw_only=True)
class Activations:
    """Everything that autograd kept in the traced step.

    `saved_bytes` is what one micro-batch keeps (the one that kept most); units and modules are in order of
    first save, and their bytes sum to it where one micro-batch was the largest for all of them.
    """

    saved_bytes: int
    units: tuple[SavedBytes, ...]
    modules: tuple[SavedBytes, ...]
    lifetimes: tuple[Lifetime, ...]  # in order of birth
    largest: tuple[Lifetime, ...]  # 20, by bytes
    longest: tuple[Lifetime, ...]  # 20, by kept_s


def activations(rank: RankRun) -> Activations | None:
    """Join saved tensors with their storages. None when no step was traced."""
    raise NotImplementedError
