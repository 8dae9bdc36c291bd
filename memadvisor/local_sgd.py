"""Local SGD: ranks that step on gradients of their own, and whose parameters are averaged now and then. Pure data.

Local SGD (Stich 2018, arXiv:1805.09767) after steps without it (post-local SGD: Lin, Stich, Patel and Jaggi 2018,
arXiv:1808.07217), as torch has it in `post_localSGD_hook` and `PeriodicModelAverager`. A *step* is here a backward
after which DDP would reduce: all ranks count those alike, which updates are not (a GradScaler leaves out one rank's).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from memadvisor.errors import PlanError, UsageError
from memadvisor.units import counted

_SPELLING = re.compile(r"(?P<period>\d{1,9})(,warmup=(?P<warmup>\d{1,9}))?", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalSgd:
    """The first `warmup_steps` steps reduce gradients as usual; after that none does, and after each `period` of them
    parameters become their mean over the ranks, when the optimizer has stepped."""

    period: int
    warmup_steps: int = 0

    def is_local(self, num_before: int) -> bool:
        """Whether the step that `num_before` others went before reduces nothing."""
        return num_before >= self.warmup_steps

    def is_averaged_after(self, num_steps: int) -> bool:
        """Whether parameters are averaged when so many steps are over."""
        num_local = num_steps - self.warmup_steps
        return num_local > 0 and num_local % self.period == 0


def parse_local_sgd(text: str) -> LocalSgd:
    """`8`, or `8,warmup=100`. Raises UsageError."""
    found = _SPELLING.fullmatch(text)
    if found is None:
        raise UsageError(
            f"--local-sgd {text!r} is no period.",
            hint="give the steps between two averages, and how many reduce as usual before: 8 or 8,warmup=100.",
        )
    return LocalSgd(period=int(found["period"]), warmup_steps=int(found["warmup"] or 0))


def local_sgd_text(local_sgd: LocalSgd | None) -> str:
    """In a few words that follow others, after a comma; nothing without it."""
    if local_sgd is None:
        return ""
    later = f" after {local_sgd.warmup_steps}" if local_sgd.warmup_steps else ""
    return f", parameters averaged every {local_sgd.period} steps{later} (local SGD)"


def local_sgd_loss_text(local_sgd: LocalSgd) -> str:
    """What is not summed, in words."""
    period, warmup_steps = local_sgd.period, local_sgd.warmup_steps
    since = f"after the first {counted(warmup_steps, 'step').removeprefix('1 ')} " if warmup_steps else ""
    return (
        f"{since}each rank steps on its own gradients, and parameters become their mean over the ranks every {period} steps "
        "(local SGD); in between ranks differ, and what they save is their own. Losses will differ from those without it."
    )


def check_local_sgd(
    local_sgd: LocalSgd | None,
    num_ranks: int,
    stages: Collection[int],
    others: Mapping[str, bool],
    source: str,
) -> None:
    """Raise PlanError, naming `source`, where it cannot be had. `others`: what does not go with it, and whether it is there."""
    if local_sgd is None:
        return
    if local_sgd.period < 1 or local_sgd.warmup_steps < 0:
        raise PlanError(
            f"{source} has local SGD with period {local_sgd.period} and {counted(local_sgd.warmup_steps, 'step')} before.",
            hint="the period is 1 or more, the steps before it 0 or more.",
        )
    where = "one rank" if num_ranks == 1 else f"ZeRO stage {max(stages)}" if max(stages) else None
    if where is not None:
        raise PlanError(
            f"{source} has local SGD with {where}.",
            hint="it averages whole parameters of several ranks: it needs those, and stage 0 for every unit.",
        )
    for what, is_there in others.items():
        if is_there:
            raise PlanError(f"{source} has local SGD and {what}.", hint="leave one of them out.")
