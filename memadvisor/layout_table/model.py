"""A row's columns of shapes -> Architecture. What a table leaves out follows from the kind of model that it is.

Two kinds are told apart: a GPT (two matrices in the feed-forward block, biases, LayerNorm, a learned table of positions,
the output projection tied to the tokens' table) and a Llama (three matrices, no biases, RMSNorm, rotary positions, an
output projection of its own). Which one a row means: docs/layout-table.md.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from memadvisor.architecture import Architecture, Experts, ReferenceCode
from memadvisor.architectures.load import named_architecture
from memadvisor.errors import UsageError
from memadvisor.layout_table.cells import Cells
from memadvisor.layout_table.sizes import architecture_of_size

_GATED = "llama mistral mixtral qwen gemma deepseek phi3 phi4 yi smollm olmo falcon3 baichuan internlm glm granite kimi grok"
_PLAIN = "gpt opt bloom mpt megatron falcon pythia neox turing mtnlg bert cerebras phi galactica starcoder"
# Models that are no transformers, or not alone: columns of shapes do not describe their layers.
_OTHERS = re.compile(
    r"mamba|rwkv|jamba|zamba|bamba|hyena|retnet|griffin|recurrentgemma|falcon-?h1|nemotron[ -]?(h\b|nano|3)|qwen3-?next|qwen3[._]5"
    r"|granite-?4[\w.-]*-h|kimi-?linear|lfm2|olmo-?hybrid|unet|resnet|diffusion|\bsdxl?\b"
)
# Of which a size alone tells nothing: they have other layers than language models of it.
_OTHER_KINDS = re.compile(
    r"\bwan-?2|hunyuan-?video|cogvideo|open-?sora|step-?video|\bflux|pixart|\bdit\b|\bsd-?3|\bevo-?[12]\b|nllb|m2m"
)
_WHOLE = ("n_heads", "n_kv_heads", "head_dim", "ffn", "vocab")
_FLAGS = ("gated_mlp", "tied_embeddings", "biases", "causal")
MEGATRON_VOCAB = 50257  # GPT-2's
# Families whose class has a code of its own (ReferenceCode), each with a model of it.
_CODES = {
    "gpt2": "gpt2",
    "opt": "opt-125m",
    "bert": "bert-base",
    "roberta": "roberta-base",
    "esm2": "esm2-8m",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shape:
    """What the row says outright; None where it does not."""

    name: str
    n_layers: int
    hidden: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    ffn: int | None
    vocab: int | None
    positions: int | None
    gated: bool | None
    tied: bool | None
    biases: bool | None
    causal: bool
    experts: Experts | None
    num_parameters: float | None
    billions: float | None
    seq_len: int
    tensor: int
    encoder_layers: int


def architecture_of(cells: Cells, *, seq_len: int, tensor: int) -> Architecture:
    """The architecture of a row: of its columns of shapes, else of its model's name. Raises UsageError for shapes that make
    no sense, and for names that are not known, or known for other models than transformers.
    """
    other = _OTHERS.search((cells.text("model") or "").lower())
    if other is not None and named_architecture(cells.text("model") or "") is None:
        raise UsageError(
            f"{cells.text('model')!r} is no transformer, or not alone, and no model that is known by that name: columns of shapes"
            " do not describe its layers."
        )
    known = _named(cells)
    if known is not None:
        if known.tower is not None:
            cells.note("its tower of images is counted as trained, and no images")
        return known
    shape = _shape(cells, seq_len, tensor)
    if shape.vocab is None:
        cells.note("no vocab: the usual one is taken")
    return _build(shape)


def _named(cells: Cells) -> Architecture | None:
    """The published model of that name, with what the row says otherwise; None where its layers or width are others."""
    name = cells.text("model")
    n_layers, hidden = cells.whole("n_layers"), cells.whole("hidden")
    known = None if name is None else named_architecture(name)
    if known is not None and n_layers is None and hidden is None and _is_of_another_size(known, cells):
        cells.note(f"{name} is taken for a model of the size that is given")
        known = None
    if known is None and n_layers is None and hidden is None:
        known = _of_size(cells)
    if known is None:
        return None
    if n_layers not in (None, known.n_layers) and hidden is None:
        known = _of_other_depth(known, n_layers, cells)
    if n_layers not in (None, known.n_layers) or hidden not in (None, known.hidden):
        return None
    said: dict[str, int | bool | None] = {column: cells.whole(column) for column in _WHOLE}
    said |= {column: cells.flag(column) for column in _FLAGS}
    if cells.count("encoder_layers") not in (None, known.encoder_layers):
        return None
    changes: dict[str, Any] = {column: value for column, value in said.items() if value is not None}
    if "n_heads" in changes:
        has_own = known.n_kv_heads == known.n_heads  # each query head has keys of its own
        changes.setdefault(
            "n_kv_heads", changes["n_heads"] if has_own else min(known.n_kv_heads, changes["n_heads"])
        )
        changes.setdefault("head_dim", max(1, known.hidden // changes["n_heads"]))
    if cells.text("n_experts") is not None:
        changes["experts"] = _experts(cells, known.ffn)
    found = dataclasses.replace(known, **changes)
    if found.n_heads % found.n_kv_heads:
        raise UsageError(f"{found.n_kv_heads} key heads do not divide {found.n_heads} heads.")
    return found


def _of_other_depth(known: Architecture, n_layers: int, cells: Cells) -> Architecture:
    """A known model cut to its first layers, or with more of them, as benchmarks of a few layers have it: nothing else of a shape
    says that it is another model. Raises UsageError where its layers do not tell what others are.
    """
    if known.encoder_layers or (n_layers > known.n_layers and known.layer_pattern):
        raise UsageError(
            f"{known.name} has {known.n_layers} layers of several kinds: which {n_layers} are meant is not known."
        )
    cells.note(f"{known.name} has {known.n_layers} layers: the same model of {n_layers} is taken")
    return dataclasses.replace(known, n_layers=n_layers, layer_pattern=known.layer_pattern[:n_layers])


def _is_of_another_size(known: Architecture, cells: Cells) -> bool:
    """Whether a family's name without a size (`GPT-3`) stands beside a number of parameters that is not the known model's."""
    parameters = cells.number("n_params")
    billions = cells.number("params_b") or (
        parameters / (1.0 if parameters < 1e4 else 1e9) if parameters else None
    )
    if billions is None or known.experts is not None or billions_in(cells.text("model") or "") is not None:
        return False
    # A bare 86.57 beside ViT-B is of millions.
    return not any(0.75 < billions * unit / known.num_parameters() < 1.33 for unit in (1e9, 1e6))


def _of_size(cells: Cells) -> Architecture:
    """By the number of parameters alone. Raises UsageError where that is not said, or is of experts."""
    name = cells.text("model")
    parameters = cells.number("n_params")
    billions = cells.number("params_b") or (parameters / 1e9 if parameters else billions_in(name or ""))
    if parameters is not None and parameters < 1e4:  # a bare 6.7
        billions = parameters
    words = (name or "").lower()
    if billions is None or re.search(r"\d\s*x\s*\d|moe|-a\d", words) or _OTHER_KINDS.search(words):
        raise UsageError(
            "n_layers and hidden are needed, or the name of a known model alone."
            if name is None
            else f"{name!r} is no known model, and n_layers and hidden are not given."
        )
    gated = cells.flag("gated_mlp")
    if gated is None and "v100" in (cells.text("gpu") or "").lower():
        gated = gated_by_name(name or "") or False  # of before Llamas
    trainer = (cells.text("framework") or "").lower()
    if gated is None and (cells.text("mp_mode") or re.search("foundry|composer|mosaic", trainer)):
        gated = False  # MPT
    found = architecture_of_size(billions, gated_by_name(name or "") if gated is None else gated)
    what = f"{found.n_layers} layers of {found.hidden}"
    cells.note(f"no shape but a size of {billions:g}B: that of {found.name} ({what}) is taken")
    return found


@lru_cache(maxsize=512)
def _build(shape: _Shape) -> Architecture:
    candidates = [
        _variant(shape, gated, tied)
        for gated in _gated_choices(shape)
        for tied in _tied_choices(shape, gated)
    ]
    published = shape.num_parameters or (shape.billions or 0) * 1e9
    return min(candidates, key=lambda each: abs(each.num_parameters() - published))


def _gated_choices(shape: _Shape) -> tuple[bool, ...]:
    gated = shape.gated if shape.gated is not None else gated_by_name(shape.name)
    if gated is not None:
        return (gated,)
    # Without ffn both kinds have about as many parameters: a rounded number cannot tell them apart.
    if shape.num_parameters or (shape.billions and shape.ffn):
        return (False, True)
    return (shape.ffn not in (None, 4 * shape.hidden),)


def _tied_choices(shape: _Shape, gated: bool) -> tuple[bool, ...]:
    if shape.tied is not None:
        return (shape.tied,)
    # A count in rounded billions cannot tell whether one table is there once or twice.
    return (not gated, gated) if shape.num_parameters else (not gated,)


def gated_by_name(name: str) -> bool | None:
    """Whether models of that family have three matrices in the feed-forward block; None for a name that tells nothing."""
    own = name.lower().rsplit("/", 1)[-1]
    word = re.sub(r"[^a-z0-9]", "", own)
    kinds = {True: _GATED.split(), False: _PLAIN.split()}
    for gated, families in kinds.items():
        if any(word.startswith(family) for family in families):
            return gated
    inside = re.findall(r"[a-z]+\d*", own)  # `Hugging Face BERT`
    found = {gated for gated, families in kinds.items() if set(families) & set(inside)}
    return found.pop() if len(found) == 1 else None


def _variant(shape: _Shape, gated: bool, tied: bool) -> Architecture:
    ffn = shape.ffn or usual_ffn(shape.hidden, gated)
    experts = shape.experts
    if experts is not None and not experts.expert_ffn:
        experts = dataclasses.replace(experts, expert_ffn=ffn)
    positions = shape.positions if shape.positions is not None else (0 if gated else shape.seq_len)
    vocab = shape.vocab or (32000 if gated else padded_vocab(MEGATRON_VOCAB, shape.tensor))
    return Architecture(
        name=shape.name,
        n_layers=shape.n_layers,
        hidden=shape.hidden,
        n_heads=shape.n_heads,
        n_kv_heads=shape.n_kv_heads,
        head_dim=shape.head_dim,
        ffn=ffn,
        vocab=vocab,
        tied_embeddings=tied,
        gated_mlp=gated,
        positions=positions,
        biases=(not gated) if shape.biases is None else shape.biases,
        norm_vectors=1 if gated else 2,
        causal=shape.causal,
        experts=experts,
        encoder_layers=shape.encoder_layers,
        code=_code_of(shape.name, gated),
    )


def _code_of(name: str, gated: bool) -> ReferenceCode | None:
    """How Hugging Face's class of that family is written: of a GPT-2 of another size too."""
    word = re.sub(r"[^a-z0-9]", "", name.lower().rsplit("/", 1)[-1])
    known = next((known for family, known in _CODES.items() if word.startswith(family)), None)
    of_family = None if known is None or gated else named_architecture(known)
    return None if of_family is None else of_family.code


