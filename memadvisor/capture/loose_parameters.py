"""What an optimizer trains and no module has: weights that the script keeps itself, and calls its model with.

Where they are one for one what the model has (`torch.func.functional_call`), they are its parameters, by its names, and what
the model has is a copy that nothing trains, or shapes alone (on the meta device). Where they are of other shapes, as those of an
ensemble are, stacked, they have numbers for names.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch

Named = tuple[str, str, torch.Tensor]  # name, unit, parameter


class LooseParameters:
    """Those that were met; holds no strong reference to any of them."""

    def __init__(self) -> None:
        self._unnamed: list[weakref.ref[torch.Tensor]] = []
        self._of_model: dict[str, weakref.ref[torch.Tensor]] = {}

    def meet(self, own: Sequence[Named], trained: Sequence[torch.Tensor]) -> bool:
        """An optimizer's tensors that are no module's are parameters, where the models that are known have none with
        memory, or as many of the same shapes; else they are masters of a model's. False: there are none.

        A model that has got gradients is trained by them itself, through masters as large as what it has.
        """
        known = [each for *_, each in own if each.device.type != "meta"]
        loose = [each for each in trained if each.is_leaf and each.requires_grad]
        if not known or _kinds(known) == _kinds(trained):
            if _kinds([each for *_, each in own]) == _kinds(loose) and all(
                each.grad is None for *_, each in own
            ):
                self._name(own, loose)
            else:
                self._unnamed += [weakref.ref(each) for each in loose]
        return bool(self._unnamed or self._of_model)

    def _name(self, own: Sequence[Named], loose: Sequence[torch.Tensor]) -> None:
        """After the model's of the same shapes, in order."""
        left: defaultdict[tuple[tuple[int, ...], str], list[torch.Tensor]] = defaultdict(list)
        for each in loose:
            left[_kind(each)].append(each)
        for name, _, parameter in own:
            self._of_model[name] = weakref.ref(left[_kind(parameter)].pop(0))

    def in_place_of(self, name: str, parameter: torch.Tensor) -> torch.Tensor:
        """What is trained in the place of a model's parameter; itself, where nothing is."""
        found = self._of_model.get(name)
        loose = None if found is None else found()
        return parameter if loose is None else loose

    def unnamed(self) -> Iterator[Named]:
        for number, reference in enumerate(self._unnamed):
            loose = reference()
            if loose is not None:
                yield f"({number})", "", loose


def _kinds(tensors: Sequence[torch.Tensor]) -> list[tuple[tuple[int, ...], str]]:
    return sorted(_kind(each) for each in tensors)


def _kind(tensor: torch.Tensor) -> tuple[tuple[int, ...], str]:
    return tuple(tensor.shape), str(tensor.dtype)
