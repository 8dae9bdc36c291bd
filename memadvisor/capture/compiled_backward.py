"""Whether the script has its backward compiled (compiled autograd).

What autograd is given in a traced step, hooks on saved tensors among it, becomes part of the graph that is compiled then:
Dynamo traced through the recorder's own code, for minutes with two layers, and changed the step that it was to show.
"""

from __future__ import annotations

import sys
from typing import Any


def is_backward_compiled() -> bool:
    """Whether backwards have been compiled in this process, or the next one will be."""
    if "torch._dynamo" not in sys.modules:
        return False
    captures = _of("torch._dynamo.utils", "counters", {}).get("compiled_autograd", {}).get("captures", 0)
    return bool(
        captures
        or _of("torch._dynamo.config", "compiled_autograd", False)
        or _of("torch._dynamo.compiled_autograd", "compiled_autograd_enabled", False)
    )


def _of(module: str, name: str, default: Any) -> Any:
    return getattr(sys.modules.get(module), name, default)
