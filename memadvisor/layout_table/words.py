"""Cells that say more than their own column does: `TP4 PP2`, `DeepSpeed ZeRO-3 + offload`, `interleaved (v=2)`, `4x8`
accelerators.

What they say goes into the columns that are for it, where the row has none of its own.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from memadvisor.layout_table.adapter_words import adapter_words
from memadvisor.layout_table.alone import (
    COUNTED,
    alone,
    left_over,
    names_disks,
    number,
    without_degrees,
)
from memadvisor.layout_table.cells import NO, YES, Cells
from memadvisor.layout_table.counted_words import counted_in_words, machines
from memadvisor.layout_table.counts import counted_cards, counted_nodes, slice_of_tpus
from memadvisor.layout_table.loose_words import loose_words
from memadvisor.layout_table.phrases import phrased, says_something
from memadvisor.layout_table.supercomputers import supercomputer
from memadvisor.schedule_names import schedule_name

_SHORT = r"dp|tp|mp|pp|cp|ep|vpp|vp|sp|mbs|gbs|bs|gas|ga"
_WHOLE = r"(?:data|tensor|pipeline|context|expert|model)[\s_-]*parallel(?:ism)?"
# `tensor=8` is one, `model 13B` none.
_DEGREE = re.compile(
    rf"(?<![a-z])({_SHORT}|{_WHOLE}|(?:data|tensor|pipeline)(?=['\"]?\s*[=:(]|\s+\d))['\"]?\s*[-=:_(]?\s*(\d+)",
    re.IGNORECASE,
)
# `(TP, PP, DP) = (8, 16, 8)`
_LISTED = re.compile(
    rf"\(?((?:(?:{_SHORT}|[dtpc])\s*[,/x*\u00d7-]\s*)+(?:{_SHORT}|[dtpc]))\)?\s*[=:]\s*[(\[]?\s*(\d+(?:\s*[,/x*\u00d7-]\s*\d+)+)",
    re.IGNORECASE,
)
_WAYS = re.compile(
    rf"(\d+)[\s-]*ways?[\s-]*({_SHORT}|{_WHOLE}|data|tensor|pipeline|expert)(?![a-z])", re.IGNORECASE
)
# `D1T8P8`, `t=8, p=8, d=1`, `8D x 8T`: letters, where they are all that there is.
_LETTERED = re.compile(r"(?:[dtpc]\s*[=:]?\s*\d+[\s,;x*\u00d7/_-]*){2,}", re.IGNORECASE)
_LETTER = re.compile(r"([dtpc])\s*[=:]?\s*(\d+)", re.IGNORECASE)
_BEHIND = re.compile(r"(?:\d+\s*[dtpc][\s,;x*\u00d7/_-]*){2,}", re.IGNORECASE)
# FSDP2 is a name, FSDP 8 and FSDP=8 a degree.
_FSDP = re.compile(r"(?<![a-z])fsdp(?:[12]?[\s=:(]+(\d+)|([3-9]|\d{2,}))", re.IGNORECASE)
_SHARDED = re.compile(
    r"(?<![a-z])(hsdp|fsdp|ddp|zero[\s_-]*(?:stage)?[\s_-]*[0-3]|z[1-3](?!\d))", re.IGNORECASE
)
_LENGTH = re.compile(r"(?<![a-z])seq(?:[_-]?len)?[\s=:_-]*(\d+k?)(?![\w.])", re.IGNORECASE)
_DEGREES = {
    "data": "dp", "tensor": "tp", "pipeline": "pp", "context": "cp", "expert": "ep", "model": "tp", "d": "dp", "t": "tp", "p": "pp",
    "c": "cp", "mp": "tp", "vpp": "chunks", "vp": "chunks", "sp": "ulysses", "mbs": "micro_batch_size", "gbs": "global_batch_seqs",
    "bs": "micro_batch_size", "gas": "grad_accum", "ga": "grad_accum",
}  # fmt: skip
_CHUNKS = re.compile(
    r"(?:\bvpp|\bvp|\bv|chunks|stages)\s*[-=:]?\s*(\d+)|(\d+)\s*(?:chunks|virtual)", re.IGNORECASE
)
_STAGE = re.compile(
    r"\bz(?:ero)?[\s_-]*(?:stage)?[\s_-]*[0-3]\b|shard_grad_op|no_shard|zero[\s_-]*(?:offload|infinity)"
)
_NOTHING = ("none", "no", "false", "off", "0", "0.0")


def spelled_out(cells: Cells) -> Cells:
    """The same row, with what its words say in the columns that are for it."""
    said = dict(cells.texts)
    for reader in (
        _none_of_it,
        loose_words,
        supercomputer,
        phrased,
        adapter_words,
        _techniques,
        _parallelism,
        _fsdp,
        machines,
        counted_in_words,
        counted_nodes,
        slice_of_tpus,
        counted_cards,
        alone,
        left_over,
        _method,
        _precision,
        _chunks,
        _stage,
        _sharded,
        _offload,
        _offloaded_inputs,
        _ulysses,
        _of_each_device,
        _batch,
    ):
        said |= reader(said)
    if "precision" in cells.texts and "precision" not in said and "base_precision" not in cells.texts:
        cells.note(
            f"precision {cells.texts['precision']!r} is taken for that of a frozen base beside adapters"
        )
    words = cells.text("parallelism") or ""
    is_read = degrees_in(words) or _FSDP.search(words) or _SHARDED.search(words) or says_something(words)
    if re.search(r"\d", words) and not is_read:
        cells.note(f"parallelism {words!r} is not understood")
    if open_ones := without_degrees(said):
        cells.note(f"{', '.join(open_ones)} named without a degree: 1 is taken")
    if names_disks(cells.texts):
        cells.note("disks are not priced: what is on one is taken to be in the host's memory")
    if "batch_size" in said and "micro_batch_size" in said and "micro_batch_size" not in cells.texts:
        cells.note("batch_size is taken for a replica's microbatch")
    return Cells(said, cells.notes)


# What a method of several has beside who shards: `FSDP + AC`, `FSDP + torch.compile + Float8`.
_TECHNIQUES = (
    ("recompute", "full", r"\b(?<!no )(?<!w/o )(ac|gc|(full )?(activation|gradient|grad|act)[\s_-]*(checkpoint\w*|recomput\w*|ckpt)|recomput\w+|ckpt)\b"),
    ("recompute", "selective", r"selective|\bsac\b"),
    ("compile", "true", r"(?<!no )\b(torch[._])?compiled?\b"),
    ("precision", "fp8", r"\b(float8|fp8)\b"),
    ("attention", "flash", r"\bflash[\s_-]*att\w*([\s_-]*v?[12])?\b|\bfa2?\b"),
    ("attention", "flash_attention_2", r"\bflash[\s_-]*att\w*[\s_-]*v?2\b|\bfa2\b"),
    ("attention", "flash_attention_3", r"\bflash[\s_-]*att\w*[\s_-]*v?3\b|\bfa3\b"),
    ("attention", "flash_attention_4", r"\bflash[\s_-]*att\w*[\s_-]*v?4\b|\bfa4\b"),
)  # fmt: skip


def _none_of_it(said: dict[str, str]) -> dict[str, str]:
    """A degree of 0 is none of that parallelism."""
    for column in COUNTED:
        if said.get(column) in ("0", "0.0"):
            del said[column]
    return {}


def _techniques(said: dict[str, str]) -> dict[str, str]:
    text = said.get("strategy", "").lower()
    beside = f"{text} {said.get('parallelism', '').lower()}"  # `FSDP (FULL_SHARD) + AC` of either
    found = {column: word for column, word, words in _TECHNIQUES if re.search(words, beside)}
    rest = text
    for _, _, words in _TECHNIQUES:
        rest = re.sub(words, " ", rest)
    if text and re.search(r"[a-z\d]", re.sub(r"\b(with|and|w)\b", " ", rest)) is None:
        del said["strategy"]
    return {column: word for column, word in found.items() if column not in said}


def _parallelism(said: Mapping[str, str]) -> dict[str, str]:
    """Degrees of `TP4 PP2 DP8`, `dp=8-tp=4`, `PP2DP4TP1`, `8-way TP`, of a method `Megatron TP=8`."""
    words = " ".join(said.get(column, "") for column in ("parallelism", "strategy"))
    found = degrees_in(words)
    if (length := _LENGTH.search(words)) is not None:
        found["seq_len"] = length[1]
    if (degree := _FSDP.search(words)) is not None:
        found["fsdp"] = degree[1] or degree[2]
    return {column: size for column, size in found.items() if column not in said}


def degrees_in(words: str) -> dict[str, str]:
    """What words say of degrees, by column."""
    plain = words.strip().strip("()[]")
    listed = _LISTED.search(words)
    names, sizes = (
        re.findall(r"[a-z]+|\d+", part.lower()) for part in (listed.groups() if listed else ("", ""))
    )
    if names and len(names) == len(sizes):
        pairs = list(zip(names, sizes, strict=True))
    elif _LETTERED.fullmatch(plain):
        pairs = _LETTER.findall(plain)
    elif _BEHIND.fullmatch(plain):
        pairs = [(letter, size) for size, letter in re.findall(r"(\d+)\s*([a-z])", plain, re.IGNORECASE)]
    else:
        pairs = [(name, size) for size, name in _WAYS.findall(words)]
        pairs += _DEGREE.findall(re.sub(r"(?<=\d)(?=[A-Za-z])", " ", _WAYS.sub(" ", words)))
    short = [(re.sub(r"[\s_-]*parallel(ism)?$", "", name.lower()), size) for name, size in pairs]
    return {_DEGREES.get(name, name): size for name, size in short}


def _fsdp(said: dict[str, str]) -> dict[str, str]:
    """Of `yes` that FSDP shards, of a number how many replicas share, of words what they are in `strategy`."""
    text = said.pop("fsdp", "")
    if not text or text.lower() in _NOTHING or (text.isdigit() and int(text) < 2):
        return {}
    is_open = "zero_stage" not in said and not _says_who_shards(said.get("strategy", ""))
    who = "FSDP" if text.isdigit() or text.lower() in YES else text
    found = {"strategy": _joined(who, said.get("strategy"))} if is_open else {}
    if text.isdigit() and "shard" not in said:
        found["shard"] = text
    return found


def _says_who_shards(text: str) -> bool:
    return (
        _SHARDED.search(text) is not None
        or re.search(r"shard|deepspeed|p_os|optim", text.lower()) is not None
    )


def _joined(who: str, rest: str | None) -> str:
    """Who shards, and what else a method says: `FSDP`, `compile, async TP`."""
    return f"{who}, {rest}" if rest else who


def _method(said: dict[str, str]) -> dict[str, str]:
    """A method that is a pipeline's schedule."""
    text = said.get("strategy", "")
    if schedule_name(text) is None:
        return {}
    del said["strategy"]
    return {} if "schedule" in said else {"schedule": text}


