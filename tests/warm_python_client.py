#!python -IS
"""The command of warm_python.py, copied beside the server's socket: asks for a fork, and ends as that does.

A program of its own that imports little, so that it starts in some hundredths of a second.
"""

import json
import os
import signal
import socket
import sys

FORWARDED = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
words = sys.argv[1:]
if words[:1] == ["-u"]:  # as torchrun starts its ranks
    words = words[1:]
    os.environ["PYTHONUNBUFFERED"] = "1"
if not words or (words[0].startswith("-") and words[0] != "-m"):  # such as -c: not what the server is for
    os.execv(sys.executable, [sys.executable, *words])

connection = socket.socket(socket.AF_UNIX)
connection.connect(sys.argv[0].removesuffix("python") + "socket")
asked = {"words": words, "environment": dict(os.environ), "directory": os.path.realpath(".")}
asked["ignored"] = [number for number in FORWARDED if signal.getsignal(number) is signal.SIG_IGN]
data = json.dumps(asked).encode() + b"\n"
sent = socket.send_fds(connection, [data], [0, 1, 2])
connection.sendall(data[sent:])
for descriptor in (0, 1, 2):
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
