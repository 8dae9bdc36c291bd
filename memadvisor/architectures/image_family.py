"""Published models of text and images, by name: what their config.json says, read as any other (config_images.py)."""

from __future__ import annotations

from memadvisor.architecture import Architecture
from memadvisor.architectures.config_values import Config
from memadvisor.architectures.hugging_face import architecture_from_config


def _text(layers: int, hidden: int, heads: tuple[int, int], ffn: int, vocab: int = 151936) -> Config:
    return {
        "num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads[0], "num_key_value_heads": heads[1],
        "intermediate_size": ffn, "vocab_size": vocab,
    }  # fmt: skip


def _qwen2_5(text: Config, *, tied: bool = False) -> Config:
    vision = {
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "out_hidden_size": text["hidden_size"],
    }
    inner = {"model_type": "qwen2_5_vl_text", **text}
    return {
        "model_type": "qwen2_5_vl",
        "text_config": inner,
        "vision_config": vision,
        "tie_word_embeddings": tied,
    }


def _qwen3(text: Config, *, tied: bool = False) -> Config:
    vision = {
        "depth": 27,
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_heads": 16,
        "out_hidden_size": text["hidden_size"],
    }
    kind = "qwen3_vl_moe" if "num_experts" in text else "qwen3_vl"
    inner = {"model_type": f"{kind}_text", "head_dim": 128, **text}
    return {"model_type": kind, "text_config": inner, "vision_config": vision, "tie_word_embeddings": tied}


_SPARSE = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
_CLIP = {"model_type": "clip_vision_model"}
# https://huggingface.co/Qwen and llava-hf, config.json of each.
_CONFIGS: dict[str, Config] = {
    "qwen2.5-vl-3b": _qwen2_5(_text(36, 2048, (16, 2), 11008), tied=True),
    "qwen2.5-vl-7b": _qwen2_5(_text(28, 3584, (28, 4), 18944, 152064)),
    "qwen2.5-vl-72b": _qwen2_5(_text(80, 8192, (64, 8), 29568, 152064)),
    "qwen3-vl-8b": _qwen3(_text(36, 4096, (32, 8), 12288)),
    "qwen3-vl-30b-a3b": _qwen3({**_text(48, 2048, (32, 4), 6144), **_SPARSE}),
    "llava-1.5-7b": {"model_type": "llava", "text_config": {"model_type": "llama", "vocab_size": 32064}, "vision_config": _CLIP},
}  # fmt: skip

IMAGE_FAMILY: tuple[Architecture, ...] = tuple(
    architecture_from_config(config, name) for name, config in _CONFIGS.items()
)
