"""Run as `-m package.train`: relative imports work, and the first path is the working directory."""

import sys
from pathlib import Path

from . import __doc__ as words

print("argv", [Path(sys.argv[0]).name, *sys.argv[1:]])
print("name", __name__, __package__, __spec__.name)
print("words", words)
print("path", Path(sys.path[0]).resolve() == Path.cwd())
