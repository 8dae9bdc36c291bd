"""What plans have because it was asked for: it changes results, or rounds them otherwise, so no search chooses it."""

from __future__ import annotations

from dataclasses import dataclass

from memadvisor.chunked_loss import ChunkedLoss
from memadvisor.compression import UNCOMPRESSED, Compression
from memadvisor.local_sgd import LocalSgd
from memadvisor.precision import FULL_PRECISION, Precision


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Fields are those of `Plan`; `optimizer_bits` is of all units."""

    precision: Precision = FULL_PRECISION
    compression: Compression = UNCOMPRESSED
    local_sgd: LocalSgd | None = None
    optimizer_bits: int | None = None
    fused_updates: bool = False
    chunked_loss: ChunkedLoss | None = None
    autocast: str | None = None

    @property
    def script_changes(self) -> tuple[str, ...]:
        """The kinds of changes of the script that are done by the plans."""
        done = {
            "fused_updates": self.fused_updates,
            "chunked_loss": self.chunked_loss is not None,
            "autocast": self.autocast is not None,
            "narrow_products": self.autocast is not None,
        }
        return tuple(kind for kind, is_done in done.items() if is_done)


NOTHING = Asked()
