"""All changes of the script that a run shows, the most telling first, and those that give up digits last."""

from __future__ import annotations

from collections.abc import Callable

from memadvisor.analyzers.checkpoint_frames import TracedCalls, traced_calls
from memadvisor.analyzers.clocks import align_clocks
from memadvisor.analyzers.communication import Communication, communication
from memadvisor.analyzers.data_waits import DataWaits, data_waits
from memadvisor.analyzers.matching import match_collectives
from memadvisor.analyzers.script_changes.attention_scores import attention_scores
from memadvisor.analyzers.script_changes.autocast import autocast
from memadvisor.analyzers.script_changes.bucket_views import bucket_views
from memadvisor.analyzers.script_changes.change import Facts, ScriptChange
from memadvisor.analyzers.script_changes.chunked_loss import chunked_loss
from memadvisor.analyzers.script_changes.fused_updates import fused_updates
from memadvisor.analyzers.script_changes.growth import growth
from memadvisor.analyzers.script_changes.held_results import held_results
from memadvisor.analyzers.script_changes.loader_workers import loader_workers
from memadvisor.analyzers.script_changes.narrow_products import narrow_products
from memadvisor.analyzers.script_changes.repeated_reductions import repeated_reductions
from memadvisor.analyzers.script_changes.stale_gradients import stale_gradients
from memadvisor.analyzers.step_time import StepTime, step_time
from memadvisor.analyzers.timeline import MemoryTimeline, memory_timeline
from memadvisor.analyzers.utilization import Utilization, utilization
from memadvisor.hardware.hardware import Hardware
from memadvisor.run.run import RankRun, Run

_FINDERS: tuple[Callable[[Facts], ScriptChange | None], ...] = (
    growth,
    loader_workers,
    narrow_products,
    autocast,
    held_results,
    attention_scores,
    chunked_loss,
    stale_gradients,
    bucket_views,
    repeated_reductions,
    fused_updates,
)


def changes_of(run: Run, rank: RankRun, hardware: Hardware | None = None) -> tuple[ScriptChange, ...]:
    """Those of one rank of a run of which nothing else has been analysed yet."""
    time = step_time(rank)
    return script_changes(
        traced_calls(rank) if run.plan is None else None,
        memory_timeline(rank),
        time=time,
        traffic=communication(rank, match_collectives(run.ranks, align_clocks(run.ranks))),
        used=None if hardware is None else utilization(rank, time, hardware),
        hardware=hardware,
        waits=data_waits(rank),
        has_plan=run.plan is not None,
    )


def script_changes(
    traced: TracedCalls | None,
    timeline: MemoryTimeline | None,
    *,
    has_plan: bool,
    time: StepTime | None = None,
    traffic: Communication | None = None,
    used: Utilization | None = None,
    hardware: Hardware | None = None,
    waits: DataWaits | None = None,
) -> tuple[ScriptChange, ...]:
    """None of a step that ran with a plan in force: what it keeps and sends is the plan's doing as much as the script's."""
    if traced is None or timeline is None or has_plan:
        return ()
    facts = Facts(
        calls=traced,
        timeline=timeline,
        time=time,
        communication=traffic,
        utilization=used,
        hardware=hardware,
        waits=waits,
    )
    found = [change for finder in _FINDERS if (change := finder(facts)) is not None]
    step_time_s = None if time is None else time.median_s
    return tuple(
        sorted(found, key=lambda change: (change.is_lossy, -change.share(facts.peak_bytes, step_time_s)))
    )
