"""Published figures of accelerators, each with the page that publishes it. Dense rates, never with sparsity.

GB means 10**9 bytes, as on the data sheets. Of 16 and 8 bits the rate is that of products summed in float32, as trainings
have them (GeForce cards are half as fast with it). A device is what torch takes for one: of AMD's MI250X, one of its two
dies. A device that is not here is unknown: measure it with `memadvisor calibrate`. A family's bare name (`A100`) means its
SXM module with the most memory. What links the devices is in links.py.
"""

from __future__ import annotations

import re

from memadvisor.hardware.amd_cards import AMD_CARDS
from memadvisor.hardware.data_center_cards import DATA_CENTER_CARDS
from memadvisor.hardware.desktop_cards import DESKTOP_CARDS
from memadvisor.hardware.entry import CatalogueEntry
from memadvisor.hardware.other_cards import OTHER_CARDS

CATALOGUE: tuple[CatalogueEntry, ...] = DATA_CENTER_CARDS + AMD_CARDS + OTHER_CARDS + DESKTOP_CARDS

# Words of names that tell no device from another.
_NOISE = frozenset(
    (
        "nvidia",
        "amd",
        "geforce",
        "tesla",
        "instinct",
        "gpu",
        "gpus",
        "tensor",
        "core",
        "oam",
        "hbm2",
        "hbm2e",
        "hbm3",
        "hbm3e",
        "google",
        "intel",
        "habana",
        "huawei",
        "npu",
        "dgx",
        "hgx",
    )
)


def find_entry(name: str) -> CatalogueEntry | None:
    """The entry that `name` means, in any case, with its words in any order; None for a device not listed.

    `A100_80GB`, `A100-80GB-SXM` and `NVIDIA A100-SXM4-80GB` are one device.
    """
    return _BY_WORDS.get(_words(name))


def _words(name: str) -> frozenset[str]:
    """The words that tell one device from another: `sxm` of any generation, sizes with their `gb`."""
    text = re.sub(r"(\d+)\s*(?:gb|gib|g)\b", r"\1gb", name.lower().replace("_", "-"))
    text = re.sub(r"\brtx[\s-]*(\d)", r"rtx\1", re.sub(r"\bsxm\d\b", "sxm", text))
    text = re.sub(r"\bascend(?=\d)", "ascend ", text)
    return frozenset(re.findall(r"[a-z0-9]+", text)) - _NOISE


_BY_WORDS = {_words(name): entry for entry in CATALOGUE for name in (entry.name, *entry.aliases)}
