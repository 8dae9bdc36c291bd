"""What all dispatch modes of memadvisor are."""

from __future__ import annotations

from memadvisor.tensor_classes import SteppingAside


class OwnMode(SteppingAside):  # type: ignore[no-untyped-call]
    """A mode that torch.compile goes on under."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        # Without this a mode switches torch.compile off, for good.
        return True
