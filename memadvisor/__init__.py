"""memadvisor: measure, predict and fix the memory and throughput of PyTorch training."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memadvisor.api import advise, apply, load, profile

__version__ = "0.1.0"
__all__ = ["__version__", "advise", "apply", "load", "profile"]

_ROOT = Path(__file__).resolve().parent.parent
if not (Path(__file__).parent / "analyzers").is_dir() and (_ROOT / "pyproject.toml").is_file():
    # A source checkout, not installed: analyzers/ and tui/ stand beside this folder.
    __path__.append(str(_ROOT))


def __getattr__(name: str) -> Any:
    """Load the Python interface on first use, so that `import memadvisor` stays light."""
    if name in __all__:
        return getattr(import_module("memadvisor.api"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
