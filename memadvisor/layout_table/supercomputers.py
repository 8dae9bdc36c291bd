"""Machines of research centres that a row names in place of their cards: which, how many a node has, and its network, as the
centres' own documentation has them.
"""

from __future__ import annotations

import re

_WORDS = ("gpu", "framework", "interconnect")
# Cards, of a node, and its network cards.
_MACHINES = {
    r"frontier|lumi(-g)?|crusher|setonix": ("MI250X", 8, "4x200 Gb/s"),
    r"perlmutter": ("A100-40GB", 4, "4x200 Gb/s"),
    r"polaris": ("A100-40GB", 4, "2x200 Gb/s"),
    r"juwels[ -]?booster": ("A100-40GB", 4, "4xHDR"),
    r"leonardo": ("A100 64GB", 4, "4x100 Gb/s"),
    r"summit": ("V100-16GB", 6, "2xEDR"),
    r"sierra|lassen": ("V100-16GB", 4, "2xEDR"),
    r"selene": ("A100-80GB", 8, "8xHDR"),
    r"eos": ("H100", 8, "8xNDR"),
    r"marenostrum[ -]?5": ("H100 64GB", 4, "4x200 Gb/s"),
    r"alps|isambard-ai|jupiter": ("GH200 96GB", 4, "4x200 Gb/s"),
}


def supercomputer(said: dict[str, str]) -> dict[str, str]:
    """What the name of such a machine says of the columns that a row lacks; a column that has the name alone says no more."""
    for column in _WORDS:
        text = said.get(column, "")
        found = next(
            (each for name, each in _MACHINES.items() if re.search(rf"(?<![\w-])(?:{name})(?![\w-])", text, re.IGNORECASE)),
            None,
        )  # fmt: skip
        if found is None:
            continue
        if column == "gpu" or re.fullmatch(r"[\w-]+( booster| ?5)?", text.strip(), re.IGNORECASE):
            del said[column]
        card, per_node, network = found
        words = {"gpu": card, "interconnect": network}
        if (
            "nodes" not in said
            or "n_gpus" not in said
            or (said["n_gpus"].isdigit() and int(said["n_gpus"]) % per_node == 0)
        ):
            words["gpus_per_node"] = str(per_node)
        return {name: word for name, word in words.items() if name not in said}
    return {}
