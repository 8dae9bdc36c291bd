"""Whether operands of 8 bits are written, and kept, transposed as well.

Tensor cores of Hopper and Ada take operands of 8 bits in one order alone, so that each is needed as it is and transposed;
those of the data center's Blackwell take either (transformer_engine/pytorch/utils.py, is_non_tn_fp8_gemm_supported: compute
capability 10, and not 12 of the desktop's), and Transformer Engine writes one where a tensor has one scale. Blocks of
elements have theirs along a product's depth, and are cast both ways everywhere.
"""

from __future__ import annotations

import dataclasses
import re

from memadvisor.hardware.hardware import Hardware
from memadvisor.layout import TrainingStep

_TAKES_EITHER = re.compile(r"\bG?B[23]00\b")


def on_card(step: TrainingStep, accelerator: Hardware) -> TrainingStep:
    """The same step, of software that writes what that card's products need."""
    software = step.software
    is_one_scale = software.scales in ("delayed", "current") and software.compute_dtype.startswith("float8")
    if not (software.keeps_narrow and is_one_scale and _TAKES_EITHER.search(accelerator.name)):
        return step
    return dataclasses.replace(step, software=dataclasses.replace(software, transposes=False))
