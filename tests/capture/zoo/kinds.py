"""Small trainings of many kinds, as a script: `python kinds.py NAME...` trains five steps of each and prints.

They know nothing of memadvisor. A rank (under RANK) trains those of parallel.py, all in one world.
"""

import gc
import os
import random
import sys
from contextlib import nullcontext

import language
import loops
import networks
import numpy as np
import operators
import torch

FAMILIES = {module.__name__: module.KINDS for module in (language, networks, operators, loops)}
KINDS = {kind.__name__: kind for kinds in FAMILIES.values() for kind in kinds}


def train_all(names, around=nullcontext):
    if "RANK" not in os.environ:
        train_each(names, KINDS, around)
        return
    import parallel

    with parallel.world():
        train_each(names, {kind.__name__: kind for kind in parallel.KINDS}, around)


def train_each(names, kinds, around):
    """Each training in a context of its own, `around(name)`; what it leaves behind is collected first.

    After each stands where every stream of random numbers has come to: a profiler must not have drawn from any.
    """
    for name in names:
        print(name)
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        with around(name):
            kinds[name]()
        print(random.random(), np.random.rand(), torch.rand(1).item())
        gc.collect()


if __name__ == "__main__":
    train_all(sys.argv[1:])
