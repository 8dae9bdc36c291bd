"""Words that are no cell's own but can mean one thing: `2 per GPU` sequences, a batch of `512 x 4096`, `ZeRO++`, 4-bit precision."""

from __future__ import annotations

import re

_EACH = re.compile(r"(\d+)\s*(?:x|\(?(?:/|per)\s*(?:gpu|device|rank|card|replica)\)?)", re.IGNORECASE)
_TOKENS = re.compile(r"([\d,]+\s*k?)\s*(?:tokens?|toks?)", re.IGNORECASE)
_TIMES = re.compile(r"([\d,]+)\s*[x*\u00d7]\s*([\d,]+)(k?)", re.IGNORECASE)
_OF_ALL = r"([\d,]+)\s*\(?(?:global|total|overall)\)?|(?:global|total|overall)\W*([\d,]+)"
_SHORTEST = 128  # tokens of a sequence
_BITS = re.compile(r"(?:bnb[\s_-]*)?(?:(4|8)[\s_-]*bits?|(nf4|int[48]))", re.IGNORECASE)
_ZEROPP = r"zero[\s_-]*(?:\+\+|pp|plus[\s_-]*plus)"
_NARROW = re.compile(
    r"(?:paged[\s_-]*)?(?:[48][\s_-]*bit[\s_-]*adamw?|adamw?[\s_-]*[48][\s_-]*bit)(?![a-z])", re.IGNORECASE
)
_LABELS = {
    "seq_len": r"s|max|up to|ctx|context|(?:max[\s_-]*)?seq(?:uence)?(?:[\s_-]*len(?:gth)?)?",
    "micro_batch_size": r"b|bs|mbs|micro[\s_-]*batch|batch(?:[\s_-]*size)?",
    "global_batch_seqs": r"b|bs|gbs|(?:global[\s_-]*)?batch(?:[\s_-]*size)?",
    "batch_size": r"b|bs|batch(?:[\s_-]*size)?",
}
_STRATEGIES = {
    _ZEROPP: {"strategy": "ZeRO-3", "zeropp": "qwz,hpz,qgz"},
    r"(?:colossal-?ai[\s_-]*)?gemini(?:[\s_-]*(?:ddp|plugin))?": {"strategy": "ZeRO-3"},
    r"(?:optimizer|optimiser)[\s_-]*(?:states?[\s_-]*)?shard(?:ing|ed)": {"strategy": "ZeRO-1"},
    r"mics|hybrid": {"strategy": "HYBRID_SHARD"},
    r"dp|data[\s_-]*parallel(?:ism)?|horovod|single(?:[\s_-]*(?:gpu|device|card))?": {"strategy": "DDP"},
}


def loose_words(said: dict[str, str]) -> dict[str, str]:
    _unlabelled(said)
    _optimizer(said)
    return _strategy(said) | _sequences(said) | _quantised(said) | _compiled(said) | _schedule(said)


def _strategy(said: dict[str, str]) -> dict[str, str]:
    text = said.get("strategy", "").strip()
    if re.fullmatch(r"gpipe|1f1b", text, re.IGNORECASE):
        if "pp" not in said:
            return {"strategy": f"PP ({text})"}  # all accelerators are its stages
        del said["strategy"]
        return {} if "schedule" in said else {"schedule": text}
    options = re.fullmatch(rf"({_ZEROPP})\W*(?:with\s+)?((?:[hq](?:pz|wz|gz)\W*)+)", text, re.IGNORECASE)
    if options is not None:  # `ZeRO++ (hpZ + qwZ)`
        names = ",".join(re.findall(r"[a-z]{3}", options[2].lower()))
        return {"strategy": "ZeRO-3", "zeropp": said.get("zeropp", names)}
    found = next(
        (words for names, words in _STRATEGIES.items() if re.fullmatch(names, text, re.IGNORECASE)), {}
    )
    return {name: word for name, word in found.items() if name == "strategy" or name not in said}


