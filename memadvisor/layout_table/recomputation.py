"""What a row says of recomputation: of which operators, and of how many of the layers."""

from __future__ import annotations

import re

from memadvisor.errors import UsageError
from memadvisor.layout_table.cells import NO, YES, Cells
from memadvisor.layout_table.columns import plain as plain_word

# Everything of each layer runs again.
_ALL = re.compile(
    r"full|all|every|uniform|block|layer|per(layer|block)|transformer(layer|block)|ac$|(activation|gradient)?(re|check).*|(act|grad)ckpt|ckpt|half|partial|gc$|w(ith)?(ac|gc|ckpt|(act|grad|full|re|check)\w*)$"
)
_EVERY = re.compile(r"every (\d+)|every (?:other|second)|half|(\d+) ?(?:of|in|out of|/) ?([1-9]\d*)")
# torchtitan's `selective` by layer: every second one, or as many as are said, as a whole (its activation checkpointing).
_SELECTED_LAYERS = re.compile(r"selective\W*(?:ac\W*)?layers?\W*([1-9]\d?)?", re.IGNORECASE)
# Policies of jax.checkpoint, and MaxText's names of them (MaxText/layers/models.py): those that keep results of products,
# and those that keep some of them beside a layer's input, which is as much as nothing.
_KEEPS_PRODUCTS = re.compile(
    r"minimal|(checkpoint)?dots(saveable)?(withnobatchdims(saveable)?)?$|checkpointdots|savedotwithcontext$"
)
_KEEPS_SOME = re.compile(r"save\w+|qkvproj\w*|custom|offload\w*")
# Parts of a layer that run again and have no word of their own here: Megatron Core's `mlp`, `moe`, `mla_up_proj`.
_PART_OF_A_LAYER = re.compile(r"mlp|ffn|feed|moe|expert|mla|proj|gelu|silu|rope|embed|linear", re.IGNORECASE)
# `GC on`, `ckpt off`
_SWITCH = re.compile(
    r"\s*(?:(?:activation|gradient|grad|act)[\s_-]*)?(?:gc|ac|ckpt|checkpoint\w*|recomp\w*|remat)[\s:=-]*(?:(on|enabled?|yes|true)|off|disabled?|no|false)\s*",
    re.IGNORECASE,
)
_PERCENT = re.compile(r"(\d+(?:\.\d+)?)\s*%|(0?\.\d+)")  # of the layers
_COUNTED = re.compile(r"block\W*(\d+)|(\d+) layers|^([2-9]|[1-9]\d+)$")  # a bare number too


def recomputation(cells: Cells, layers_of_part: float) -> tuple[str, float]:
    """One of layout.RECOMPUTE, and the share of the layers that `full` is of.

    `layers_of_part`: layers of one part of a pipeline device, of which Megatron's block method recomputes so many. Words that
    name a part of each layer are selective. Raises UsageError for words that say nothing.
    """
    text, method = _plain_text(cells.text("recompute")), plain_word(cells.text("recompute_method") or "")
    count = cells.count("recompute_layers")
    if (of_layers := _SELECTED_LAYERS.search(text or "")) is not None:
        return "full", 1 / int(of_layers[1] or 2)
    is_asked = method in ("uniform", "block") or bool(count)
    try:
        word = recompute_word(text if text is not None or not is_asked else "full")
    except UsageError:
        if not _PART_OF_A_LAYER.search(text or ""):
            raise
        cells.note(f"recompute {text!r} is not understood: selective is taken")
        word = "selective"
    if word == "full" and _KEEPS_SOME.match(plain_word(text or "")):
        cells.note(
            f"recompute {text!r} keeps some of what a layer makes: that it keeps its input alone is taken"
        )
        return word, 1.0
    if word != "full" or method == "uniform":
        return word, 1.0  # uniform: the layers that run again together, of all
    words = (text or "").lower()
    if (percent := _PERCENT.fullmatch(words)) is not None:
        share = float(percent[1]) / 100 if percent[1] else float(percent[2])
        return ("full", min(1.0, share)) if share > 0 else ("none", 1.0)
    if count is None and (counted := _COUNTED.search(words)):
        count = int(next(filter(None, counted.groups())))
        if counted[3]:
            cells.note(f"recompute {text!r} is taken for so many layers of each part of the model")
    if every := _EVERY.search(words):
        step, part, whole = every.groups()
        share = int(part) / int(whole) if part else 1 / int(step or 2) if step != "0" else 0.0
    elif count is not None:
        if count == 1 and method != "block" and "block" not in words:
            cells.note("one layer to recompute is taken for Megatron's uniform method: all are, one by one")
            return word, 1.0
        share = count / layers_of_part
    elif "partial" in words:
        raise UsageError(
            f"recompute is {text!r}, which does not say of how many layers; recompute_layers does."
        )
    else:
        return word, 1.0
    if share <= 0:
        return "none", 1.0
    return word, min(1.0, share)


def _plain_text(text: str | None) -> str | None:
    """Without the option's name before it (`AC: full`), and what stands in brackets behind yes or no."""
    if text is None:
        return None
    text = re.sub(
        r"^\s*(s?ac|act|activation|gradient|grad|checkpoint\w*|ckpt|recomp\w*|remat|mode)([ _-]\w+)*[:=]\s*",
        "",
        text,
        flags=re.IGNORECASE,
    )
    if (switch := _SWITCH.fullmatch(text)) is not None:
        return "true" if switch[1] else "false"
    bare = re.sub(r"\s*\(.*\)\s*$", "", text)
    return bare if bare.lower() in (*YES, *NO) else text


def recompute_word(text: str | None) -> str:
    """What is recomputed, from the words that tables use. Raises UsageError for words that say nothing."""
    words = (text or "none").lower().strip()
    word = plain_word(words.split("(")[0])
    if (
        words in NO
        or re.fullmatch(
            r"no(ne|act|recompute|recomputation|ckpt|checkpointing|ac|gc)?|wo(ac|gc|ckpt|(act|grad|re|check)\w*)|without.*|00",
            word,
        )
        or word == "everythingsaveable"
    ):
        return "none"
    if word == "nothingsaveable" or _KEEPS_SOME.match(word):
        return "full"
    if re.search(r"select|attn|attention|sac\b|scores|\bsel\b|\bop\b|core", words):
        return "selective"
    if _KEEPS_PRODUCTS.match(word) or any(
        part in words for part in ("norm", "swiglu", "act func", "pointwise")
    ):
        return "pointwise"
    if (
        words in YES
        or word == "10"
        or _PERCENT.fullmatch(words)
        or _ALL.match(word)
        or _EVERY.search(words)
        or _COUNTED.search(words)
    ):
        return "full"
    raise UsageError(f"recompute is {text!r}; it is none, selective, pointwise or full.")
