"""Prints what a script can see of how it was started."""

import inspect
import os
import pickle
import sys
from pathlib import Path

import sibling

import __main__
import analyzers  # noqa: TID251 - the script's own, which meets no module of ours
import tui  # noqa: TID251 - likewise


class Thing:
    def __eq__(self, other):
        return type(other) is Thing


if __name__ == "__main__":
    print("argv", sys.argv)
    print("file", __file__, sys.modules["__main__"].__file__)
    print(
        "name", __name__, __spec__ is None, __package__, sorted(set(globals()) & {"__cached__", "__loader__"})
    )
    print("main", __main__.Thing is Thing, Thing.__module__, pickle.loads(pickle.dumps(Thing())) == Thing())
    print("source", inspect.getsource(Thing).splitlines()[0])
    print("path", sys.path[0], Path.cwd())
    print("sibling", sibling.WORD, Path(sibling.__file__).name)
    print("theirs", analyzers.WHOSE, tui.WHOSE)
    print("environment", sorted(name for name in os.environ if "MEMADVISOR" in name.upper()))
    print("input", sys.stdin.read())
    print("words on stderr", file=sys.stderr)
