"""Which of the script's models a plan is for, and what it says of each.

A plan of one model is for the one that has its fingerprint. A plan of several is for the first model of each of their
fingerprints that the script calls with gradients (or wraps in DDP), trainable where the plan's is: a frozen copy of a policy
has the policy's fingerprint, and is another model. All others are left alone, as the plan's prediction has them. A plan made
by hand is for the first model, and where that is a stage of a pipeline, for all of the rank's stages.
"""

from __future__ import annotations

import weakref

import torch
import torch.distributed as dist

from memadvisor.engines.script.live import LiveModel, model_fingerprint, read_model
from memadvisor.engines.script.new_optimizers import NewOptimizers
from memadvisor.engines.script.stages import is_stage
from memadvisor.errors import PlanError
from memadvisor.in_making import is_in_making
from memadvisor.plan import Plan
from memadvisor.run.cut import unwrap
from memadvisor.run.living import living_modules
from memadvisor.schedule import Schedule
from memadvisor.write_schedule import write_schedule

_HINT = "profile this script and make its plan with `memadvisor advise`."
# A model may get its parameters in its first calls; after so many it is another than the plan's, and left alone for good.
_MOST_LOOKS = 3


class NotPlannedError(PlanError):
    """A model is none of the plan's."""


def unmet(plan: Plan) -> PlanError:
    """What is wrong where an optimizer steps and no model follows the plan."""
    # Without a process group the script knows of no ranks, and a call of its model would have begun one (single_process.py).
    if plan.num_ranks == 1 or not (dist.is_available() and dist.is_initialized()):
        return PlanError(
            "The optimizer stepped before the plan's model was called with gradients: the script trains another model "
            "first, calls this one inside an autograd function of its own alone (as adjoint methods do), calls the model's "
            "forward itself, past the hooks of torch.nn.Module, or compiles the whole model in place (model.compile()).",
            hint="let the script call the model, as in model(inputs), and compile it by model = torch.compile(model); memadvisor "
            "still profiles it as it is.",
        )
    return PlanError(
        f"The plan is for {plan.num_ranks} ranks, and the script does not use "
        "DistributedDataParallel: its parallelism is its own.",
        hint="wrap its model in torch.nn.parallel.DistributedDataParallel, or let `memadvisor advise RUN --memory SIZE`, without "
        "other options, choose what all ranks recompute alike.",
    )


