"""What all dispatch modes of memadvisor are."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from memadvisor.tensor_classes import a_mode_has_ended, a_mode_is_on


class OwnMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that torch.compile goes on under."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        # Without this a mode switches torch.compile off, for good.
        return True

    def __enter__(self) -> Any:
        entered = super().__enter__()  # type: ignore[no-untyped-call]  # of torch, untyped
        a_mode_is_on()
        return entered

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        a_mode_has_ended()
