"""What a script with DistributedDataParallel may have that the engine does not do in its place: such ranks get plans of what
all of them recompute alone (tensor_parallel.py), which leave DistributedDataParallel as it is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from memadvisor.errors import UsageError
from memadvisor.run.documents import LATER_HOOK
from memadvisor.run.records import Span
from memadvisor.run.run import RankRun, Run

# Of the parameters' bytes: a norm or a loss is less, and may be brought together in a closure or a hook of a step, which
# share nothing out.
_NOTICEABLE = 0.05


@dataclass(frozen=True, slots=True)
class OwnUpdates:
    """what: in words. instead: what to change in the script for other plans."""

    what: str
    instead: str


_HOOK = OwnUpdates(
    "a communication hook of DistributedDataParallel (register_comm_hook)",
    "take the hook out (`--reduce-bits` and the like send less, too)",
)
_JOIN = OwnUpdates(
    "torch's Join, for ranks that run out of data before others", "give all ranks as many batches"
)
_REPLICATE = OwnUpdates(
    "torch's composable `replicate`, whose DistributedDataParallel has a list of the model's parameters and never sees a call "
    "of the model",
    "wrap the model in DistributedDataParallel",
)
_ZERO = OwnUpdates(
    "a ZeroRedundancyOptimizer, which shares out its states itself",
    "put the optimizer that it wraps in its place",
)
_LOCAL = OwnUpdates(
    "updates on gradients that DistributedDataParallel is told not to average (`no_sync`), as local SGD has them",
    "have each update follow an average (memadvisor's own local SGD is `--local-sgd`)",
)
_GATHERING = OwnUpdates(
    "an optimizer whose step communicates with other ranks by itself, as one that shares out its updates",
    "let each rank update all parameters",
)


def own_updates(rank: RankRun) -> OwnUpdates | None:
    """None where there is nothing of it."""
    process = rank.process
    if process.ddp_option is not None:
        return OwnUpdates(process.ddp_option, "take that out")
    found = (
        (_HOOK, process.has_ddp_hook),
        (_JOIN, process.has_ddp_join),
        (_ZERO, process.has_zero_optimizer),
        (_REPLICATE, process.has_replicate),
        (_LOCAL, process.has_local_updates and not _averages(rank)),
        (_GATHERING, process.has_ddp and _communicates(rank)),
    )
    return next((own for own, has in found if has), None)


def _communicates(rank: RankRun) -> bool:
    """Whether the traced step sent more in its updates than a few numbers."""
    sent_bytes = sum(
        each.size_bytes for each in rank.collectives if each.phase == "optimizer" and each.group_size > 1
    )
    return sent_bytes > _NOTICEABLE * sum(each.size_bytes for each in rank.parameters)


def _averages(rank: RankRun) -> bool:
    """Whether the traced step brought as much together as its gradients, be it the script itself that did. What comes before
    its first forward is averages of parameters, which follow the update before."""
    gradient_bytes = sum(each.size_bytes for each in rank.parameters if each.requires_grad)
    begins_s = min(
        (span.start_s for span in rank.spans if span.kind == "forward" and _is_traced(rank, span)),
        default=0.0,
    )
    seen = (each for each in rank.collectives if each.group_size > 1 and each.issue_s >= begins_s)
    return sum(each.size_bytes for each in seen) > gradient_bytes / 2


def _is_traced(rank: RankRun, span: Span) -> bool:
    return rank.traced_step is not None and span.step == rank.traced_step.index


def notes_on_later_hooks(run: Run) -> Iterator[str]:
    """What the profile has warned of: a communication hook that the traced step is before, so that no plan has its memory."""
    said = dict.fromkeys(note.text for rank in run.ranks for note in rank.notes if note.level == "warning")
    for text in said:
        if text.startswith(LATER_HOOK):
            yield f"{text} What fits here may not fit then."


def check_own_updates(run: Run, num_ranks: int) -> None:
    """Raise UsageError where `run` would refuse every plan of so many ranks but what all of them recompute."""
    own = own_updates(run.ranks[0])
    if own is not None and min(num_ranks, run.manifest.world_size) > 1:
        raise UsageError(
            f"The script has {own.what}: `run` applies no plan for several ranks to it but what all of them recompute alike.",
            hint=f"`memadvisor advise RUN --memory SIZE`, without other options, chooses that; or {own.instead}.",
        )
