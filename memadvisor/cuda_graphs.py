"""CUDA graphs: what is captured into one runs without Python when it is replayed, so that no hook is told of it.

While a stream is captured, an event may not be asked whether it is over: that ends the capture with an error.
"""

from __future__ import annotations

import torch


def is_capturing() -> bool:
    """Whether the current stream is being captured. Cheap where no GPU is in use."""
    is_used: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # torch has no types for it
    return is_used and torch.cuda.is_current_stream_capturing()


def is_replayed(module: torch.nn.Module) -> bool:
    """Whether torch.cuda.make_graphed_callables has given the module a forward that replays a graph."""
    return getattr(vars(module).get("forward"), "__module__", None) == "torch.cuda.graphs"