class PlannedModels:
    """The models of a plan that have not been met yet, and the script's that are in none. Modules are held weakly."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._due = list(plan.models)
        self._met: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._kinds: set[tuple[str, bool]] = set()  # of those that have been met
        self._others: weakref.WeakKeyDictionary[torch.nn.Module, bool] = weakref.WeakKeyDictionary()
        self._parts: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()  # of models that were met
        self._num_looks: weakref.WeakKeyDictionary[torch.nn.Module, int] = weakref.WeakKeyDictionary()
        self._is_stage: weakref.WeakKeyDictionary[torch.nn.Module, bool] = weakref.WeakKeyDictionary()
        self._stages: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()  # that a plan made by hand has met

    @property
    def is_complete(self) -> bool:
        """Whether all models of the plan have been met."""
        return not self._due

    def may_be_due(self, root: torch.nn.Module) -> bool:
        """Whether a model that is called may be one of the plan's, as far as is known without a look at all of it."""
        if not any(True for _ in root.parameters()) or is_in_making(root):
            return False
        is_trainable = _is_trainable(root)
        if not self.plan.models:
            return is_trainable and self._num_looks.get(root, 0) < _MOST_LOOKS
        # Called again: another of its fingerprint is another of the plan's models. A second run calls parts by themselves.
        if root in self._met or root in self._parts:
            return False
        return bool(self._due) and self._others.get(root) is not is_trainable

    def is_further(self, root: torch.nn.Module, new: NewOptimizers) -> bool:
        """Whether a model is to follow the plan, too, though all of the plan's have been met."""
        if root in self._met and new.is_waiting:
            new.wait()  # a new optimizer for the same model
        return self._is_further_stage(root) or self._is_made_anew(root, new)

    def _is_made_anew(self, root: torch.nn.Module, new: NewOptimizers) -> bool:
        """A model of the same kind as one that was met, which a new optimizer trains; it is due again."""
        if root in self._met or not new.train(root) or _kind(root) not in self._kinds:
            return False
        self.expect_again(root)
        return True

    def _is_further_stage(self, root: torch.nn.Module) -> bool:
        """Whether a plan made by hand is for this model too: another stage of the pipeline whose stage it has met."""
        return bool(self._stages) and root not in self._stages and self._is_a_stage(root)

    def _is_a_stage(self, root: torch.nn.Module) -> bool:
        if root not in self._is_stage:
            self._is_stage[root] = is_stage(root)
        return self._is_stage[root]

    def read(self, root: torch.nn.Module) -> tuple[LiveModel, Schedule]:
        """A model of the plan as units, and what is to be done with them. Raises PlanError, NotPlannedError for a model that
        the plan is not for."""
        self._num_looks[root] = self._num_looks.get(root, 0) + 1
        plan, name = self._plan_for(root)
        model = read_model(root, name, {unit.name for unit in plan.units})
        strange = {unit.name for unit in plan.units} - {unit.name for unit in model.units}
        if strange:
            raise NotPlannedError(
                f"The plan is for another model: {type(root).__name__} has no unit {min(strange)!r}.",
                hint=_HINT,
            )
        self._due = [model for model in self._due if model.name != name]
        self._met.add(root)
        self._parts.update(module for module in root.modules() if module is not root)
        self._kinds.add(_kind(root))
        return model, write_schedule(plan, model.rows)

    def expect_again(self, root: torch.nn.Module) -> None:
        """A model of the plan has been given back to the script, which is about to train it in another way."""
        found = _kind(root)
        known = {model.name for model in self._due}
        again = (
            m for m in self.plan.models if m.name not in known and (m.fingerprint, m.is_trainable) == found
        )
        self._due += list(again)[:1]
        self._met.discard(root)

    def owner_of(self, part: torch.nn.Module) -> torch.nn.Module:
        """The module around `part` that the plan is for, where the script calls its parts alone; else `part` itself.

        ZeRO, and parameters that lie elsewhere between their uses, need the calls of the model itself.
        """
        needs_calls = self.plan.num_ranks > 1 or self.plan.parameter_tiers != {"device"}
        wanted = {self.plan.fingerprint} if not self._due else {model.fingerprint for model in self._due}
        if needs_calls or not wanted.isdisjoint((None, model_fingerprint(part))):
            return part
        modules: list[torch.nn.Module] = living_modules(torch.nn.Module)
        for module in modules:
            is_around = unwrap(module) is module and any(each is part for each in module.modules())
            if is_around and model_fingerprint(module) in wanted:
                return module
        return part

    def _plan_for(self, root: torch.nn.Module) -> tuple[Plan, str]:
        """What the plan says of a model, and the name that its units' names begin with."""
        found = model_fingerprint(root)
        if not self.plan.models:
            if self.plan.num_ranks > 1 and self._is_a_stage(root):
                return self.plan, self._name_of_stage(root)
            if self.plan.fingerprint not in (None, found):
                raise NotPlannedError(
                    f"The plan is for another model: its fingerprint is {self.plan.fingerprint}, "
                    f"that of {type(root).__name__} is {found}.",
                    hint=_HINT,
                )
            return self.plan, ""
        is_trainable = _is_trainable(root)
        for model in self._due:
            if (model.fingerprint, model.is_trainable) == (found, is_trainable):
                return self.plan.of_model(model), model.name
        self._others[root] = is_trainable
        planned = " and ".join(
            f"{model.name or 'the first'} ({model.fingerprint})" for model in self.plan.models
        )
        raise NotPlannedError(
            f"The plan is for other models: of those of its script for {planned}, and {type(root).__name__} has "
            f"{'a' if is_trainable else 'no'} trainable parameter and the fingerprint {found}.",
            hint=_HINT,
        )

    def _name_of_stage(self, root: torch.nn.Module) -> str:
        """Of a plan that says the same of all ranks, which must be one made by hand."""
        if self.plan.units:
            raise PlanError(
                f"The plan names units of one model, and {type(root).__name__} is a stage of a pipeline.",
                hint="give choices by rank, as `memadvisor advise` writes them, or a --policy for all stages.",
            )
        name = f"model{len(self._stages)}" if self._stages else ""
        self._stages.add(root)
        return name

    def refuse_strangers(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise PlanError where an optimizer updates a model that is none of the plan's, and one of those is still due."""
        if not self._due:
            return
        own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for root in list(self._others):
            if any(id(parameter) in own for parameter in root.parameters()):
                self._plan_for(root)


def _kind(root: torch.nn.Module) -> tuple[str, bool]:
    return model_fingerprint(root), _is_trainable(root)


def _is_trainable(root: torch.nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in root.parameters())
