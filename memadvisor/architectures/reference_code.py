"""What config.json and a type's own class in Hugging Face's transformers say of how its layers are written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memadvisor.architecture import LLAMA_CODE, Architecture, ReferenceCode

# Tensors that each function keeps of its input's size, its result left out; transformers/activations.py. Those that are not
# here are taken for one kernel, which keeps its input.
_ACTIVATION_TENSORS = {
    "linear": 0,
    "relu": 0,
    "sigmoid": 0,
    "tanh": 0,
    "quick_gelu": 2,
    "gelu_python": 3,
    "gelu_accurate": 4,
    "gelu_new": 4,
    "gelu_python_tanh": 4,
    "gelu_fast": 7,
}
# The activation that a class takes, or always has, where config.json names none.
_ACTIVATIONS = {
    "esm": "gelu_python",
    "gpt2": "gelu_new",
    "gptj": "gelu_new",
    "phi": "gelu_new",
    "opt": "relu",
}
_ENCODERS = (
    "bert", "camembert", "data2vec-text", "distilbert", "electra", "ernie", "esm", "layoutlm", "megatron-bert", "mpnet", "roberta",
    "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl",
)  # fmt: skip
_DROPOUT_BY_DEFAULT = ("gpt2", "gpt_bigcode", "opt", "starcoder2", *_ENCODERS)
_SCORE_DROPOUT_BY_DEFAULT = ("gpt2", "gpt_bigcode", *_ENCODERS)
_PLAIN_SOFTMAX = (
    "gpt2",
    "gptj",
    "falcon",
    "dinov2",
    "dinov2_with_registers",
    *(kind for kind in _ENCODERS if kind != "layoutlm"),
)
_FUSED_QKV = ("gpt2",)
_NORM_BYTES = {"gemma": 10.0, "gemma2": 10.0, "gemma3_text": 10.0, "olmo": 6.0, "olmo2": 10.0, "olmo3": 10.0, "cohere": 14.0, "cohere2": 14.0, "nemotron_h": 8.0}  # fmt: skip


def code_of(config: Mapping[str, Any], found: Architecture) -> ReferenceCode | None:
    """None where it is as most classes with such norms are."""
    kind = str(config.get("model_type"))
    has_rms_norm = found.norm_vectors < 2 and found.gated_mlp
    usual = found.reference_code
    named = _first(config, "activation_function", "hidden_activation", "hidden_act", "activation")
    activation = named if isinstance(named, str) else _ACTIVATIONS.get(kind, "gelu")
    code = ReferenceCode(
        norm_bytes=_NORM_BYTES.get(kind, LLAMA_CODE.norm_bytes if has_rms_norm else 4.0),
        activation_tensors=kept_by(activation),
        fp32_softmax=kind not in _PLAIN_SOFTMAX,
        residual_dropout=_drops(
            config,
            kind in _DROPOUT_BY_DEFAULT,
            "resid_pdrop",
            "residual_dropout",
            "hidden_dropout",
            "hidden_dropout_prob",
            "dropout",
        ),
        score_dropout=_drops(
            config,
            kind in _SCORE_DROPOUT_BY_DEFAULT,
            "attn_pdrop",
            "attention_dropout",
            "attention_probs_dropout_prob",
            "attn_dropout",
        ),
        inner_dropout=_drops(config, False, "activation_dropout"),
        fused_qkv=kind in _FUSED_QKV,
    )
    return None if code == usual else code


def kept_by(activation: str) -> int:
    """Tensors that autograd keeps of an activation function's input, by its name in a config.json."""
    return _ACTIVATION_TENSORS.get(activation, 1)


def _first(config: Mapping[str, Any], *keys: str) -> Any:
    return next((config[key] for key in keys if config.get(key) is not None), None)


def _drops(config: Mapping[str, Any], default: bool, *keys: str) -> bool:
    rate = _first(config, *keys)
    return rate > 0 if isinstance(rate, (int, float)) else default
