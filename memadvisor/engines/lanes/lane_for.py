"""The lane of a device."""

import torch

from memadvisor.engines.lanes.cuda_lane import CudaLane
from memadvisor.engines.lanes.lanes import Lane
from memadvisor.engines.lanes.thread_lane import ThreadLane


def lane_for(device: torch.device) -> Lane:
    """The lane for transfers of tensors on `device`."""
    return CudaLane(device) if device.type == "cuda" else ThreadLane()
