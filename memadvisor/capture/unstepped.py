"""Trainings whose weights no optimizer of torch.optim updates, and trainings that other processes do."""

from __future__ import annotations

from collections.abc import Callable

from memadvisor.capture.children import of_other_processes
from memadvisor.capture.optimizer_hooks import compiled_updates
from memadvisor.capture.updates import existing_optimizers
from memadvisor.run.remote import uses_rpc

_UNCALLED = (
    "No call of the model was seen: it is compiled together with its caller, or its class calls forward "
    "itself, past the hooks of torch.nn.Module. Of its forward only the parts that are called as modules are seen, with "
    "what these were given as samples; the rest of its time counts as outside, and of its memory the phase alone is known."
)
_CALLED_ELSEWHERE = (
    "No call of the model was seen: other processes call it, or copies of it, over torch.distributed.rpc. The time between "
    "its updates counts as outside."
)
_GRADIENTS_FROM_ELSEWHERE = (
    "No call of the model was seen, nor a backward pass: its gradients are given to it here, as a server of parameters gets "
    "them from its workers. The time between its updates counts as outside."
)
_OVER_RPC = (
    "What goes over torch.distributed.rpc is not seen: backward passes of torch.distributed.autograd, updates of its "
    "DistributedOptimizer, parts of the model in other processes."
)
LOOSE = (
    "What is trained is no module's: the optimizer's tensors count as parameters, the time of the forward as outside, "
    "and of its memory the phase alone is known."
)


Note = Callable[[str, str], None]  # a level and a text


class BackwardSteps:
    """Whether backward passes stand for training steps: where nothing could step that torch.optim knows of.

    Decided from the second pass on, as an optimizer may be made after a first trial pass. Looking through
    all objects takes some 30 ms, so where optimizers exist that have not stepped yet (gradients are being
    accumulated, or they never will), it is done again after 4, 8, 16, ... passes only.

    Where some passes give parameters their gradients, those that `torch.autograd.grad` makes for something else are none of
    a training: what is best to measure next, as a model that has just been fitted says.

    Where an optimizer's step is compiled together with its caller, nothing tells when it begins or ends, only that it came:
    a step ends with the first pass behind each.
    """

    NOTE = (
        "No optimizer of torch.optim was found: each backward pass counts as one step, which ends with the pass "
        "(the first step holds two). What updates the weights counts as outside, in the next step."
    )

    NOTE_OF_COMPILED = (
        "The optimizer's step is compiled together with its caller, and not seen: a training step ends with the first backward "
        "pass behind each of its updates (the first one holds two). What updates the weights counts as outside, in the next step."
    )

    def __init__(self) -> None:
        self.num_passes = 0
        self._updates_are_compiled = False
        compiled_updates.take()  # one that came before is none of this training's
        self.has_begun = False
        self.has_seen_pass = False
        self._has_reached_parameters = False
        self._is_counted = True

    def enter_pass(self, is_for_parameters: bool) -> bool:
        """True: it is known to be none of the training's."""
        self.has_seen_pass = True
        self._has_reached_parameters |= is_for_parameters
        self._is_counted = is_for_parameters or not self._has_reached_parameters
        return self.has_begun and not self._is_counted

    def ends_step(self, note: Note) -> bool:
        """Count a pass: whether a step ends with it."""
        if not self._is_counted:
            return False
        self.num_passes += 1
        if compiled_updates.take():
            if not self.has_begun:
                self.has_begun = self._updates_are_compiled = True
                note("warning", self.NOTE_OF_COMPILED)
            return True
        if self._updates_are_compiled:
            return False
        is_power_of_two = self.num_passes & (self.num_passes - 1) == 0
        if not self.has_begun and self.num_passes >= 2 and is_power_of_two and not existing_optimizers():
            self.has_begun = True
            note("warning", self.NOTE)
        return self.has_begun

    def see_first_update(self, note: Note, *, has_traced: bool) -> None:
        """An optimizer steps: from now on its updates end the steps."""
        if self.has_begun:
            traced = (
                f", and the traced step is one of these: --trace-step {self.num_passes + 1} traces another."
            )
            note(
                "warning",
                "An optimizer steps after all, behind backward passes that counted as steps"
                + (traced if has_traced else "."),
            )


def note_of_uncalled(had_backward: bool) -> str:
    """What to say of a model that is updated, and no call of which was seen."""
    if uses_rpc():
        return _CALLED_ELSEWHERE
    return _UNCALLED if had_backward else _GRADIENTS_FROM_ELSEWHERE


def what_was_seen(has_model: bool, passes: BackwardSteps) -> str:
    """Why there is no training step, and what to do where other processes worked."""
    seen = "No training step was seen: no model was called"
    if has_model:
        number = passes.num_passes or "no"
        seen = (
            f"No training step was seen: a model was called, with {number} backward "
            f"pass{'es' if passes.num_passes > 1 else ''}{' and' if number == 'no' else ', but'} no step of an optimizer"
        )
    if uses_rpc():
        return f"{seen}. {_OVER_RPC}"
    elsewhere = of_other_processes()
    return f"{seen} in this process; {elsewhere}." if elsewhere else f"{seen}."
