"""A table's header -> which of a row's cells say something of which column, and which names of it are not understood.

A name is read as it stands, by its words in any order (`Micro batch size per GPU`), with a unit behind it (`Seq (K)`), or as
several columns together (`TP/PP/DP`, `Nodes x GPUs`), whose cells then have as many numbers.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from memadvisor.hardware.load import named_hardware
from memadvisor.layout_table.chinese import in_english
from memadvisor.layout_table.columns import AS_THEY_STAND, LETTERS, NAMES, ORDER, by_words, named, plain

_ENOUGH_LETTERS = 4  # of a header that has nothing else
_LAST = 10**3  # of several headers for one column, letters and compounds have the least say
# Columns that stand together in one header, as numbers.
_TOGETHER = frozenset((
    "dp", "tp", "pp", "cp", "ep", "chunks", "ulysses", "shard", "replicate", "micro_batch_size", "global_batch_seqs",
    "grad_accum", "nodes", "n_gpus", "gpus_per_node", "n_layers", "hidden", "n_heads", "seq_len", "zero_stage",
))  # fmt: skip
_CAPITALS = {"P": "pp", "T": "tp", "D": "dp", "C": "cp"}
_SEPARATORS = ("/", ",", "\u00d7", " x ", "*", "|", "+", "-", "x", " ")
_FRAME = re.compile(r"^[\s(\[{]+|[\s)\]}]+$")
_WHAT = re.compile(
    r"\b(parallelism|parallel|degrees?|layout|config(uration)?|sizes?|strategy)\b", re.IGNORECASE
)
# `Seq (K)`, `Global batch (M tokens)`: thousands of what the column counts.
_SCALE = re.compile(
    r"^(.*?)[\s_]*[(\[]\s*(?:in\s+)?(k|m|b(?=illions?\b|n?\b))(?:illions?|n)?\s*(?:of\s+)?(tokens|toks?)?(?:params|parameters)?\s*[)\]]\s*$",
    re.IGNORECASE,
)
# What stands in brackets without making it another quantity; and `model.micro_batch_size` is an option of a trainer's `model`.
_ASIDE = re.compile(
    r"\s*\((?:ring|ulysses|total|degree|stage|type|mode|yes/no|y/n|bf16|fp16|fp32|tf32|fp8|amp|mixed precision)\)\s*$",
    re.IGNORECASE,
)
_OF_WHOM = re.compile(r"^(?:input|config|cfg|hparams?|args)[\s_.-]+", re.IGNORECASE)  # `input_num_gpus`
_BATCHES = re.compile(r"batch(?:[\s_-]*sizes?)?\s*[(\[](.+)[)\]]", re.IGNORECASE)  # `Batch (micro/global)`
_BRACKETED = re.compile(r"^config\w*\s*[(\[]([^)\]]+)[)\]]\s*$", re.IGNORECASE)  # `Config (PxD)`
_COUNTS = re.compile(r"#|\b(?:number|num|no|count)\b", re.IGNORECASE)
_CARDS = re.compile(
    r"#|\b(?:number|num|no|count|of|gpus?|cards?|devices?|chips?|accelerators?|total)\b\.?", re.IGNORECASE
)
# Units of a header with words of another language than English, which are no column's name: of memory, and no micro-batch.
_UNITS = re.compile(r"(?<![a-z])[kmgt]i?b(?:\W*\d)?(?![a-z0-9])|(?<![a-z])m?s(?![a-z0-9])", re.IGNORECASE)
_OTHER_LANGUAGE = re.compile(r"[\u0400-\u04ff\u3040-\u30ff\u4e00-\u9fff\uac00-\ud7a3]")
_SCALED = ("seq_len", "global_batch_tokens", "n_params")
_OF_TOKENS = ("global_batch_seqs", "batch_size", "global_batch_tokens")


@dataclass(frozen=True, slots=True)
class Heading:
    """One name of the header: its place, the columns that the cells below it are of, and what a bare number there is
    followed by. `name`: as it stands, plain.
    """

    position: int
    columns: tuple[str, ...]
    order: int = _LAST
    unit: str = ""
    name: str = ""


def headings(names: list[str]) -> tuple[list[Heading], list[str]]:
    """What is understood of a header, and the names that are not. Single letters say something beside other names, or where
    there are several."""
    found = [_heading(position, in_english(name or "")) for position, name in enumerate(names)]
    letters = sum((name or "").strip() in LETTERS for name in names)
    if letters >= _ENOUGH_LETTERS or any(each is not None and each.order != _LAST for each in found):
        for position, name in enumerate(names):
            letter = LETTERS.get((name or "").strip())
            if found[position] is None and letter is not None:
                found[position] = Heading(position, (letter,))
    found = [
        None if each is None else replace(each, name=plain(names[each.position] or "")) for each in found
    ]
    found = _with_names(names, found)
    found = _set_apart([each for each in found if each is not None], found)
    unread = [name.strip() for name, each in zip(names, found, strict=True) if each is None and name.strip()]
    return [each for each in found if each is not None], unread


def _with_names(names: list[str], found: list[Heading | None]) -> list[Heading | None]:
    """`name` is the model's, beside other columns of layouts and where none is for it."""
    read = [each for each in found if each is not None]
    if not read or any("model" in each.columns for each in read):
        return found
    place = next((at for at, name in enumerate(names) if plain(name or "") == "name"), None)
    return [Heading(at, ("model",)) if at == place else each for at, each in enumerate(found)]


