"""Cells that describe a run in a phrase: `8 GPUs, ep2, batch 4 x 4096, checkpointing on`, `b4, s4096, GC-off`, `tp2sd4_stage2`, and
names with one behind them (`GPT-OSS 20B, 32k context`).

Degrees among them are read by words.py.
"""

from __future__ import annotations

import re

from memadvisor.architectures.load import named_architecture
from memadvisor.hardware.load import named_hardware

_CARDS = re.compile(
    r"(?<![\w.])(\d{1,6})\s*x?\s*(?:gpus?|cards?|devices?|accelerators?)\b(?!\s*/)", re.IGNORECASE
)
_BATCH_BY_LENGTH = re.compile(r"\b(?:batch|bs)\s*=?\s*(\d+)\s*[x*\u00d7]\s*(\d+k?)\b", re.IGNORECASE)
_LETTERS = re.compile(r"\bb(\d+)\W+s(\d+k?)\b|\bs(\d+k?)\W+b(\d+)\b")
_CONTEXT = re.compile(r"(?<![\w.])(\d+k?)[\s-]*(?:context|ctx)\b", re.IGNORECASE)
_CHECKPOINTING = (
    r"(?:(?:activation|gradient|grad|act)[\s_-]*)?(?:checkpointing|checkpoints|recompute|recomputation|gc|ac)"
)
_OFF = re.compile(
    rf"\b(?:no|without|w/o)\s+{_CHECKPOINTING}\b|\b{_CHECKPOINTING}[\s:=_-]*off\b", re.IGNORECASE
)
_ON = re.compile(rf"\b(?:with|w/)\s+{_CHECKPOINTING}\b|\b{_CHECKPOINTING}[\s:=_-]*on\b", re.IGNORECASE)
# PaddlePaddle's: replicas that share shards, and the stage of sharding behind the degrees.
_SHARDING = re.compile(r"(?<![a-z])sd(\d+)(?:\w*?_?stage([1-3]))?", re.IGNORECASE)


def phrased(said: dict[str, str]) -> dict[str, str]:
    """What a phrase says of other columns than degrees, where the row has none of its own."""
    _named(said)
    text = said.get("parallelism", "")
    found = _listed(said, text) or _cards_among(said)
    if (cards := _CARDS.search(text)) is not None:
        found["n_gpus"] = cards[1]
    if (letters := _LETTERS.search(text)) is not None:
        found["batch_size"], found["seq_len"] = letters[1] or letters[4], letters[2] or letters[3]
    if (batch := _BATCH_BY_LENGTH.search(text)) is not None:
        found["batch_size"], found["seq_len"] = batch[1], batch[2]
    if (context := _CONTEXT.search(text)) is not None:
        found["seq_len"] = context[1]
    if _OFF.search(text) or _ON.search(text):
        found["recompute"] = "none" if _OFF.search(text) else "full"
    if (sharding := _SHARDING.search(f"{text} {said.get('strategy', '')}")) is not None:
        found["shard"] = sharding[1]
        found["zero_stage"] = sharding[2] or "1"
    if {"micro_batch_size", "global_batch_seqs", "global_batch_tokens"} & set(said):
        found.pop("batch_size", None)
    return {column: word for column, word in found.items() if column not in said}


def _listed(said: dict[str, str], text: str) -> dict[str, str]:
    """The model and the cards of a row without a column for them, `Llama-3-8B / 8xH100 / bs4 / seq8192`."""
    if "model" in said or {"n_layers", "hidden"} & set(said):
        return {}
    found: dict[str, str] = {}
    for part in re.split(r"\s*[/|;,]\s+|\s+[/|;]\s*", text):
        cards = re.fullmatch(r"(\d{1,6})\s*[x*\u00d7]\s*([A-Za-z].*)", part.strip())
        device = named_hardware(cards[2] if cards is not None else part)
        if device is not None and "gpu" not in found:
            found["gpu"] = device.name
            found |= {} if cards is None else {"n_gpus": cards[1]}
        elif "model" not in found and named_architecture(part) is not None:
            found["model"] = part.strip()
    return found if "model" in found else {}


