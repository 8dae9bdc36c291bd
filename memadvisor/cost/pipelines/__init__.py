"""Pipelines: schedules as orders of work, and their simulation (docs/pipelines.md)."""

from memadvisor.cost.pipelines.costs import ChunkCosts, PipelineTimes, Played
from memadvisor.cost.pipelines.schedules import canonical_name, pipeline_order
from memadvisor.cost.pipelines.simulate import simulate_pipeline
from memadvisor.cost.pipelines.work import Ending, Kind, PipelineOrder, Work
from memadvisor.schedule_names import SCHEDULES

__all__ = [
    "SCHEDULES",
    "ChunkCosts",
    "Ending",
    "Kind",
    "PipelineOrder",
    "PipelineTimes",
    "Played",
    "Work",
    "canonical_name",
    "pipeline_order",
    "simulate_pipeline",
]
