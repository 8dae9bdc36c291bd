"""Modules that only ask the model inside them, without gradients, and are called before it or beside it: an estimator of
advantages that holds the critic. Such a module is no model, what it holds is.

Its call looks as a model's does (a decorator switches gradients off behind torch's hooks), but what it calls is called
without gradients, until the script calls that itself, with them. Whatever holds parameters of its own, or has run a part with
gradients, is a model; so is all that is known once something has been trained.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from memadvisor.capture.module_info import ModuleInfo


class Askers:
    """Told of calls of modules that are of a known model, until an optimizer has stepped."""

    def __init__(self) -> None:
        self._models: set[str] = (
            set()
        )  # names of those whose parts were called with gradients, inside their own call
        self.is_over = False

    def may_be_asked(self, info: ModuleInfo, around: Sequence[ModuleInfo]) -> bool:
        """Whether this module of a model, called inside those, may be the model itself."""
        if not info.is_of_model or info.is_around or not torch.is_grad_enabled():
            return False
        if around:
            self._models.add(info.model)
        return not (around or info.is_root or info.model in self._models)


def is_all_of(part: torch.nn.Module, root: torch.nn.Module) -> bool:
    """Whether all parameters are the part's."""
    return {id(each) for each in part.parameters()} == {id(each) for each in root.parameters()}