def _optimizer(said: dict[str, str]) -> None:
    """Of a method, `Full FT + 8-bit Adam`."""
    found = _NARROW.search(said.get("strategy", ""))
    if found is not None and "optimizer" not in said:
        said["optimizer"] = found[0]
        said["strategy"] = _NARROW.sub(" ", said["strategy"]).strip(" +,&/()") or "full"


def _unlabelled(said: dict[str, str]) -> None:
    """Numbers with their own name before them: `seq 2048`, `b=2`, `max 4096`."""
    for column, names in _LABELS.items():
        if (
            found := re.fullmatch(rf"(?:{names})[\s=:_-]*(\d.*)", said.get(column, ""), re.IGNORECASE)
        ) is not None:
            said[column] = found[1]


def _sequences(said: dict[str, str]) -> dict[str, str]:
    words: dict[str, str] = {}
    size = said.get("micro_batch_size", "")
    if re.fullmatch(r"max(?:imum)?|largest|(?:best|max) (?:that )?fits?", size, re.IGNORECASE):
        del said["micro_batch_size"]
    elif (each := _EACH.fullmatch(size)) is not None:
        words["micro_batch_size"] = each[1]
    elif (tokens := _TOKENS.fullmatch(size)) is not None and (length := _whole(said.get("seq_len", ""))):
        words["micro_batch_size"] = str(max(1, _whole(tokens[1]) // length))
    for column in ("global_batch_seqs", "batch_size"):
        whole = re.fullmatch(_OF_ALL, said.get(column, "").strip(), re.IGNORECASE)
        is_only = column == "global_batch_seqs" or "global_batch_seqs" not in said
        if whole is not None and is_only:  # `64 (global)`
            del said[column]
            words.setdefault("global_batch_seqs", whole[1] or whole[2])
    batch = _TIMES.fullmatch(said.get("global_batch_seqs", ""))
    if batch is not None:  # sequences by tokens of each, or of each replica
        by_tokens = batch[3] or _whole(batch[2]) >= _SHORTEST
        words["global_batch_seqs"] = batch[1] if by_tokens else str(_whole(batch[1]) * _whole(batch[2]))
    return words


def _whole(text: str) -> int:
    plain = re.fullmatch(r"(\d+)\s*(k?)", text.replace(",", "").strip().lower())
    return 0 if plain is None else int(plain[1]) * (1024 if plain[2] else 1)


def _quantised(said: dict[str, str]) -> dict[str, str]:
    """Bits in place of a precision are those of the frozen matrices, for nothing else is trained beside so few."""
    text = said.get("precision", "").strip()
    if text.lower() in ("no", "none", "false"):  # Accelerate's mixed_precision
        return {"precision": "fp32"}
    bits = _BITS.fullmatch(text)
    is_adapters = {"peft", "lora_rank"} & set(said) or re.search(
        "lora", said.get("strategy", "") + said.get("framework", ""), re.IGNORECASE
    )
    if bits is None or not (is_adapters or (bits[1] or bits[2]).lower() in ("4", "nf4", "int4")):
        return {}
    del said["precision"]
    words = {} if "base_precision" in said else {"base_precision": bits[1] or bits[2]}
    return words if is_adapters else words | {"peft": "qlora"}


def _compiled(said: dict[str, str]) -> dict[str, str]:
    is_all = re.fullmatch(r"default|full|(?:whole|full)[\s_-]*graph", said.get("compile", ""), re.IGNORECASE)
    return {} if is_all is None else {"compile": "true"}


def _schedule(said: dict[str, str]) -> dict[str, str]:
    text = said.get("schedule", "").lower()
    if re.fullmatch(r"1f1b[\s_-]*interleav\w*", text):
        return {"schedule": "interleaved"}
    chunks = re.fullmatch(r"(?:vpp?|v)[\s_=:-]*(\d+)", text)
    if chunks is not None:  # `VPP=4`
        return {"schedule": "interleaved", "chunks": said.get("chunks", chunks[1])}
    named = re.fullmatch(r"(?:afab|gpipe|f-then-b)\s*\([\w\s-]*\)", text)
    return {} if named is None else {"schedule": "gpipe"}
