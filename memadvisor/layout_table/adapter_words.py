"""What is trained, in the words of a method: `LoRA (r=16)`, `4-bit QLoRA`, `8-bit LoRA + ZeRO-3`, `full fine-tuning (bf16)`."""

from __future__ import annotations

import re

_LORA = re.compile(r"\b(q)?-?lora\b")
_OTHERS = re.compile(
    r"\bq?dora\b|adalora|\bia3\b|prefix[\s_-]?tuning|prompt[\s_-]?tuning|bitfit|galore|\blora[\s_-]?fa\b"
)
_FULL = re.compile(r"fft|full([\s_-]*(param\w*|weights?|model|sft|ft))?([\s_-]*fine[\s_-]*tun\w*)?")
_RANK = re.compile(r"(?<=lora)\W*(?:r|rank)?\W*(\d+)\b|\b(?:r|rank)\W{0,2}(\d+)\b")
_BITS = re.compile(r"(?<![a-z\d])(?:(4|8|16)[\s-]?bits?|(nf4|int[48]))(?![a-z\d])")
_DTYPE = re.compile(r"(?<![a-z\d])(?:pure[\s_-]?)?(bf16|fp16|fp32|tf32)(?![a-z\d])")
_ALL_MATRICES = re.compile(r"\ball[\s_-]*linear(?:[\s_-]*(?:layers?|modules?))?\b")
# bitsandbytes' model in 4 bits, by Unsloth's and others' names of them.
_HELD_IN_BITS = re.compile(r"[\s_-](?:unsloth[\s_-])?bnb[\s_-]4bit$", re.IGNORECASE)
_BETWEEN = " \t,;+&/()[]_-"
# What stands beside adapters and says nothing of memory or time.
_BESIDE = re.compile(r"\b(?:lora[\s_-]*)?alpha\W{0,2}\d+\b|\b(?:sft|peft|fine[\s_-]*tun\w*|adapters?)\b")


def adapter_words(said: dict[str, str]) -> dict[str, str]:
    text = said.get("strategy", "").lower()
    if _is_only(_FULL, _DTYPE.sub(" ", text)):
        del said["strategy"]
        return {"peft": said.get("peft", "full")} | _dtype(said, text)
    other = _OTHERS.search(text)
    if other is not None and "peft" not in said:
        return {"peft": other[0]}
    named = f"{text} {said.get('peft', '').lower()}"
    model = said.get("model", "")
    if (held := _HELD_IN_BITS.search(model)) is not None:
        said["model"] = model[: held.start()]
    found = _LORA.search(text) or _LORA.search(said.get("framework", "").lower())
    if found is None and _LORA.search(named) is None:
        return {}
    words = {} if "peft" in said or found is None else {"peft": "qlora" if found.group(1) else "lora"}
    bits = _BITS.search(named)
    if "base_precision" not in said and (bits is not None or held is not None):
        words["base_precision"] = "nf4-dq" if bits is None else bits[1] or bits[2]
    if "lora_targets" not in said and _ALL_MATRICES.search(named) is not None:
        words["lora_targets"] = "all"
    rank = _RANK.search(_BITS.sub(" ", named))
    if rank is not None and "lora_rank" not in said:
        words["lora_rank"] = rank[1] or rank[2]
    words |= _dtype(said, named)
    if text and "peft" not in said:
        _leave(said, text)
    return words


def _leave(said: dict[str, str], text: str) -> None:
    """Of the method, what says who shards and how; nothing, where that is no word."""
    for read in (_BITS, _DTYPE, _BESIDE, _RANK, _LORA, _ALL_MATRICES):
        text = read.sub(" ", text)
    del said["strategy"]
    if text.strip(_BETWEEN):
        said["strategy"] = text.strip(_BETWEEN)


def _is_only(pattern: re.Pattern[str], text: str) -> bool:
    return pattern.fullmatch(text.strip(_BETWEEN)) is not None


def _dtype(said: dict[str, str], text: str) -> dict[str, str]:
    found = _DTYPE.search(text)
    return {} if found is None or "precision" in said else {"precision": found[1]}
