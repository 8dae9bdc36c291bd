"""Cells that say how many there are with what they count: `8 nodes x 8 H100`, `16 GPUs (2 nodes)`, `4x8`, `8xH100`, `v5p-128`.

Each function takes what a row says by column, may take away the cell that it reads, and returns what that says of other
columns.
"""

from __future__ import annotations

import re

_NODES = re.compile(
    r"(?<![a-wyz\d_.])(\d+)\s*[x*\u00d7-]?\s*(?:nodes?|hosts?|servers?|machines?)\b", re.IGNORECASE
)
_NODES_OF_CARDS = re.compile(r"(\d+)\s*[x*\u00d7]\s*(\d+)\s*(?:[x*\u00d7]\s*)?([a-z]\w.*)?", re.IGNORECASE)
_EACH = re.compile(
    r"(?:nodes?|hosts?|servers?|machines?)\W*(?:[x*\u00d7]|of|with|each)|(?:per|/|each|a)[\s-]*node",
    re.IGNORECASE,
)
_COUNT = re.compile(r"(?<![\w.])(\d+)(?!\s*g(?:i?b)?\b)(?![\w.]*\d)\s*[x*\u00d7]?\s*(.*)", re.IGNORECASE)
_KIND = re.compile(r"^(?:gpus?|cards?|devices?|chips?|accelerators?)\b|[(),]|\bper\b.*", re.IGNORECASE)
_IN_FRONT = re.compile(r"\s*(\d+)\s*[x*\u00d7]\s*[a-z]", re.IGNORECASE)
_BEHIND = re.compile(r"(.*\w.*?)\s*(?:(?<!rt)x|[*\u00d7])\s*(\d{1,4})", re.IGNORECASE)  # `A100-80G x 8`
# `64 A100-SXM4-80GB`; a 3090 Ti is one.
_SPACED = re.compile(
    r"\s*(?![2-5]0[5-9]0\b)(\d{1,5})\s+((?:[a-z]+\s+)*[a-z]+[\s-]?\d.*|gaudi.*)", re.IGNORECASE
)
_IN_BRACKETS = re.compile(r"\((\d+)\s*[x*\u00d7]?\s*(?:gpus?|cards?)\)", re.IGNORECASE)
_GRID = re.compile(r"(\d+)\s*[x*\u00d7]\s*(\d+)")
_CARDS = re.compile(r"(\d[\d,]*)\s*(?:[x*\u00d7]\s*|\s)((?!gpu)[a-z].*)", re.IGNORECASE)
# A slice of TPUs by its name; of v4 and v5p the number is of cores, two a chip (cloud.google.com/tpu/docs, of each version).
_SLICE = re.compile(
    r"(?:(\d+)\s*[x*\u00d7]\s*)?(?:tpu[\s-]*)?(v[2-6](?:[ep]|lite(?:pod)?)?)-(\d+)", re.IGNORECASE
)
_TWO_CORES = ("v2", "v3", "v4", "v5p")


def counted_nodes(said: dict[str, str]) -> dict[str, str]:
    """Nodes, and accelerators in all or of each, whichever column has them."""
    for column in ("n_gpus", "nodes", "gpu"):
        found = _nodes_in(said.get(column, "").strip(), column)
        if found:
            del said[column]
            return {name: word for name, word in found.items() if name not in said}
    if {"n_gpus", "nodes", "gpu", "gpus_per_node", "dp"} & set(said):
        return {}
    cluster = re.sub(
        r"\d+(?:\.\d+)?\s*[gt]b?(?:it)?(?:/s|ps|e)?\b.*",
        "",
        said.get("interconnect", ""),
        flags=re.IGNORECASE,
    )
    found = _nodes_in(cluster.strip(" ,;("), "gpu")  # `4 nodes x 8 H20, 400 Gb/s`
    return found if {"nodes", "gpus_per_node", "gpu"} <= set(found) else {}


def _nodes_in(text: str, column: str) -> dict[str, str]:
    grid = None if column == "n_gpus" else _NODES_OF_CARDS.fullmatch(text)
    if grid is not None:  # `8 x 8xH100`
        return {"nodes": grid[1], "gpus_per_node": grid[2]} | ({"gpu": grid[3]} if grid[3] else {})
    nodes = _NODES.search(text)
    if nodes is None:
        return {}
    found, rest = {"nodes": nodes[1]}, f"{text[: nodes.start()]} {text[nodes.end() :]}".strip()
    count = _COUNT.search(rest)
    if count is None:
        return found | ({"gpu": rest} if column == "gpu" and rest else {})
    is_each = column == "gpu" or _EACH.search(text) is not None
    found["gpus_per_node" if is_each else "n_gpus"] = count[1]
    name = _KIND.sub("", count[2]).strip()
    return found | ({"gpu": name} if name else {})


def slice_of_tpus(said: dict[str, str]) -> dict[str, str]:
    """`v5p-128`, `2x v5e-256`: which chips, and how many where nothing else says so."""
    tpus = _SLICE.fullmatch(said.get("gpu", ""))
    if tpus is None:
        return {}
    said["gpu"] = f"TPU {re.sub('lite(pod)?', 'e', tpus[2].lower())}"  # Google Cloud's v5litepod
    number = int(tpus[1] or 1) * int(tpus[3]) // (2 if tpus[2].lower() in _TWO_CORES else 1)
    return {} if {"n_gpus", "nodes", "dp"} & set(said) else {"n_gpus": str(max(1, number))}


def counted_cards(said: dict[str, str]) -> dict[str, str]:
    """`4x8` accelerators: four nodes of eight; `8 x A100` with their name. A count in the name's place is their number,
    and a name in the count's their name."""
    if "gpu" not in said and re.fullmatch(r"[a-z].*", said.get("n_gpus", ""), re.IGNORECASE):
        said["gpu"] = said.pop("n_gpus")  # `Accelerators`: A100
    name = said.get("gpu", "")
    if "n_gpus" not in said:
        if (behind := _BEHIND.fullmatch(name)) is not None and not {"nodes", "gpus_per_node", "dp"} & set(
            said
        ):
            return {"gpu": behind[1], "n_gpus": behind[2]}
        if re.fullmatch(r"\d{1,3}", name):
            return {"n_gpus": said.pop("gpu")}
        number = _IN_FRONT.match(name) or _IN_BRACKETS.search(name)
        is_open = not {"nodes", "gpus_per_node", "dp"} & set(said)
        if is_open and number is None and (spaced := _SPACED.fullmatch(name)) is not None:
            return {"n_gpus": spaced[1], "gpu": spaced[2]}
        return {"n_gpus": number[1]} if number is not None and is_open else {}
    text = re.sub(r"\s*[x*\u00d7]\s*$", "", said["n_gpus"])  # `8x`
    grid, cards = _GRID.fullmatch(text), _CARDS.fullmatch(text)
    if grid is not None:
        nodes, per_node = (int(size) for size in grid.groups())
        return {"n_gpus": str(nodes * per_node), "nodes": str(nodes), "gpus_per_node": str(per_node)}
    if cards is not None:
        return {"n_gpus": cards.group(1)} | ({} if name else {"gpu": cards.group(2)})
    return {"n_gpus": text}
