"""How far off the first prediction of a published table was."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class First:
    """Shares of the measured step time and memory, as the first prediction had them; None where the table has none of it."""

    time_mape: float | None = None
    time_bias: float | None = None
    spearman: float | None = None
    memory_mape: float | None = None
    memory_bias: float | None = None
