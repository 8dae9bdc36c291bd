"""A tensor of no memory: what torch does with one without its dispatcher, on memory that is not here."""

from __future__ import annotations

from typing import Any

import torch

from memadvisor.errors import PlanError


class Elsewhere(torch.Tensor):
    """A tensor of no memory, whose values are on several ranks."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def full(self) -> torch.Tensor:
        """The whole values, in its shape; the other ranks need not take part."""
        raise NotImplementedError

    @property
    def data(self) -> Any:
        """Itself, which has no history."""
        return self

    @data.setter
    def data(self, values: torch.Tensor) -> None:
        """What it is given becomes its values."""
        if values is self:
            return
        if values.shape != self.shape or values.dtype != self.dtype:
            raise refused(f"data of {tuple(values.shape)} in {values.dtype}")
        with torch.no_grad():
            self.copy_(values.detach())

    def numpy(self, *, force: bool = False) -> Any:
        """Whole values, which nobody may write into: it would change nothing."""
        return _unwritable(self.full().numpy(force=force))

    def tolist(self) -> Any:
        """Whole values."""
        return self.full().tolist()

    def __array__(self, dtype: Any = None) -> Any:
        return _unwritable(self.full().__array__(dtype))  # type: ignore[no-untyped-call]

    def __dlpack__(self, **options: Any) -> Any:
        return self.full().__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return torch.empty(0, device=self.device).__dlpack_device__()

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return memo.setdefault(id(self), self.full())  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.full().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __repr__(self) -> str:  # type: ignore[override]  # torch's own has a private option
        return repr(self.full())


def refused(what: str) -> PlanError:
    """For the script to read."""
    return PlanError(
        f"The script changes gradients by {what}, which cannot be done on the shards that ZeRO stages 2 and 3 keep.",
        hint="use --zero 1, which keeps whole gradients.",
    )


def _unwritable(array: Any) -> Any:
    array.flags.writeable = False
    return array
