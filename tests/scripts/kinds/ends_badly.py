"""Leaves everything undone: a handler that raises at exit, a thread that still runs, children of its own."""

import atexit
import os
import sys
import threading
import warnings

from small import train

# From Python 3.12 on a fork of several threads is warned of after it, before or after what the child says.
warnings.simplefilter("ignore", DeprecationWarning)
if os.fork() == 0:
    train(2)  # in the child, before the parent's first step
    sys.stdout.flush()
    os._exit(0)
os.wait()


def complain():
    print("at exit", flush=True)
    raise RuntimeError("a handler that fails")


atexit.register(complain)
threading.Thread(
    target=lambda: (threading.main_thread().join(), print("the thread ends", flush=True))
).start()
train()
if os.fork() == 0:
    sys.exit(9)  # unwinds the whole script in the child
print("child's code", os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
sys.exit(5)
