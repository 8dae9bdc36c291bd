"""A plan in force in the processes of one run: this one, and the ranks that its script starts by itself."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from memadvisor.capture.session import rank_identity
from memadvisor.plan import Plan
from memadvisor.run.launch import launch_id
from memadvisor.run.say import say
from memadvisor.run.store import journals_of
from memadvisor.units import counted

if TYPE_CHECKING:
    from collections.abc import Callable

    from memadvisor.capture.recorder import Recorder
    from memadvisor.engines.applied import Applied

# What is in force in this process; a fork takes it along.
_in_force: list[Applied] = []


@dataclass(frozen=True, slots=True)
class Application:
    """Installs the plan as soon as torch is there, recorded or not; ranks that the script spawns get it pickled."""

    plan: Plan

    def __call__(self, recorder: Recorder | None) -> None:
        from memadvisor.engines.apply import install
        from memadvisor.engines.lanes.transfers import moved_within
        from memadvisor.engines.pipelines import install_stage

        rank = rank_identity().rank if recorder is None else recorder.rank

        def note(level: str, text: str) -> None:
            if recorder is not None:
                recorder.note(level, text)
            if rank == 0:
                say(f"memadvisor: {text}")

        while _in_force:  # a forked rank's parent has met no model: what it installed is taken off whole
            _in_force.pop().remove()
        label = None if recorder is None else recorder.label
        if self.plan.ranks:
            applied = install_stage(self.plan, rank, label=label, note=note)
        else:
            applied = install(self.plan, label=label, note=note)
        if recorder is not None:

            def check_first(num_samples: int) -> bool:
                """Not before a model follows the plan: of a script that it is not for, that alone is said."""
                if applied.is_attached:
                    _check_batch(self.plan, num_samples, note)
                return applied.is_attached

            recorder.on_first_batch = check_first
            recorder.label_sources.append(applied.labelled_tensors)
            recorder.tell_transfers(moved_within)
            applied.recompute.watch = recorder.hooks.second_run
        _in_force.append(applied)


def is_applied_to_nothing(directory: Path) -> bool:
    """Whether no model of this process follows the plan, nor of one that its script has started and that is recorded."""
    if any(applied.is_attached for applied in _in_force):
        return False
    return launch_id() is not None or len(journals_of(directory)) <= 1


def _check_batch(plan: Plan, num_samples: int, note: Callable[[str, str], None]) -> None:
    """A plan cannot set the script's own micro-batch; say so where the script has not been told."""
    if plan.micro_batch_size is not None and plan.micro_batch_size != num_samples:
        note(
            "warning",
            f"The plan's prediction is for micro-batches of {counted(plan.micro_batch_size, 'sample')}, and the script's first "
            f"has {num_samples}: set the script's own micro-batch to {plan.micro_batch_size} and its gradient "
            f"accumulation to {plan.grad_accum}.",
        )