def _precision(said: dict[str, str]) -> dict[str, str]:
    """Flags by the name of a dtype, as Hugging Face's `bf16=True`."""
    quantized = said.get("base_precision", "")
    if re.search("fp8|float8", quantized, re.IGNORECASE) and not {"peft", "lora_rank", "precision"} & set(
        said
    ):
        return {"precision": said.pop("base_precision")}  # MaxText's word for it
    named = [dtype for dtype in ("fp8", "bf16", "fp16") if said.get(dtype, "").lower() in YES]
    if said.get("fp8", "").lower() not in ("", *NO):  # `rowwise`, `hybrid`
        named = ["fp8 rowwise" if "row" in said["fp8"].lower() else "fp8"]
    return {} if not named or "precision" in said else {"precision": named[0]}


def _chunks(said: Mapping[str, str]) -> dict[str, str]:
    found = _CHUNKS.search(said.get("schedule", ""))
    return {} if found is None or "chunks" in said else {"chunks": found.group(1) or found.group(2)}


def _stage(said: Mapping[str, str]) -> dict[str, str]:
    """The stage that stands in a trainer's name: `DeepSpeed ZeRO-2`, `FSDP (SHARD_GRAD_OP)`."""
    found = _STAGE.search(said.get("framework", "").lower())
    rest = said.get("strategy", "")
    if found is None or "zero_stage" in said or _says_who_shards(rest):
        return {}
    return {"strategy": _joined(found.group(), rest)}


