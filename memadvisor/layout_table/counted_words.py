"""Accelerators counted in words, or by the machines that they are in: `two RTX 3090s`, `H100, 8 GPUs`, `4x DGX H100`.

Each function is as those of counts.py.
"""

from __future__ import annotations

import re

_COUNTS = ("n_gpus", "nodes", "gpus_per_node", "dp")
_DEGREES = ("tp", "pp", "cp", "shard", "replicate", "parallelism", "ep")
_WORDS = {
    "single": 1, "one": 1, "dual": 2, "two": 2, "three": 3, "quad": 4, "four": 4, "six": 6, "eight": 8, "sixteen": 16,
}  # fmt: skip
_IN_FRONT = re.compile(rf"({'|'.join(_WORDS)})[\s-]+(.*[a-z].*)", re.IGNORECASE)
_NUMBERED = re.compile(
    r"(\d{1,5})[\s-]*(?:(?:gpus?|cards?|devices?|accelerators?)\b|[\u5361\u5f20\u5757])", re.IGNORECASE
)
_IN_NODES = re.compile(
    r"(?<![a-wyz\d_.])\d+\W*(?:[x*\u00d7]\s*)?(?:nodes?|hosts?|servers?|machines?)\b|\bper\b|/\s*node",
    re.IGNORECASE,
)
_AROUND = re.compile(r"[\s,;:()*\u00d7/-]+|\b(?:of|with|on|nodes?|x)\b", re.IGNORECASE)
_GEFORCES = re.compile(r"(\d{1,2})\s*[x*\u00d7]\s*([2-5]0[5-9]0\s*(?:ti|super|d)?)", re.IGNORECASE)
# Accelerators of a machine: NVIDIA's systems, and instances of AWS, Google Cloud and Azure (their documentation).
_MACHINES = {
    r"dgx-?1": 8, r"dgx-?2": 16, r"[dh]gx[\s-]*gb[23]00.*": 72, r"[dh]gx[\s-]*[abh]\d00.*": 8, r"p3\.2xlarge": 1, r"p3\.8xlarge": 4,
    r"p3\.16xlarge": 8, r"p3dn.*": 8, r"p4de?(?:\..*)?": 8, r"p5(?:en?)?\..*": 8, r"g(?:5|6e?)\.48xlarge": 8, r"g(?:5|6e?)\.(?:12|24)xlarge": 4,
    r"g(?:5|6e?)\..*": 1, r"a[234]-\w+-(\d+)g": None, r"(?:standard_)?nd(?:96|40).*": 8,
}  # fmt: skip
_SOME = re.compile(
    r"(?:(\d+)\s*[x*\u00d7]?\s*)?(?:nvidia\s+|aws\s+|ml\.)*([a-z].*?)\s*(?:nodes?|instances?|systems?|machines?|servers?|vms?)?",
    re.IGNORECASE,
)


def machines(said: dict[str, str]) -> dict[str, str]:
    """`4x DGX H100`: 32 of them; one machine, where nothing says how many accelerators there are or what they share."""
    column = "gpu" if "gpu" in said else "framework"
    found = _SOME.fullmatch(said.get(column, ""))
    size = None if found is None else _accelerators(found[2])
    if (
        found is None
        or size is None
        or (column == "framework" and not re.match("[dh]gx", found[2], re.IGNORECASE))
    ):
        return {}
    del said[column]
    said["gpu"] = found[2]
    if any(name in said for name in _COUNTS) or (found[1] is None and any(name in said for name in _DEGREES)):
        return {}
    return {"nodes": found[1] or "1", "gpus_per_node": str(size)}


def _accelerators(machine: str) -> int | None:
    for names, size in _MACHINES.items():
        found = re.fullmatch(names, machine, re.IGNORECASE)
        if found is not None:
            return size or int(found[1])
    return None


def counted_in_words(said: dict[str, str]) -> dict[str, str]:
    """Where no column counts them."""
    text = said.get("gpu", "")
    if any(name in said for name in _COUNTS) or _IN_NODES.search(text):
        return {}
    cards = _GEFORCES.fullmatch(text)
    if cards is not None:
        return {"n_gpus": cards[1], "gpu": cards[2]}
    worded = _IN_FRONT.fullmatch(text)
    if worded is not None:
        return {"n_gpus": str(_WORDS[worded[1].lower()]), "gpu": worded[2]}
    numbered = _NUMBERED.search(text)
    if numbered is None:
        return {}
    rest = text[: numbered.start()] + " " + text[numbered.end() :]
    name = rest.strip()
    while name != (name := _trimmed(name)):
        pass
    if name:
        return {"n_gpus": numbered[1], "gpu": name}
    del said["gpu"]
    return {"n_gpus": numbered[1]}


def _trimmed(name: str) -> str:
    """Without what joins a name and a count, at its ends."""
    for found in _AROUND.finditer(name):
        if found.start() == 0 or found.end() == len(name):
            return (name[: found.start()] + name[found.end() :]).strip()
    return name
