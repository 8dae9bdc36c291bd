"""Whether a module is a stage of one of the script's pipelines."""

from __future__ import annotations

import sys

import torch

from memadvisor.run.cut import unwrap
from memadvisor.run.living import living


def is_stage(root: torch.nn.Module) -> bool:
    """Whether a `torch.distributed.pipelining` stage of this process runs it."""
    if "torch.distributed.pipelining.stage" not in sys.modules:
        return False
    from torch.distributed.pipelining.stage import _PipelineStageBase

    stages = living(_PipelineStageBase)
    return any(unwrap(stage.submod) is root for stage in stages if hasattr(stage, "submod"))
