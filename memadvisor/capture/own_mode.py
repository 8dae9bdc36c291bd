"""What all dispatch modes of memadvisor are."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode


class OwnMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that torch.compile goes on under."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        # Without this a mode switches torch.compile off, for good.
        return True