def _sharded(said: dict[str, str]) -> dict[str, str]:
    """Who shards, of words for degrees: `FSDP 8, TP 8`, `ZeRO-1 + TP4`; and of a distributed optimizer its stage."""
    if said.get("shard") == "-1":  # torchtitan's word for all
        del said["shard"]
        if (number(said, "replicate") or 1) == 1:
            said.pop("replicate", None)
        return {} if {"strategy", "zero_stage", "framework"} & set(said) else {"strategy": "FSDP"}
    if "zero_stage" in said or _says_who_shards(said.get("strategy", "")):
        return {}
    found = _SHARDED.search(said.get("parallelism", ""))
    if found is not None:
        return {"strategy": _joined(found[1], said.get("strategy"))}
    if "strategy" in said:
        return {}
    if (number(said, "shard") or 1) > 1 and "framework" not in said:
        return {"strategy": "FSDP"}  # torchtitan's degrees
    return {"zero_stage": "1"} if said.get("distributed_optimizer", "").lower() in YES else {}


def _offload(said: dict[str, str]) -> dict[str, str]:
    """ZeRO-Offload has the optimizer's state on the host (arXiv:2101.06840), ZeRO-Infinity the parameters too (arXiv:2104.07857)."""
    words = said.get("offload_optimizer", "")
    if "offload" not in said and re.search(r"[a-z]{3}\w* ?\W+\w|param|weight|activ", words, re.IGNORECASE):
        said["offload"] = said.pop("offload_optimizer")
    text = said.get("offload", "").lower()
    told = " ".join(said.get(column, "") for column in ("zero_stage", "strategy", "framework")).lower()
    if (
        not text
        and re.search("offload|infinity", told)
        and not re.search(r"(no|without|w/o)[\s-]*offload", told)
    ):
        text = "all" if "infinity" in told else "cpu"
    if not text or text in _NOTHING:
        return {}
    found = {
        "offload_optimizer": r"optim|state|both|all",
        "offload_parameters": r"param|weight|both|all",
        "offload_activations": r"activ|\bact\b",
    }
    named = [column for column, words in found.items() if re.search(words, text)]
    if not named:  # true, cpu, nvme
        is_third = re.search(r"3|full_?shard|fsdp", told) and not re.search(r"zero[\s_-]*[012]", told)
        named = ["offload_optimizer", "offload_parameters"] if is_third else ["offload_optimizer"]
    return {column: "true" for column in named if column not in said}


