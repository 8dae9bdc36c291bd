"""CUDA graphs: what is captured into one runs without Python when it is replayed, so that no hook is told of it.

While a stream is captured, an event may not be asked whether it is over: that ends the capture with an error.
"""

from __future__ import annotations

import sys

import torch

CAPTURED = (
    "Work is captured into a CUDA graph, by the script or by torch.compile for it, which runs no hooks when it is replayed: "
    "steps, or parts of the model, that are replayed are not seen."
)


def is_capturing() -> bool:
    """Whether the current stream is being captured. Cheap where no GPU is in use."""
    is_used: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # torch has no types for it
    return is_used and torch.cuda.is_current_stream_capturing()


def is_replayed(module: torch.nn.Module) -> bool:
    """Whether torch.cuda.make_graphed_callables has given the module a forward that replays a graph."""
    return getattr(vars(module).get("forward"), "__module__", None) == "torch.cuda.graphs"


def is_of_compiler() -> bool:
    """Whether what is being captured is what torch.compile has made (mode "reduce-overhead"), as its own code is calling."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == "torch._inductor.cudagraph_trees":
            return True
        frame = frame.f_back  # type: ignore[assignment]  # None of the outermost
    return False
