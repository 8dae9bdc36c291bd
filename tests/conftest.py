"""What holds for all tests: no result hangs on how fast the machine is, and none fights another for the cores.

Each process that runs tests has one thread for torch's operators, and so has what it starts: OpenMP's threads of
several processes on as many cores spend most of their time on waiting for each other. Operators on several threads
are what the family `networks` of tests/capture/zoo runs on.
"""

import os

from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
