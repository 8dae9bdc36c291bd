"""What a precision, an optimizer, a card or a year makes of a trainer's habits."""

from __future__ import annotations

import dataclasses
import re

from memadvisor.errors import UsageError
from memadvisor.hardware.hardware import Hardware
from memadvisor.lora import Lora
from memadvisor.software import GPT_NEOX, MEGATRON_2021, MEGATRON_DEEPSPEED, MODERN
from memadvisor.software_torch import DDP
from memadvisor.software_traits import Software

# Bytes of a parameter's state in fp32: moments, or what is kept in their place.
_OPTIMIZER_STATE = {
    **dict.fromkeys(("adam", "adamw", "lamb"), 8),
    **dict.fromkeys(("momentum", "lion", "muon", "adagrad"), 4),
    **dict.fromkeys(("adam8bit", "adamw8bit"), 2),
    **dict.fromkeys(("adam4bit", "adamw4bit"), 1),
    "lion8bit": 1,
    **dict.fromkeys(("sgd", "adafactor"), 0),
    # Two: torch's relatives of Adam, schedule-free (arXiv:2405.15682; z, and v), Sophia (arXiv:2305.14342).
    **dict.fromkeys(("radam", "nadam", "adamax", "adadelta", "adabelief", "schedulefree", "sophia"), 8),
    # Three: the last gradient besides (arXiv:2208.06677), a second mean (arXiv:2409.03137).
    **dict.fromkeys(("adan", "ademamix"), 12),
    # One: second moments are a block's (arXiv:2406.16793), a tensor's (arXiv:1905.11286), of rows and columns (arXiv:2307.02047).
    **dict.fromkeys(("adammini", "novograd", "came", "lars", "rmsprop"), 4),
    # None, or next to none (arXiv:2306.09782, arXiv:2310.10195).
    **dict.fromkeys(("lomo", "adalomo", "signsgd"), 0),
}
_LONGEST_FIRST = sorted(_OPTIMIZER_STATE, key=len, reverse=True)
# Whose names these may stand in, and who keep something else: state in few directions, or of a matrix's rows and columns.
_OTHER_STATE = re.compile(r"galore|apollo|fira|shampoo|soap|^badam")
# Their state is of the bits that they name, and else in fp32, whatever the parameters' dtype (bitsandbytes/optim).
_BITSANDBYTES = re.compile(r"^(bitsandbytes|bnb)|paged|(bnb)?(8|32)bit$")


# LAMB writes an update of each parameter, reads it and the parameter for their norms, and both again to apply it: 24 B more
# where Adam moves 28 (apex/csrc/multi_tensor_lamb.cu).
_LAMB_PASSES = 24 / 28
# Accelerators whose fused attention is their makers' own.
_OTHER_KERNELS = re.compile(r"gaudi|tpu", re.IGNORECASE)


def as_of_2023(software: Software) -> Software:
    """Megatron-DeepSpeed's and GPT-NeoX's from 2023 on: FlashAttention, bf16, no dropout in Llamas (examples_deepspeed/pretrain_llama2_distributed.sh)."""
    return dataclasses.replace(
        with_precision(software, "bf16"),
        fused_attention=True,
        flash2=True,
        dropout=False,
        attention_backward_share=None,
    )


def on_accelerator(
    software: Software, accelerator: Hardware, *, is_given: bool, in_container: bool = False
) -> Software:
    """The same code with the dtype that the accelerator has: 8 bits of AMD's kind, and where nobody named a precision,
    fp16 on a card that has no bf16. In NVIDIA's containers (`in_container`), where its trainers run, products of fp32 go
    by TF32 (docs.nvidia.com/deeplearning/frameworks/pytorch-release-notes). FlashAttention 2 runs on GPUs alone.
    """
    if _OTHER_KERNELS.match(accelerator.name):
        software = dataclasses.replace(software, flash2=False)
    rates, dtype = accelerator.peak_flops_per_s, software.compute_dtype
    in_container |= software.name.startswith(("megatron", "nemo"))
    if dtype == "float32" and "tf32" in rates and in_container:
        return dataclasses.replace(software, compute_dtype="tf32")
    if dtype in rates:
        return software
    if dtype.startswith("float8"):
        others = [name for name in rates if name.startswith("float8")]
    else:
        others = [] if is_given else [name for name in ("float16", "bfloat16") if name in rates]
    return dataclasses.replace(software, compute_dtype=others[0]) if others else software