def usual_ffn(hidden: int, gated: bool) -> int:
    """4 hidden; of a gated block two thirds of that, rounded up to 256 (arXiv:2302.13971, section 2.2)."""
    return -(-8 * hidden // (3 * 256)) * 256 if gated else 4 * hidden


def padded_vocab(vocab: int, tensor: int) -> int:
    """To a multiple of 128 for each tensor rank, as Megatron-LM pads (--make-vocab-size-divisible-by 128)."""
    unit = 128 * tensor
    return -(-vocab // unit) * unit


def _shape(cells: Cells, seq_len: int, tensor: int) -> _Shape:
    n_layers, hidden = cells.whole("n_layers"), cells.whole("hidden")
    if n_layers is None or hidden is None:
        raise UsageError("n_layers and hidden are needed, or the name of a known model alone.")
    head_dim, n_heads = cells.whole("head_dim"), cells.whole("n_heads")
    if n_heads is None:
        width = head_dim or next((width for width in (128, 64, 80, 96) if hidden % width == 0), 128)
        if hidden % width:
            raise UsageError(f"n_heads is not given, and hidden {hidden} is no multiple of {width}.")
        n_heads = hidden // width
    if head_dim is None:
        if hidden % n_heads:
            raise UsageError(f"{n_heads} heads do not divide hidden {hidden}.")
        head_dim = hidden // n_heads
    n_kv_heads = cells.whole("n_kv_heads") or n_heads
    if n_heads % n_kv_heads:
        raise UsageError(f"{n_kv_heads} key heads do not divide {n_heads} heads.")
    name = cells.text("model") or f"{n_layers}x{hidden}"
    causal = cells.flag("causal")
    parameters = cells.number("n_params")
    # Three digits, as of 1300000000 and 6.74e9, say no more than 1.3B and 6.74B.
    is_rounded = parameters is not None and float(f"{parameters:.3g}") == parameters
    if parameters is not None and parameters < 1e4:
        parameters *= 1e9
    return _Shape(
        name=name,
        n_layers=n_layers,
        hidden=hidden,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        ffn=cells.whole("ffn"),
        vocab=cells.whole("vocab"),
        positions=cells.count("positions"),
        gated=cells.flag("gated_mlp"),
        tied=cells.flag("tied_embeddings"),
        biases=cells.flag("biases"),
        causal="bert" not in name.lower() if causal is None else causal,
        experts=_experts(cells, None),
        num_parameters=None if is_rounded else parameters,
        billions=cells.number("params_b")
        or (parameters / 1e9 if is_rounded and parameters else billions_in(name)),
        seq_len=seq_len,
        tensor=tensor,
        encoder_layers=_encoder_layers(cells, n_layers),
    )


def _encoder_layers(cells: Cells, n_layers: int) -> int:
    count = cells.count("encoder_layers") or 0
    if count >= n_layers or (count and cells.count("n_experts")):
        raise UsageError(
            f"{count} of {n_layers} layers are an encoder's, and experts {cells.count('n_experts') or 0}: a decoder has at"
            " least one layer, and experts beside cross attention are not known."
        )
    return count


def billions_in(name: str) -> float | None:
    """The size that a model's name gives: 7 of `7b`, 0.125 of `GPT-125M`; None for one that gives none."""
    match = re.search(r"(?:^|[^a-z0-9.])(\d+(?:\.\d+)?)\s?([mbt])(?![a-z0-9])", name.lower())
    if match is None:
        return None
    return float(match.group(1)) * {"m": 1e-3, "b": 1.0, "t": 1e3}[match.group(2)]


def _experts(cells: Cells, ffn: int | None) -> Experts | None:
    """None of a dense model; experts of no width of their own are as wide as a dense block of `ffn`."""
    count = cells.count("n_experts") or 1
    if count == 1:
        return None
    chosen = cells.whole("experts_per_token") or min(2, count)
    if chosen > count:
        raise UsageError(f"a token passes {chosen} of {count} experts.")
    every = cells.whole("expert_every") or 1
    first_dense = cells.count("first_dense")
    return Experts(
        num_experts=count,
        experts_per_token=chosen,
        expert_ffn=cells.whole("expert_ffn") or ffn or 0,
        shared_ffn=cells.count("shared_ffn") or 0,
        first_dense=every - 1 if first_dense is None else first_dense,
        every=every,
    )