def _offloaded_inputs(said: dict[str, str]) -> dict[str, str]:
    """What is kept for the backward waits on the host, of words for recomputation: MaxText's `minimal_offloaded`,
    axolotl's `offload`, Unsloth's own checkpoints."""
    text = said.get("recompute", "").lower()
    if (
        not re.search(r"unsloth|(full|minimal|true|yes|^)(\W|_|with|and|cpu)*offload", text)
        or "offload_activations" in said
    ):
        return {}
    if not text.startswith("minimal"):
        said["recompute"] = "full"
    return {"offload_activations": "true"}


def _ulysses(said: Mapping[str, str]) -> dict[str, str]:
    """Degrees of a sequence parallelism that is not Megatron's: ranks split each sequence, and heads inside attention."""
    size = number(said, "ulysses") or number(said, "sequence_parallel") or 1
    if size == 1:
        return {}
    if size == number(said, "tp"):
        return {"sequence_parallel": "true"}
    ring = number(said, "cp")
    return {"cp": str(size), "context_kind": "ulysses"} if ring is None else {"cp": str(size * ring)}


_OF_EACH = re.compile(r"(\d+)\s*\(?(?:/|per|a|each)\s*(?:gpu|device|card|rank|replica)s?\)?", re.IGNORECASE)


def _of_each_device(said: Mapping[str, str]) -> dict[str, str]:
    """MaxText's `per_device_batch_size` counts those that share a sequence too, and may be less than one (its base.yml)."""
    size = re.fullmatch(r"\d+(\.\d+)?", said.get("micro_batch_size", ""))
    inner = math.prod(number(said, column) or 1 for column in ("tp", "cp"))
    others = {"global_batch_seqs", "grad_accum", "dp"} & set(said)
    if size is None or inner == 1 or others or "maxtext" not in said.get("framework", "").lower():
        return {}
    return {"micro_batch_size": f"{float(size[0]) * inner:g}"}


