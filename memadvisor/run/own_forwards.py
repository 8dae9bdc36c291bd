"""Modules around whose calls an engine does nothing, since it wraps the forwards of classes and theirs is another: capture
and engines ask, without torch."""

from __future__ import annotations

from typing import Any


def is_made_by_compiler(module: Any) -> bool:
    """Whether torch.compile has made it, of another module that it calls. Its own forward can be wrapped."""
    return any(kind.__name__ == "OptimizedModule" for kind in type(module).__mro__)


def is_compiled_in_place(module: Any) -> bool:
    """Whether its calls are what `module.compile()` has made of them, in which hooks of modules are not seen."""
    return getattr(module, "_compiled_call_impl", None) is not None


def why_not_wrapped(name: str, module: Any) -> str:
    """Nothing where an engine can wrap the forward of the module of this name."""
    if "_orig_mod" in name.split("."):
        return "it is inside of what torch.compile has made"
    if is_compiled_in_place(module):
        return "the script compiles it in place"
    if "forward" in vars(module) and not is_made_by_compiler(module):
        return "the script has replaced its forward"
    return ""