def _set_apart(read: list[Heading], found: list[Heading | None]) -> list[Heading | None]:
    """A mini-batch beside a micro-batch is the step's."""
    named_micro = any(each.columns == ("micro_batch_size",) and "micro" in each.name for each in read)
    if not named_micro or any(each.columns == ("global_batch_seqs",) for each in read):
        return found
    return [
        replace(each, columns=("global_batch_seqs",))
        if each is not None and each.columns == ("micro_batch_size",) and each.name.startswith("mini")
        else each
        for each in found
    ]


def _heading(position: int, name: str) -> Heading | None:
    is_foreign = _OTHER_LANGUAGE.search(name) is not None
    if is_foreign:
        name = _UNITS.sub("", name)
    key = named(name)
    if is_foreign and NAMES.get(key) in AS_THEY_STAND:  # what of a GPU, the words say that are not known
        return None
    if key in NAMES:
        return Heading(position, (NAMES[key],), ORDER[key])
    scaled = _scaled(position, name)
    if scaled is not None:
        return scaled
    together = _together(name) or (
        _together(bracketed[1]) if (bracketed := _BRACKETED.search(name)) else None
    )
    if together is not None:
        return Heading(position, together)
    cards = _CARDS.sub("", name).strip()
    if _COUNTS.search(name) and cards and named_hardware(cards) is not None:
        return Heading(position, ("n_gpus",), _LAST - 1, f" {cards}")  # `# of Gaudi3 cards`
    column = by_words(name) or by_words(_ASIDE.sub("", name)) or NAMES.get(named(name.rpartition(".")[2]))
    column = column or NAMES.get(named(_OF_WHOM.sub("", name)))
    return None if column is None else Heading(position, (column,), _LAST - 1)


def _scaled(position: int, name: str) -> Heading | None:
    match = _SCALE.match(name)
    if match is None:
        return None
    column = NAMES.get(named(match[1])) or by_words(match[1])
    if match[3] and column in _OF_TOKENS:
        return Heading(position, ("global_batch_tokens",), _LAST - 1, match[2])
    return Heading(position, (column,), _LAST - 1, match[2]) if column in _SCALED else None


def _together(name: str) -> tuple[str, ...] | None:
    """The columns of `TP/PP/DP`, `(t, p, d)` and `Num nodes x GPUs`; of the last GPUs are those of a node."""
    if (batches := _BATCHES.fullmatch(name.strip())) is not None:
        parts = [f"{part.strip()} batch size" for part in re.split("[/,|]", batches[1])]
        columns = [NAMES.get(named(part)) for part in parts]
        if len(parts) > 1 and all(column in _TOGETHER for column in columns):
            return tuple(str(column) for column in columns)
    text = _FRAME.sub("", _WHAT.sub("", _FRAME.sub("", name)))
    for separator in _SEPARATORS:
        parts = [part.strip() for part in text.split(separator)]
        if len(parts) < 2 or not all(parts):
            continue
        columns = [NAMES.get(named(part)) or by_words(part) or LETTERS.get(part) for part in parts]
        if set("".join(parts)) <= set("PTDC") and all(len(part) == 1 for part in parts):
            columns = [_CAPITALS[part] for part in parts]
        if all(column in _TOGETHER for column in columns) and len(set(columns)) == len(columns):
            is_grid = separator in ("\u00d7", " x ", "*", "x") and columns == ["nodes", "n_gpus"]
            return ("nodes", "gpus_per_node") if is_grid else tuple(str(column) for column in columns)
    return None


def parted(text: str, columns: tuple[str, ...]) -> dict[str, str]:
    """What a cell such as `8/4/2`, `(8, 4, 2)` or `8-4-2` says of each of several columns; words (`TP8 PP4`) are of the column
    that is for them, and what is not understood of the first one, which will say so."""
    plain = _FRAME.sub("", text)
    for separator in _SEPARATORS:
        parts = [part.strip() for part in plain.split(separator)]
        if len(parts) == len(columns) and sum(part.isdigit() for part in parts) >= len(parts) - 1:
            return dict(zip(columns, parts, strict=True))
    if re.search(r"[a-z]{2}", plain, re.IGNORECASE):
        return {"parallelism": text}
    return {columns[0]: text}
