"""What a step without autocast tells of itself that matters under it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class IdleCast:
    """In a call of a model the script cast a tensor on this storage, which is float32, to float32: nothing happened.

    `operator`: aten::to (`x.float()` as well), aten::type_as, or what casts its operand before anything else (aten::softmax
    with a dtype). `shape`: the tensor's. `like_id`: the storage whose dtype was asked for, None where float32 was.
    """

    time_s: float
    storage_id: int
    operator: str
    shape: str
    like_id: int | None


@dataclass(frozen=True, slots=True)
class AutocastOff:
    """In a call of a model the script had autocast switched off from `start_s` to `end_s`, which was not on anyway."""

    start_s: float
    end_s: float