_CARDS_BY_NAME = re.compile(
    r"(?<![\w.])(?:(\d{1,4})\s*[x*\u00d7]\s*)?(\d{1,5})\s*[x*\u00d7]?\s*([A-Za-z]{1,4}\d{2,4}[A-Za-z]*)(?![\w])"
)


def _cards_among(said: dict[str, str]) -> dict[str, str]:
    """`8xA100 FSDP`, `2x8 H100 TP=8`: cards in a method or a configuration, of which nothing is left there."""
    if {"gpu", "n_gpus", "nodes", "dp"} & set(said):
        return {}
    for column in ("strategy", "parallelism"):
        for found in _CARDS_BY_NAME.finditer(said.get(column, "")):
            device = named_hardware(found[3])
            if device is None:
                continue
            text = said.pop(column)
            rest = f"{text[: found.start()]} {text[found.end() :]}".strip(" ,;/|")
            if rest:
                said[column] = rest
            return {"gpu": found[3], "n_gpus": str(int(found[1] or 1) * int(found[2]))}
    return {}


def says_something(text: str) -> bool:
    """Whether anything of a phrase is read."""
    return bool(phrased({"parallelism": text}))


# Where the layout begins in the name of a benchmark: `llama3-8b-tp1-pp2-mbs1`, `gpt3_175b_tp8_pp16`, `GPT-3 175B (TP=8, PP=8)`.
_LAYOUT_IN_NAME = re.compile(
    r"[\s_(\[-]+(?=(?:(?:dp|tp|pp|cp|ep|vpp?|mbs|gbs|bs|seq(?:_?len)?)\s*[=:_-]?\s*\d|fsdp|ddp|zero))",
    re.IGNORECASE,
)
_SIZED = re.compile(r"(?<![a-z])seq(?:_?len)?\s*[=:_-]?\s*(\d+k?)(?![a-z\d])", re.IGNORECASE)
_DTYPE = re.compile(r"[\s_-]+(bf16|fp16|fp8|fp32)(?![a-z\d])", re.IGNORECASE)


def _configured(said: dict[str, str]) -> None:
    """The name of a benchmark is its model and the layout behind it, in the column of models or in one of configurations."""
    if not {"model", "n_layers", "hidden", "n_params", "params_b"} & set(said):
        name = _LAYOUT_IN_NAME.split(said.get("parallelism", ""), maxsplit=1)[0]
        if not re.search("[,;/|]", name) and named_architecture(name) is not None:  # else `_listed` reads it
            said["model"] = said.pop("parallelism")
    parts = _LAYOUT_IN_NAME.split(said.get("model", ""), maxsplit=1)
    if len(parts) < 2:
        return
    dtype = _DTYPE.search(said["model"])
    name, rest = (_DTYPE.sub("", part) for part in parts)
    if named_architecture(name) is None and not re.search(r"(?:^|[\s_-])\d+(?:\.\d+)?[bm]$", name.lower()):
        return
    if dtype is not None:
        said.setdefault("precision", dtype[1])
    if (length := _SIZED.search(rest)) is not None:
        said.setdefault("seq_len", length[1])
    said["model"] = name
    rest = re.sub(r"[\s_-]*[,_-][\s_-]*", ", ", rest.strip(" )]"))
    said["parallelism"] = ", ".join(each for each in (said.get("parallelism"), rest) if each)


def _named(said: dict[str, str]) -> None:
    """A name with more behind a comma, where what stands before is known, is the model, and the rest a phrase."""
    _configured(said)
    name, comma, rest = said.get("model", "").partition(",")
    if not comma or named_architecture(said["model"]) is not None or named_architecture(name) is None:
        return
    said["model"] = name.strip()
    said["parallelism"] = ", ".join(each for each in (said.get("parallelism"), rest.strip()) if each)