def with_fp32_gradients(software: Software) -> Software:
    """Megatron-LM's of bf16, and of 2022 on (arXiv:2205.05198): 18 B a parameter."""
    return dataclasses.replace(software, gradient_bytes=4, reduce_bytes=4, fused_accumulation=True)


def with_precision(software: Software, precision: str) -> Software:
    """The same code computing in another dtype: bf16, fp16, fp8, fp4, fp32; `amp_bf16` and `autocast fp16` are
    torch.autocast's.

    Pure bf16 (Lightning's bf16-true) keeps parameters, gradients and Adam's moments in it, and no master copy; fp32 one copy of
    everything, 16 B a parameter. Trainers other than the default cast parameters as they do, whatever the word: FSDP under
    Composer's amp_bf16, for one. Raises UsageError for another word.
    """
    if software.name == MODERN.software.name and re.search("amp|autocast", precision.lower()):
        software = dataclasses.replace(
            software,
            autocast=True,
            parameter_bytes=4,
            gradient_bytes=4,
            reduce_bytes=4,
            optimizer_bytes=min(software.optimizer_bytes, 8),
        )
    if re.search(r"pure|true", precision.lower()) and re.search(r"16", precision):
        software = dataclasses.replace(
            software,
            autocast=False,
            parameter_bytes=2,
            gradient_bytes=2,
            reduce_bytes=2,
            optimizer_bytes=4,
            casts_shards=False,
        )
    word = _dtype_word(precision)
    if word in ("fp4", "fp8"):
        software = _with_scales(software, precision.lower(), is_fp4=word == "fp4")
    if word == "fp4":
        return dataclasses.replace(software, compute_dtype="float4_e2m1fn")
    if word == "fp8":  # products in 8 bits, whatever scales them
        return dataclasses.replace(software, compute_dtype="float8_e4m3fn")
    if word == "16":
        return software
    if word == "fp32":
        return dataclasses.replace(
            software,
            compute_dtype="float32",
            autocast=False,
            parameter_bytes=4,
            gradient_bytes=4,
            reduce_bytes=4,
            optimizer_bytes=min(software.optimizer_bytes, 8),
        )
    if word == "bf16" and software.name in (
        MEGATRON_DEEPSPEED.software.name,
        GPT_NEOX.software.name,
    ):
        software = dataclasses.replace(
            software, gradient_bytes=6, reduce_bytes=4, reduce_bucket_elements=0.0, update_gradient_bytes=0
        )
    if word == "bf16" and software.name == MEGATRON_2021.software.name:
        software = with_fp32_gradients(software)
    if word is None:
        raise UsageError(f"{precision!r} is no precision.", hint="it is bf16, fp16, fp8, fp4, tf32 or fp32.")
    if word == "tf32":
        return dataclasses.replace(with_precision(software, "fp32"), compute_dtype="tf32")
    return dataclasses.replace(software, compute_dtype={"bf16": "bfloat16", "fp16": "float16"}[word])


def _with_scales(software: Software, precision: str, *, is_fp4: bool) -> Software:
    """What has a scale. Only a tensor's are known before its shards are gathered (Megatron Bridge's fp8_param_gather, which NVFP4 has
    not, training/mixed_precision.py; torchtitan's docs/float8.md); the copies of a matrix in four bits are as it is and transposed.
    """
    has_copies = software.gathers_narrow or software.narrow_copy_bytes > 0
    if is_fp4:
        scales = "blocks" if "mx" in precision else "blocks-of-tensor"
        copies = 2 * 0.5625 if software.saves_narrow and has_copies else 0.0
        return dataclasses.replace(software, scales=scales, gathers_narrow=False, narrow_copy_bytes=copies)
    if re.search(r"row-?_?wise", precision):  # torchao's
        return dataclasses.replace(software, scales="rows", gathers_narrow=False)
    if re.search(r"mx|block|sub-?channel", precision):
        gathers = software.gathers_narrow and not software.casts_again
        return dataclasses.replace(software, scales="blocks", gathers_narrow=gathers)
    if re.search(r"\bcs\b|current|dynamic", precision):
        return dataclasses.replace(software, scales="current")
    return software


def with_plain_loss(software: Software) -> Software:
    """The same code with the loss of a plain loop: F.cross_entropy takes the logits of a model that is all in 16 bits as they
    are, where Hugging Face's classes and trainers of their own cast them."""
    is_narrow = software.parameter_bytes == 2 and not software.autocast
    if software.name != DDP.software.name or software.reference_code or not is_narrow:
        return software
    return dataclasses.replace(software, loss_bytes=2)