_BATCHES = ("global_batch_seqs", "batch_size")
_MANY = 100e3  # more sequences than a step has


def _tokens_in(text: str) -> str | None:
    """Of a batch in tokens: `4M tokens`, `4M`."""
    found = re.fullmatch(r"[~\u2248]?\s*(\d[\d,.]*)\s*([km]?)\s*(tok\w*)?", text, re.IGNORECASE)
    if found is None or not (found[3] or found[2]):
        return None
    number = float(found[1].replace(",", "")) * {"": 1.0, "k": 1e3, "m": 1e6}[found[2].lower()]
    return f"{number:.0f}" if found[3] or number >= _MANY else None


def _batch(said: dict[str, str]) -> dict[str, str]:
    """A bare batch size is the step's, but beside a number of microbatches, and where there are more replicas than that."""
    found = {column: tokens for column in _BATCHES if (tokens := _tokens_in(said.get(column, "")))}
    for column, tokens in found.items():
        del said[column]
        if "global_batch_tokens" not in said:
            return {"global_batch_tokens": tokens}
    for column in _BATCHES:
        if (each := _OF_EACH.fullmatch(said.get(column, ""))) is not None:
            return _each_device(said, column, int(each[1]))
    text = said.get("batch_size")
    if text is None or "global_batch_seqs" in said:
        return {}
    if "micro_batch_size" in said:
        return {} if "global_batch_tokens" in said else {"global_batch_seqs": text}
    size, replicas = number(said, "batch_size"), _replicas(said)
    is_own = ("grad_accum" in said and "counts_microbatches" not in said) or "global_batch_tokens" in said
    is_own |= size is not None and replicas is not None and size < replicas
    # On a single accelerator nobody says how many sequences go at a time, for they all do.
    is_own |= "counts_microbatches" not in said and not any(
        (number(said, name) or 1) > 1 for name in ("n_gpus", "dp", "tp", "pp", "cp", "nodes")
    )
    return {"micro_batch_size" if is_own else "global_batch_seqs": text}


def _each_device(said: dict[str, str], column: str, size: int) -> dict[str, str]:
    """A batch of `16 per GPU`: the microbatch, or beside one what a replica has of the step."""
    del said[column]
    if "micro_batch_size" not in said:
        return {"micro_batch_size": str(size)}
    others = {"global_batch_seqs", "global_batch_tokens", "grad_accum"} & set(said)
    replicas = _replicas(said)
    return {} if others or replicas is None else {"global_batch_seqs": str(size * replicas)}


def is_of_replica(cells: Cells) -> bool:
    """Whether a bare batch size is less than there are replicas."""
    if cells.text("batch_size") is None or {"global_batch_seqs", "micro_batch_size"} & set(cells.texts):
        return False
    said = spelled_out(Cells(cells.texts)).texts
    size, replicas = number(said, "batch_size"), _replicas(said)
    return size is not None and replicas is not None and size < replicas


def _replicas(said: Mapping[str, str]) -> int | None:
    data, ranks = number(said, "dp"), number(said, "n_gpus")
    if data is not None or ranks is None:
        return data
    tensor, stages, context = (number(said, column) or 1 for column in ("tp", "pp", "cp"))
    return ranks // (tensor * stages * context)
