"""Names of pipeline schedules, and all their spellings, in options and tables alike (docs/pipelines.md)."""

from __future__ import annotations

import re

# Without signs and capitals: `PipeDream-Flush`, `pipedream_flush` and `pipedreamflush` are one word.
_SPELLINGS = {
    "gpipe": "gpipe afab allforwardallbackward fthenb filldrain",
    "1f1b": "1f1b onef1b oneforwardonebackward onefoneb dapple pipedreamflush noninterleaved 1f1bnoninterleaved noninterleaved1f1b megatron1f1b",
    "interleaved": "interleaved 1f1bi i1f1b 1f1binterleaved interleaved1f1b interleave interleaving megatroninterleaved megatron1f1bi megatroninterleaved1f1b vpp 1f1bvpp virtualpipeline depthfirst dfs",
    "breadth-first": "breadthfirst bfs loopedbfs",
    "bpipe": "bpipe",
    "2bw": "2bw pipedream2bw",
    "chimera": "chimera",
    "zb-h1": "zbh1 zb zerobubble zerobubbleh1",
    "zb-h2": "zbh2 zerobubbleh2",
    "zb-v": "zbv zbvzerobubble vzb zerobubblev",
    "dualpipe": "dualpipe",
    "dualpipe-v": "dualpipev",
    "zb-1p": "zb1p",
    "zb-2p": "zb2p",
}
SCHEDULES = tuple(_SPELLINGS)
V_SHAPED = ("zb-v", "dualpipe-v")  # two parts of the model a device, the second on the way back
_BY_WORD = {word: name for name, words in _SPELLINGS.items() for word in words.split()}


def schedule_name(text: str) -> str | None:
    """The schedule meant by `1F1B`, `DAPPLE`, `PipeDream-Flush`, `1F1B-I`, `ZB-1p`, `interleaved (v=2)`, torch's
    `ScheduleInterleaved1F1B`...; None for others."""
    words = re.sub(r"\b(?:with|v|vp|vpp|chunks)\b[\s=:]*\d+|[\s_-]v\d+\b|\b\d+\s*chunks\b", "", text.lower())
    word = re.sub(r"[^a-z0-9]", "", words.replace("with", ""))
    return _BY_WORD.get(word) or _BY_WORD.get(word.removeprefix("schedule").removesuffix("schedule"))
