#!python -IS
"""The command of warm_python.py, copied beside the server's socket: asks for a fork, and ends as that does.

A program of its own that imports little, so that it starts in some hundredths of a second.
"""

import contextlib
import json
import os
import signal
import socket
import sys

FORWARDED = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
OF_MULTIPROCESSING = ("from multiprocessing.spawn import", "from multiprocessing.forkserver import")
words = sys.argv[1:]
if words[:1] == ["-B"]:  # as multiprocessing hands on that of the server
    words = words[1:]
if words[:1] == ["-u"]:  # as torchrun starts its ranks
    words = words[1:]
    os.environ["PYTHONUNBUFFERED"] = "1"
is_known = words[:1] == ["-m"] or (words[:1] == ["-c"] and words[1].startswith(OF_MULTIPROCESSING))
if not words or (words[0].startswith("-") and not is_known):  # not what the server is for
    os.execv(sys.executable, [sys.executable, *words])

descriptors = []
for number in range(250):
    with contextlib.suppress(OSError):  # it is not open
        descriptors += [number] * os.get_inheritable(number)  # our own are not
connection = socket.socket(socket.AF_UNIX)
connection.connect(sys.argv[0].removesuffix("python") + "socket")
asked = {"words": words, "environment": dict(os.environ), "directory": os.path.realpath(".")}
asked["descriptors"] = descriptors
asked["ignored"] = [number for number in FORWARDED if signal.getsignal(number) is signal.SIG_IGN]
data = json.dumps(asked).encode() + b"\n"
sent = socket.send_fds(connection, [data], descriptors)
connection.sendall(data[sent:])
for descriptor in (0, 1, 2):  # the others tell by their end that this process is over, and wait for that
    os.close(descriptor)
told = connection.makefile("rb")
program = int(told.readline())
for number in FORWARDED:
    if number not in asked["ignored"]:
        signal.signal(number, lambda number, _: os.kill(program, number))
code = os.waitstatus_to_exitcode(int(told.readline()))
if code < 0:
    if -code not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)
