"""Published encoder-decoders, and how the config.json of such a model is read: T5 (Raffel et al., arXiv:1910.10683, and its
1.1), BART (arXiv:1910.13461), mBART (arXiv:2001.08210) and Blenderbot (arXiv:2004.13637). Shapes are those of the
checkpoints' pages on huggingface.co.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from memadvisor.architecture import Architecture, ReferenceCode
from memadvisor.architectures.config_values import Config, whole
from memadvisor.architectures.reference_code import kept_by
from memadvisor.errors import UsageError

# BART's family: one kernel a norm, a softmax in 16 bits, dropout behind each block alone, the loss over 16-bit logits.
_BART_CODE = ReferenceCode(fp32_softmax=False, residual_dropout=True, logit_bytes=6.0)
# Of the kinds of its family: which have a norm over the embedding, one behind each stack, two rows of a table of positions
# that no position has, and no parameters for positions at all.
_EMBEDDING_NORMS = ("bart", "mbart", "mvp", "plbart", "blenderbot-small")
_FINAL_NORMS = ("blenderbot", "m2m_100", "mbart", "pegasus", "whisper")
_TWO_ROWS_MORE = ("bart", "mbart", "mvp", "plbart")
_COMPUTED_POSITIONS = ("m2m_100",)


def _t5_code(*, is_gated: bool, drops: bool = True) -> ReferenceCode:
    """Its norms copy to fp32; its gate is gelu_new, written out."""
    return ReferenceCode(
        norm_bytes=10.0,
        activation_tensors=4 if is_gated else 0,
        fp32_softmax=False,
        residual_dropout=drops,
        score_dropout=drops,
        inner_dropout=drops,
        logit_bytes=6.0,
    )


def _t5(name: str, stack: int, hidden: int, heads: tuple[int, int], ffn: int, *, gated: bool = False, vocab: int = 32128) -> Architecture:  # fmt: skip
    """`stack`: layers of the encoder, and of the decoder. `heads`: their number and width. 1.1 is gated."""
    return Architecture(
        name=name,
        n_layers=2 * stack,
        encoder_layers=stack,
        hidden=hidden,
        n_heads=heads[0],
        n_kv_heads=heads[0],
        head_dim=heads[1],
        ffn=ffn,
        vocab=vocab,
        tied_embeddings=not gated,
        gated_mlp=gated,
        relative_buckets=32,
        code=_t5_code(is_gated=gated),
    )


def _bart(name: str, layers: tuple[int, int], hidden: int, heads: int, ffn: int, vocab: int, positions: int, *, kind: str) -> Architecture:  # fmt: skip
    """`layers`: of the encoder, of the decoder. Kinds differ in norms: of the embedding, and behind the stacks."""
    return Architecture(
        name=name,
        n_layers=sum(layers),
        encoder_layers=layers[0],
        hidden=hidden,
        n_heads=heads,
        n_kv_heads=heads,
        head_dim=hidden // heads,
        ffn=ffn,
        vocab=vocab,
        tied_embeddings=True,
        gated_mlp=False,
        positions=positions,
        biases=True,
        norm_vectors=2,
        embedding_norm=kind in _EMBEDDING_NORMS,
        final_norm=kind in _FINAL_NORMS,
        code=_BART_CODE,
    )


_MT5 = {
    "small": (8, 512, (6, 64), 1024),
    "base": (12, 768, (12, 64), 2048),
    "large": (24, 1024, (16, 64), 2816),
    "xl": (24, 2048, (32, 64), 5120),
    "xxl": (24, 4096, (64, 64), 10240),
}
ENCODER_DECODERS = (
    _t5("t5-small", 6, 512, (8, 64), 2048),
    _t5("t5-base", 12, 768, (12, 64), 3072),
    _t5("t5-large", 24, 1024, (16, 64), 4096),
    _t5("t5-3b", 24, 1024, (32, 128), 16384),
    _t5("t5-11b", 24, 1024, (128, 128), 65536),
    _t5("flan-t5-small", 8, 512, (6, 64), 1024, gated=True),
    _t5("flan-t5-base", 12, 768, (12, 64), 2048, gated=True),
    _t5("flan-t5-large", 24, 1024, (16, 64), 2816, gated=True),
    _t5("flan-t5-xl", 24, 2048, (32, 64), 5120, gated=True),
    _t5("flan-t5-xxl", 24, 4096, (64, 64), 10240, gated=True),
    # arXiv:2010.11934; https://huggingface.co/google/mt5-xxl and its sisters, config.json.
    *(_t5(f"mt5-{size}", *shape, gated=True, vocab=250112) for size, shape in _MT5.items()),
    # arXiv:2205.05131; https://huggingface.co/google/flan-ul2, config.json.
    _t5("flan-ul2", 32, 4096, (16, 256), 16384, gated=True),
    _bart("bart-base", (6, 6), 768, 12, 3072, 50265, 1026, kind="bart"),
    _bart("bart-large", (12, 12), 1024, 16, 4096, 50265, 1026, kind="bart"),
    _bart("mbart-large-cc25", (12, 12), 1024, 16, 4096, 250027, 1026, kind="mbart"),
    _bart("blenderbot-400m-distill", (2, 12), 1280, 32, 5120, 8008, 128, kind="blenderbot"),
    _bart("blenderbot-3b", (2, 24), 2560, 32, 10240, 8008, 128, kind="blenderbot"),
)


def read_t5(config: Config, name: str) -> Architecture:
    """T5, T5 1.1, mT5, Flan-T5 and uMT5, each of whose layers has positions of its own. Raises UsageError for an activation in a form that is not known."""
    activation = str(config.get("feed_forward_proj", "relu"))
    gated = activation.startswith("gated-")
    stack = whole(config, "num_layers")
    decoder = whole(config, "num_decoder_layers", default=stack)
    heads = whole(config, "num_heads")
    drops = float(config.get("dropout_rate", 0.1)) > 0
    code = _t5_code(is_gated=gated, drops=drops)
    kind = config.get("model_type")
    buckets = whole(config, "relative_attention_num_buckets", default=32)
    if activation not in ("relu", "gated-gelu"):
        raise UsageError(
            f"feed_forward_proj {activation!r} of {name!r} is not known.", hint="it is relu or gated-gelu."
        )
    return Architecture(
        name=name,
        n_layers=stack + decoder,
        encoder_layers=stack,
        hidden=whole(config, "d_model", "hidden_size"),
        n_heads=heads,
        n_kv_heads=heads,
        head_dim=whole(config, "d_kv", default=64),
        ffn=whole(config, "d_ff"),
        vocab=whole(config, "vocab_size"),
        tied_embeddings=bool(config.get("tie_word_embeddings", kind in ("t5", "umt5"))),
        gated_mlp=gated,
        relative_buckets=0 if kind == "umt5" else buckets,
        beside=buckets * heads if kind == "umt5" else 0,
        code=code,
    )


def read_bart(config: Config, name: str) -> Architecture:
    """BART and its kin. Raises UsageError where encoder and decoder are not as wide as each other."""
    kind = str(config.get("model_type"))
    if config.get("tie_word_embeddings") is False:
        raise UsageError(
            f"tables of tokens of {name!r} that are not one (tie_word_embeddings) are not known."
        )
    heads, ffn = (_alike(config, name, key) for key in ("attention_heads", "ffn_dim"))
    hidden = whole(config, "d_model", "hidden_size")
    if hidden % heads:
        raise UsageError(f"{heads} heads do not divide hidden {hidden} of {name!r}.")
    layers = whole(config, "encoder_layers"), whole(config, "decoder_layers")
    positions = 0
    if kind not in _COMPUTED_POSITIONS:
        usual = whole(config, "max_target_positions", default=1024)
        positions = whole(config, "max_position_embeddings", default=usual) + 2 * (kind in _TWO_ROWS_MORE)
    found = _bart(name, layers, hidden, heads, ffn, whole(config, "vocab_size"), positions, kind=kind)
    drops = {
        f"{of}_dropout": float(config.get(key, default)) > 0
        for of, key, default in (
            ("residual", "dropout", 0.1),
            ("score", "attention_dropout", 0.0),
            ("inner", "activation_dropout", 0.0),
        )
    }
    tensors = kept_by(str(config.get("activation_function", "gelu")))
    return replace(found, code=replace(_BART_CODE, activation_tensors=tensors, **drops))


def _read_marian(config: Config, name: str) -> Architecture:
    vocab = whole(config, "vocab_size")
    shares = config.get("share_encoder_decoder_embeddings", True)
    if not shares or whole(config, "decoder_vocab_size", default=vocab) != vocab:
        raise UsageError(f"two tables of tokens of {name!r} (decoder_vocab_size) are not known.")
    return read_bart(config, name)


def _read_whisper(config: Config, name: str) -> Architecture:
    """Its encoder sees two frames of 10 ms of sound as one token, out of two convolutions, whose products are not priced."""
    found = read_bart({"max_target_positions": 448, **config}, name)
    sounds = whole(config, "num_mel_bins", default=80)
    convolutions = 3 * (sounds + found.hidden) * found.hidden + 2 * found.hidden
    sources = whole(config, "max_source_positions", default=1500) - found.positions
    return replace(found, key_bias=False, around=convolutions + sources * found.hidden)


def _alike(config: Config, name: str, key: str) -> int:
    encoder, decoder = (whole(config, f"{stack}_{key}") for stack in ("encoder", "decoder"))
    if encoder != decoder:
        raise UsageError(
            f"{key} of {name!r} is {encoder} in the encoder and {decoder} in the decoder.",
            hint="stacks of different widths are not known.",
        )
    return encoder


ENCODER_DECODER_READERS: dict[str, Callable[[Config, str], Architecture]] = {
    "t5": read_t5,
    "mt5": read_t5,
    "umt5": read_t5,
    "bart": read_bart,
    "blenderbot": read_bart,
    "blenderbot-small": read_bart,
    "m2m_100": read_bart,
    "marian": _read_marian,
    "mbart": read_bart,
    "mvp": read_bart,
    "pegasus": read_bart,
    "plbart": read_bart,
    "whisper": _read_whisper,
}
