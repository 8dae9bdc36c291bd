"""What a table's column of attention says: of its kernel, and of what attends to what."""

from __future__ import annotations

import dataclasses
import re

from memadvisor.errors import UsageError
from memadvisor.layout_table.cells import NO, YES, Cells
from memadvisor.layout_table.columns import plain as plain_word
from memadvisor.software import MEGATRON_CORE
from memadvisor.software_traits import Software

# What heads there are, which tokens they see, how ranks or memory split them.
_NO_KERNEL = re.compile(
    r"((mh|mq|gq|ml|sw|ds|ns)a|(multi|grouped)(head|query|latent)?|self|causal|full|local|global|dense|sliding(window)?|"
    r"bidirectional|ring|ulysses|thd|bshd|sbhd)(self)?(attention|attn)?$"
)
# FlashAttention 3 on Hopper is 1.5 to 2.0 times as fast forward as its second generation, and 1.5 to 1.75 backward
# (arXiv:2407.08608); the fourth reaches 71 % of a B200's rate where the third reaches 75 % of an H100's (arXiv:2603.05451).
_GENERATIONS = {"3": (1.75, 0.65), "4": (1.7, 0.65)}
# cuDNN's, as Megatron Core has it by default (MEGATRON_CORE), and torch's own where it is asked for or preferred.
_CUDNN = (MEGATRON_CORE.software.attention_speed, MEGATRON_CORE.software.attention_backward_share)


def kernel_of(cells: Cells) -> str | None:
    """What the column of attention says of its kernel; None where it says what attends to what."""
    text = cells.text("attention")
    if text is None or not _NO_KERNEL.match(plain_word(text)):
        return text
    cells.note(f"attention {text!r} says no kernel: the trainer's own is taken")
    return None


def with_attention(software: Software, text: str) -> Software:
    """The same code with attention of that name. Raises UsageError for a word that does not say."""
    word = plain_word(text)
    is_flash = re.match(r"flash|fa\d", word) is not None
    software = dataclasses.replace(
        software,
        fused_attention=is_fused(text),
        masks_windows=software.masks_windows and not is_flash,
    )
    if "cudnn" in word:
        return _with_speed(software, *_CUDNN)
    generation = re.match(r"(?:flash(?:attention|attn)?|fa)v?([234])", word)
    if generation is None:
        return software
    if (
        generation[1] == "2"
    ):  # its instructions are Ampere's (flash-attention, csrc/flash_attn, beside a directory of its own for Hopper)
        return dataclasses.replace(software, attention_as_on_hopper=True)
    return _with_speed(software, *_GENERATIONS[generation[1]])


def _with_speed(software: Software, speed: float, backward_share: float | None) -> Software:
    return dataclasses.replace(software, attention_speed=speed, attention_backward_share=backward_share)


def is_fused(text: str) -> bool:
    """Whether scores stay out of memory. Raises UsageError for a word that does not say."""
    word = plain_word(text)
    if "softmax" in word or word.startswith(
        "megatron"
    ):  # kernels of the softmax alone, whose scores are in memory
        return False
    if re.match(
        r"flash|fused|sdpa|triton|xformers|cudnn|mem.*eff|fa\d*$|v\d$|te$|transformerengine|flex", word
    ):
        return True
    if re.match(r"unfused|eager|math|torch|naive|standard|vanilla|no|core|wo|without", word):
        return False
    if text.lower() in YES or text.lower() in NO:
        return text.lower() in YES
    raise UsageError(f"attention is {text!r}; it is flash or unfused.")
