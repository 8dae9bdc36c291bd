"""The backend's own gather and reduce-scatter of one tensor.

torch 2.14 gave them other names, and warns of the old ones on stderr.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
