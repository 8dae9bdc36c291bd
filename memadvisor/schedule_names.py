"""Names of pipeline schedules, and all their spellings, in options and tables alike (docs/pipelines.md)."""

from __future__ import annotations

import re

# Without signs and capitals: `PipeDream-Flush`, `pipedream_flush` and `pipedreamflush` are one word.
_SPELLINGS = {
    "gpipe": "gpipe afab allforwardallbackward fthenb",
    "1f1b": "1f1b dapple pipedreamflush",
    "interleaved": "interleaved 1f1bi i1f1b 1f1binterleaved interleaved1f1b vpp",
    "breadth-first": "breadthfirst bfs loopedbfs",
    "bpipe": "bpipe",
    "2bw": "2bw pipedream2bw",
    "chimera": "chimera",
    "zb-h1": "zbh1",
    "zb-h2": "zbh2",
    "zb-v": "zbv zbvzerobubble",
    "dualpipe": "dualpipe",
    "zb-1p": "zb1p",
    "zb-2p": "zb2p",
}
SCHEDULES = tuple(_SPELLINGS)
_BY_WORD = {word: name for name, words in _SPELLINGS.items() for word in words.split()}


def schedule_name(text: str) -> str | None:
    """The schedule meant by `1F1B`, `DAPPLE`, `PipeDream-Flush`, `1F1B-I`, `ZB-1p`...; None for others."""
    return _BY_WORD.get(re.sub(r"[^a-z0-9]", "", text.lower()))
