"""Changes what can be changed: directory, stdout, print, tracing, dtype, determinism; has options like ours."""

import argparse
import builtins
import faulthandler
import os
import sys
import threading
from pathlib import Path

import torch
from small import train

parser = argparse.ArgumentParser()
parser.add_argument("--out")
parser.add_argument("--nproc", type=int)
parser.add_argument("--trace-step")
parser.add_argument("-m", dest="message")
arguments = parser.parse_args()
lines = []


class Shouting:
    def __init__(self, stream):
        self._stream = stream

    def write(self, text):
        lines.append(text)
        return self._stream.write(text.upper())

    def flush(self):
        self._stream.flush()


traced = set()


def trace(frame, event, _):
    traced.add(frame.f_code.co_name)
    return trace


faulthandler.enable()
Path("elsewhere").mkdir()
os.chdir("elsewhere")
sys.stdout = Shouting(sys.stdout)
original_print = builtins.print
builtins.print = lambda *words, **options: original_print("mine", *words, **options)
torch.set_default_dtype(torch.float64)
torch.set_default_device("cpu")
torch.use_deterministic_algorithms(True)
print(arguments, sys.stdin.readline().strip())
sys.settrace(trace)
threading.settrace(trace)
train()
sys.settrace(None)
Path("result.txt").write_text("".join(lines))
print("traced", {"train", "step"} <= traced, torch.is_deterministic_algorithms_warn_only_enabled())
