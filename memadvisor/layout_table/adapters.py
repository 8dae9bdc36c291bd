"""A row's columns of low-rank adapters -> Lora, or None where all parameters are trained."""

from __future__ import annotations

import re

from memadvisor.errors import UsageError
from memadvisor.layout_table.cells import NO, Cells
from memadvisor.lora import LINEAR, Lora, base_named, targets_named
from memadvisor.software_torch import LITGPT, QLORA, TORCHTUNE, UNSLOTH
from memadvisor.software_traits import Software

USUAL_RANK = 8  # peft's
USUAL_TARGETS = ("query", "value")  # arXiv:2106.09685, section 4.2, and peft's of a Llama
# They quantise a base without widening what is left of it.
_KEEP_THE_REST = re.compile(r"unsloth|llama.?factory|fms.?acceleration", re.IGNORECASE)


def adapters_of(cells: Cells, software: Software) -> Lora | None:
    """Raises UsageError for adapters of another kind, and for matrices and bases that are not known."""
    if not _is_lora(cells):
        if cells.text("lora_rank") is None and cells.text("base_precision") is not None:
            cells.note("base_precision is of frozen matrices beside adapters, and there are none")
        return None
    base = _base(cells, software)
    rank, targets = cells.whole("lora_rank"), cells.text("lora_targets")
    if rank is None:
        cells.note(f"no lora_rank: {USUAL_RANK} is taken")
    if targets is None:
        cells.note(f"no lora_targets: {'all' if base in _FOUR_BITS else ', '.join(USUAL_TARGETS)} are taken")
    return Lora(
        rank=rank or USUAL_RANK,
        targets=_usual_targets(base) if targets is None else targets_named(targets),
        dropout=bool(_dropout(cells)),
        base=base,
        widened=widens(cells.text("framework") or "", software, base),
        keeps_inputs=_is_old(cells.text("bitsandbytes_version")) and keeps_inputs(software, base),
        shares_inputs=software.name == UNSLOTH.software.name,
        trains_ends=_trains_ends(cells),
    )


# Trainers that a source may name, with adapters that are not peft's.
_OF_THEIR_OWN = (TORCHTUNE.software.name, LITGPT.software.name)
_BITSANDBYTES = ("int8", "nf4", "nf4-dq")
_FOUR_BITS = ("nf4", "nf4-dq", "int4")


def _usual_targets(base: str) -> tuple[str, ...]:
    """All of a base in 4 bits (arXiv:2305.14314, section 4)."""
    return LINEAR if base in _FOUR_BITS else USUAL_TARGETS


def widens(framework: str, software: Software, base: str) -> bool:
    """Whether what is not quantised is cast to fp32: peft's prepare_model_for_kbit_training does so of bitsandbytes' formats."""
    is_peft = software.reference_code and software.name != QLORA.software.name
    is_peft = is_peft and not _KEEP_THE_REST.search(framework)
    return is_peft and base in _BITSANDBYTES


def recomputes_unasked(cells: Cells, software: Software) -> bool:
    """Whether layers run again where nothing says so: peft's prepare_model_for_kbit_training has use_gradient_checkpointing
    True, as has the script of the paper of QLoRA, and Unsloth's get_peft_model "unsloth". Who names no trainer has peft."""
    if software.lora is None:
        return False
    if software.name == UNSLOTH.software.name:
        return True
    is_named = cells.text("framework") is not None or software.name in _OF_THEIR_OWN
    return (software.reference_code or not is_named) and software.lora.base in _BITSANDBYTES


# Its release that keeps no inputs any more.
_KEEPS_NOTHING = (0, 43, 2)


def _is_old(version: str | None) -> bool:
    """Of bitsandbytes; `<0.43.2` is older than what it names."""
    if version is None:
        return False
    numbers = re.findall(r"\d+", version)
    if not numbers:
        raise UsageError(f"bitsandbytes_version is {version!r}.", hint="it is a number, such as 0.42.0.")
    found = tuple(int(number) for number in numbers[:3])
    return found < _KEEPS_NOTHING or (re.match(r"<|before", version) is not None and found == _KEEPS_NOTHING)


def keeps_inputs(software: Software, base: str) -> bool:
    """Whether products in 4 bits are bitsandbytes', as with all trainers but torchtune (of torchao) and Unsloth (its own)."""
    others = (TORCHTUNE.software.name, UNSLOTH.software.name)
    return base in ("nf4", "nf4-dq") and software.name not in others


def _is_lora(cells: Cells) -> bool:
    text = cells.text("peft")
    word = re.sub(r"[^a-z0-9]", "", (text or "").lower())
    if text is None:
        return cells.text("lora_rank") not in (None, *NO)
    if re.search(r"ia3|prefix|prompt|ptuning|bitfit|galore|^adapters?$", word):
        raise UsageError(f"peft is {text!r}; lora, qlora and full are known.")
    if re.search(r"dora|[a-z]lora(?<!qlora)|lora(plus|fa|ga)|loha|lokr|pissa|olora|\bvera", word):
        cells.note(f"peft {text!r} is taken for lora, what it does besides is not counted")
        return True
    if "lora" in word or word in ("true", "yes"):
        return True
    if not (word in NO or re.search(r"full|none|all|sft|pretrain", word)):
        cells.note(f"peft {text!r} is not understood: all parameters are taken to be trained")
    return False


def _base(cells: Cells, software: Software) -> str:
    text = cells.text("base_precision")
    if text is not None:
        return base_named(text)
    if "qlora" in re.sub(r"[^a-z]", "", (cells.text("peft") or "").lower()):
        return "nf4-dq"
    return "fp32" if software.compute_dtype in ("float32", "tf32") else "16bit"


def _dropout(cells: Cells) -> bool | None:
    text = cells.text("lora_dropout")
    if text is not None and re.fullmatch(r"0?\.\d+", text):
        return float(text) > 0
    return cells.flag("lora_dropout")


def _trains_ends(cells: Cells) -> bool:
    text = (cells.text("trained_modules") or "").lower()
    return text not in NO and re.search(r"emb|head|wte|ends|true|yes", text) is not None
