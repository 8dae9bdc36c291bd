"""Every write to a journal fails from the FAIL_FROMth on, as a broken disk's does."""

import errno
import os
from pathlib import Path

_write, _seen = os.write, [0]


def write(descriptor, data):
    try:
        name = Path(f"/proc/self/fd/{descriptor}").readlink().name
    except OSError:
        name = ""
    if name.endswith(".journal"):
        _seen[0] += 1
        if _seen[0] >= int(os.environ["FAIL_FROM"]):
            raise OSError(errno.EIO, "Input/output error")
    return _write(descriptor, data)


if "FAIL_FROM" in os.environ:
    os.write = write
