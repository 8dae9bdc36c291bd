"""Sets a variable that must be there when Python starts, and executes itself anew."""

import os
import sys

if "SECOND_LIFE" not in os.environ:
    os.environ["SECOND_LIFE"] = "1"
    os.execv(sys.executable, [sys.executable, *sys.argv])

from small import train

print("second life", sys.argv[1:])
train()