# The narrowest dtype counts, for products have it: `bf16 + fp32 accumulation` is bf16. A bare `mixed`, `amp` or apex's
# `O2` is the trainer's own of 16 bits.
_DTYPES = {
    "fp4": r"fp4|float4|e2m1",  # nvfp4, mxfp4
    "fp8": r"fp8|float8|e4m3|e5m2",  # fp8-cs, mxfp8, bf16+fp8
    "bf16": r"bf16|bfloat16|bf-16",
    "fp16": r"fp16|float16|fp-16|half|(?<![a-z0-9])f?16(?![0-9])",
    "16": r"mixed|\bmix\b|amp|autocast|(?<![a-z0-9])o[12](?![a-z0-9])",
    "tf32": r"tf32|tensorfloat",
    "fp32": r"fp32|float32|fp-32|single|full|(?<![a-z0-9])f?32(?![0-9])",
}


def names_dtype(precision: str) -> bool:
    """Whether a precision says which of two 16-bit dtypes it is: `mixed` and `amp` do not."""
    return _dtype_word(precision) != "16"


def _dtype_word(precision: str) -> str | None:
    return next((word for word, spelled in _DTYPES.items() if re.search(spelled, precision.lower())), None)


def _state_bytes(optimizer: str) -> int | None:
    """Of a parameter, by the longest known name that stands in the words; `8-bit` and `fp8` beside Adam are adam8bit's. Of
    several optimizers, `Muon + AdamW`, the first counts, which has the matrices. None where none is known.
    """
    for part in re.split(r"\s*[+,/&]\s*|\band\b", optimizer.lower()):
        word = re.sub(r"[^a-z0-9]", "", part)
        if _OTHER_STATE.search(word):
            return None
        if "momentum" in optimizer.lower() and "sgd" in word:
            return _OPTIMIZER_STATE["momentum"]
        bits = re.search(r"([48])bit|(fp8|float8)", word)
        name = next((name for name in _LONGEST_FIRST if name in word), "adam" if bits is not None else None)
        if name is None:
            continue
        narrow = f"{name}{bits[1] or 8}bit" if bits is not None else name
        return _OPTIMIZER_STATE.get(narrow, _OPTIMIZER_STATE[name])
    return None


def with_optimizer(software: Software, optimizer: str) -> Software:
    """The same code with another optimizer's state beside the master copy. Raises UsageError for one not known."""
    plain = re.sub(r"\([^()]*=[^()]*\)|[\s_()-]", "", optimizer.lower())
    is_bitsandbytes = _BITSANDBYTES.search(plain) is not None
    plain = re.sub(r"^(torch|bitsandbytes|bnb)\.(optim\.)?", "", plain)
    state_bytes = _state_bytes(optimizer)
    if state_bytes is None:
        raise UsageError(
            f"{optimizer!r} is no known optimizer.", hint=f"known are {', '.join(_OPTIMIZER_STATE)}."
        )
    if not re.fullmatch(r"(torch)?adamw?(torch)?", plain):  # not torch's, or fused
        software = dataclasses.replace(software, updates_lists=False)
    if is_bitsandbytes or "fused" in plain or re.search(r"[48]bit|fp8", plain):  # torchao's are compiled
        software = dataclasses.replace(software, update_passes=1.0)
    if "lamb" in plain:
        software = dataclasses.replace(software, update_passes=software.update_passes + _LAMB_PASSES)
    paged_bytes = float(state_bytes) if "paged" in plain else 0.0
    is_narrow = (software.parameter_bytes, software.optimizer_bytes) == (2, 4)  # all in 16 bits
    if is_narrow and not is_bitsandbytes and state_bytes >= 4:
        state_bytes //= 2
    has_master = software.parameter_bytes < 4 and not is_narrow
    if software.paged_bytes and software.paged_bytes == software.optimizer_bytes:
        has_master = False
    return dataclasses.replace(
        software, optimizer_bytes=state_bytes + (4 if has_master else 0), paged_bytes=paged_bytes
    )


def with_lora(software: Software, lora: Lora) -> Software:
    """The same code with adapters. Of a base in 16 bits autocast has nothing to cast, and the residual stream is as wide."""
    return dataclasses.replace(
        software, lora=lora, autocast=software.autocast and (lora.base == "fp32" or lora.widened)
    )
