"""What a row names without a degree: one parallelism alone has all accelerators, of several nothing says how many each has."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

COUNTED = ("dp", "tp", "pp", "cp", "ep", "chunks")
# A method that is one parallelism alone, whose degree is then all accelerators.
_ALONE = {
    "pp": r"pp|pipeline([\s_-]*(model[\s_-]*)?parallel(ism)?)?|(naive[\s_-]*)?pipeline([\s_-]*mp)?",
    "tp": r"tp|(intra[\s_-]*layer[\s_-]*)?tensor([\s_-]*(model[\s_-]*)?parallel(ism)?)?|megatron[\s_-]*(lm[\s_-]*)?tp",
    "cp": r"cp|context[\s_-]*parallel(ism)?|ring[\s_-]*attention|(deepspeed[\s_-]*)?ulysses([\s_-]*sp)?",
}
_BESIDE = r"(\s*(only|alone|\+\s*sp))?"
_NAMED = {
    "tensor parallelism": ("tp", r"\btp\b|\btensor[\s_-]*(model[\s_-]*)?parallel"),
    "a pipeline": ("pp", r"\bpp\b|\bpipeline"),
    "context parallelism": ("cp", r"\bcp\b|\bcontext[\s_-]*parallel|\bring[\s_-]*att"),
}
_DISK = re.compile(r"\bnvme\b|\bssd\b|\bdisk\b", re.IGNORECASE)


def number(said: Mapping[str, str], column: str) -> int | None:
    text = said.get(column, "")
    return int(float(text)) if re.fullmatch(r"\d{1,9}(\.0*)?", text) else None


def alone(said: dict[str, str]) -> dict[str, str]:
    """The degree of `Pipeline parallel`, `PP (GPipe)`, `TP only` or `Ulysses-4` in a row that has no other degree."""
    cards = number(said, "n_gpus")
    column = "strategy" if said.get("strategy") else "parallelism"
    text = said.get(column, "").strip().lower()
    found = re.fullmatch(r"(.*?)(?:\s*\(([^()]*)\))?(?:[\s-]*(\d+))?", text)
    if not text or found is None or any(number(said, each) for each in COUNTED):
        return {}
    kind = next(
        (each for each, words in _ALONE.items() if re.fullmatch(f"({words}){_BESIDE}", found[1])), None
    )
    size = found[3] or (None if cards is None else str(cards))
    if kind is None or size is None:
        return {}
    del said[column]
    words = {kind: size}
    if "ulysses" in found[1] and "context_kind" not in said:
        words["context_kind"] = "ulysses"
    if kind == "pp" and found[2] and "schedule" not in said:
        words["schedule"] = found[2]
    return words


def without_degrees(said: Mapping[str, str]) -> list[str]:
    """Parallelism that a row names and gives no degree, neither there nor in a column: `ZeRO-1 + TP`, `3D (TP+PP+DP)`."""
    found = _open_columns(said)
    return [name for name, (column, _) in _NAMED.items() if column in found]


def left_over(said: Mapping[str, str]) -> dict[str, str]:
    """The degree of one parallelism that is named without any, where all others and the accelerators are counted."""
    found, cards, data = _open_columns(said), number(said, "n_gpus"), number(said, "dp")
    if len(found) != 1 or not cards or not data:
        return {}
    others = data * math.prod(number(said, column) or 1 for column, _ in _NAMED.values())
    return {} if cards % others else {found[0]: str(cards // others)}


def _open_columns(said: Mapping[str, str]) -> list[str]:
    words = f"{said.get('strategy', '')} {said.get('parallelism', '')}".lower()
    return [column for column, named in _NAMED.values() if column not in said and re.search(named, words)]


def names_disks(said: Mapping[str, str]) -> bool:
    """Whether something is said to be on a disk, which no column says."""
    columns = (
        "offload",
        "offload_optimizer",
        "offload_parameters",
        "offload_activations",
        "strategy",
        "zero_stage",
    )
    return any(_DISK.search(said.get(column, "")) for column in columns)
