"""An architecture by name, or from a file: Hugging Face's config.json, or TOML or JSON of Architecture's own fields.

name = "mine"
n_layers = 24
hidden = 2048
n_heads = 16
vocab = 50304
[experts]
num_experts = 8
experts_per_token = 2
expert_ffn = 5632
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_type_hints

from memadvisor.architecture import Architecture, Experts, LatentAttention, ReferenceCode
from memadvisor.architectures.config_family import CONFIG_FAMILY
from memadvisor.architectures.config_shapes import MOST_LAYERS
from memadvisor.architectures.encoder_decoders import ENCODER_DECODERS
from memadvisor.architectures.gpt_family import GPT_FAMILY
from memadvisor.architectures.hugging_face import architecture_from_config
from memadvisor.architectures.hybrid_family import HYBRID_FAMILY
from memadvisor.architectures.image_family import IMAGE_FAMILY
from memadvisor.architectures.llama_family import LLAMA_FAMILY
from memadvisor.architectures.vision_transformers import VISION_TRANSFORMERS
from memadvisor.errors import UsageError
from memadvisor.json_field import where_broken
from memadvisor.recurrence import BLOCKS, KINDS, Recurrence
from memadvisor.run.files import may_be_there, read_input

ARCHITECTURES: tuple[Architecture, ...] = (
    GPT_FAMILY
    + LLAMA_FAMILY
    + HYBRID_FAMILY
    + IMAGE_FAMILY
    + CONFIG_FAMILY
    + ENCODER_DECODERS
    + VISION_TRANSFORMERS
)

# Other names of the same shapes.
_ALSO = {
    "gpt2-small": "gpt2",
    "gpt2-124m": "gpt2",
    "gpt2-1.5b": "gpt2-xl",
    "gpt3": "gpt3-175b",
    "gpt-175b": "gpt3-175b",
    "gpt3-small": "gpt3-125m",
    "gpt3-medium": "gpt3-350m",
    "gpt3-large": "gpt3-760m",
    "gpt3-xl": "gpt3-1.3b",
    "gpt-j": "gpt-j-6b",
    "bloom": "bloom-176b",
    "megatron-1008b": "megatron-1t",
    "megatron-529.6b": "megatron-530b",
    "mt-nlg-530b": "megatron-530b",
    "turing-nlg-530b": "megatron-530b",
    "turing-nlg-17b": "turing-nlg",
    "t-nlg": "turing-nlg",
    "gptj-6b": "gpt-j-6b",
    "gpt-neox": "gpt-neox-20b",
    "llama-30b": "llama-33b",
    "codellama-34b": "llama2-34b",
    "tinyllama": "tinyllama-1.1b",
    "llama3-1b": "llama3.2-1b",
    "llama3.1-8b": "llama3-8b",
    "llama3.1-70b": "llama3-70b",
    "llama3.3-70b": "llama3-70b",
    "llama3.1-405b": "llama3-405b",
    "deepseek-r1": "deepseek-v3",
    "qwen2.5-coder-7b": "qwen2.5-7b",
    "qwen2.5-coder-32b": "qwen2.5-32b",
    "nemotron4-15b": "nemotron-15b",
    "nemotron4-340b": "nemotron-340b",
    "bert-base-uncased": "bert-base",
    "bert-large-uncased": "bert-large",
    "bert-base-cased": "bert-base",
    "bert-large-cased": "bert-large",
    **{
        f"esm2-t{layers}-{size}": f"esm2-{size}"
        for layers, size in ((6, "8m"), (12, "35m"), (30, "150m"), (33, "650m"), (36, "3b"), (48, "15b"))
    },
    "llama4-scout-17b-16e": "llama4-scout",
    "llama4-maverick-17b-128e": "llama4-maverick",
    "vit-base": "vit-b-16",
    "vit-large": "vit-l-16",
    "vit-huge": "vit-h-14",
    "vit-l": "vit-l-16",
    "vit-b": "vit-b-16",
    "vit-h": "vit-h-14",
    **{
        f"vit-{letter}-{patch}": f"vit-{size}-patch{patch}-224"
        for letter, size in (("s", "small"), ("ti", "tiny"))
        for patch in (16, 32)
    },
    **{
        f"deit-{name}": f"deit-{size}-patch16-224"
        for size, names in (("tiny", "ti"), ("small", "s"), ("base", "b"))
        for name in (size, names)
    },
    **{
        f"dinov2-vit{letter}14": f"dinov2-{size}"
        for letter, size in (("s", "small"), ("b", "base"), ("l", "large"), ("g", "giant"))
    },
    "gpt-jt": "gpt-j-6b",
    "gpt-jt-6b": "gpt-j-6b",
    **{
        f"esm2-t{layers}-{size}-ur50d": f"esm2-{size}"
        for layers, size in ((6, "8m"), (12, "35m"), (30, "150m"), (33, "650m"), (36, "3b"), (48, "15b"))
    },
    "vit-base-patch16-224": "vit-b-16",
    "vit-large-patch16-224": "vit-l-16",
    "vit-huge-patch14-224": "vit-h-14",
    "qwq-32b": "qwen2.5-32b",
    "qwen3-coder-30b-a3b": "qwen3-30b-a3b",
    "qwen3.6-35b-a3b": "qwen3.5-35b-a3b",
    "deepseek-r1-distill-qwen-7b": "qwen2.5-7b",
    "deepseek-r1-distill-qwen-14b": "qwen2.5-14b",
    "deepseek-r1-distill-qwen-32b": "qwen2.5-32b",
    "deepseek-r1-distill-llama-8b": "llama3-8b",
    "deepseek-r1-distill-llama-70b": "llama3-70b",
    "vicuna-7b": "llama2-7b",
    "vicuna-13b": "llama2-13b",
    "smollm2-135m": "smollm-135m",
    "smollm2-360m": "smollm-360m",
    "smollm2-1.7b": "smollm-1.7b",
    "phi-3.5-mini": "phi-3-mini",
    "phi-3-mini-3.8b": "phi-3-mini",
    "stablelm-3b-4e1t": "stablelm-3b",
    "olmoe-1b-7b-0924": "olmoe-1b-7b",
    "olmoe-1b-7b-0125": "olmoe-1b-7b",
    "olmo2-1124-7b": "olmo2-7b",
    "olmo2-1124-13b": "olmo2-13b",
    "olmo3-1025-7b": "olmo3-7b",
    "olmo3-1125-32b": "olmo3-32b",
    "olmo3.1-32b": "olmo3-32b",
    "intellect-3": "glm-4.5-air",
    "glm-4.6": "glm-4.5",
    "qwen3-coder-480b": "qwen3-coder-480b-a35b",
    "mistral-small-3.1-24b": "mistral-small-24b",
    "mistral-small-3.2-24b": "mistral-small-24b",
    "internlm2.5-7b": "internlm2-7b",
    "internlm2.5-20b": "internlm2-20b",
    "internlm2-5-7b": "internlm2-7b",
    "internlm2-5-20b": "internlm2-20b",
    "deepseek-v3.1": "deepseek-v3",
    "deepseek-v3-0324": "deepseek-v3",
    "deepseek-v3.2-exp": "deepseek-v3.2",
    "minimax-m1": "minimax-text-01",
    "jamba-1.5-mini": "jamba-v0.1",
    "llama3.1-nemotron-70b": "llama3-70b",
    "zephyr-7b": "mistral-7b",
    "alpaca-7b": "llama-7b",
    "openllama-7b": "llama-7b",
    "openllama-13b": "llama-13b",
    "dolly-v2-3b": "pythia-2.8b",
    "dolly-v2-12b": "pythia-12b",
    "starcoder": "starcoder-15b",
    "starcoderbase": "starcoder-15b",
    "command-r": "command-r-35b",
    "command-r-v01": "command-r-35b",
    "c4ai-command-r-v01": "command-r-35b",
    "command-r-plus": "command-r-plus-104b",
    "c4ai-command-r-plus": "command-r-plus-104b",
    "aya-23-35b": "command-r-35b",
    "whisper-large": "whisper-large-v2",
    "nllb-200-distilled-600m": "nllb-200-600m",
    "distilbert-base-uncased": "distilbert-base",
    **{f"bloomz-{size}": f"bloom-{size}" for size in ("560m", "1b1", "1b7", "3b", "7b1", "176b")},
    **{f"granite-3.{at}-{size}": f"granite-3-{size}" for at in range(4) for size in ("2b", "8b")},
    **{
        f"codegen-{size}-{kind}": f"codegen-{size}"
        for size in ("350m", "2b", "6b", "16b")
        for kind in ("mono", "multi", "nl")
    },
    "t0-3b": "flan-t5-xl",
    "t0": "flan-t5-xxl",
    "t0pp": "flan-t5-xxl",
    **{f"t5-v1-1-{size}": f"flan-t5-{size}" for size in ("small", "base", "large", "xl", "xxl")},
    **{f"t5-v1.1-{size}": f"flan-t5-{size}" for size in ("small", "base", "large", "xl", "xxl")},
    "ul2": "flan-ul2",
    **{f"mt0-{size}": f"mt5-{size}" for size in ("small", "base", "large", "xl", "xxl")},
}
_SUFFIXES = re.compile(
    r"(-(hf|base|instruct|thinking|think|sft|2[3-9](0[1-9]|1[0-2])|chat|it|v0\.[0-9]|4k|8k|128k|deduped|preview|dense))+$"
)

_SIZE_BEHIND = re.compile(
    r"(.*\S)[\s_-]+\(?(\d{1,4}(?:\.\d+)?)([mbt])(?:[\s_-]*a\d+(?:\.\d+)?b)?\)?((?:-[a-z]+)*)", re.IGNORECASE
)
_UNITS = {"m": 1e6, "b": 1e9, "t": 1e12}
_ROUNDED = 0.12  # of sizes in names: 14B are 14.7, 12B are 11.2

_PARTS = (
    ("experts", Experts),
    ("latent", LatentAttention),
    ("code", ReferenceCode),
    ("recurrence", Recurrence),
)
_MOST_PARAMETERS = 10**15  # a thousand times the largest that was ever planned


def _plain(name: str) -> str:
    """`meta-llama/Llama-2-7b-hf`, `llama2_7b` and `LLaMA 2 7B` are one."""
    word = re.sub(r"(vit[ _-]?[a-z]+)/(\d\d)$", r"\1-\2", name.strip().lower())  # ViT-L/16
    word = re.sub(r"[\s_-]+", "-", word.rsplit("/", 1)[-1])
    word = word.replace("-of-", "-").replace("+", "-plus").removeprefix("meta-")  # Command R+
    word = re.sub(r"^(gpt|llama|qwen|gemma|olmo)-(\d+(?:\.\d+)?)(?=-|$)(?!-?b)", r"\1\2", word)
    return re.sub(r"[^a-z0-9.]", "", _SUFFIXES.sub("", word))


_BY_NAME = {_plain(each.name): each for each in ARCHITECTURES}
_BY_NAME.update({_plain(other): _BY_NAME[_plain(name)] for other, name in _ALSO.items()})


def named_architecture(name: str) -> Architecture | None:
    """The published model of that name, in any spelling; None for one that is not known."""
    return _BY_NAME.get(_plain(name)) or _with_its_size(name)


def _with_its_size(name: str) -> Architecture | None:
    """`Phi-4 14B`, `DeepSeek-V3 671B-A37B`: a name with the size that the model of it has."""
    found = _SIZE_BEHIND.fullmatch(name.strip())
    known = None if found is None else _BY_NAME.get(_plain(found[1] + found[4]))
    if found is None or known is None:
        return None
    said = float(found[2]) * _UNITS[found[3].lower()]
    return known if abs(said / known.num_parameters() - 1) < _ROUNDED else None


def load_architecture(name_or_path: str) -> Architecture:
    """The published model of that name, else what the file (or the directory's config.json) describes.

    Raises UsageError when it is neither, or the file is broken.
    """
    known = named_architecture(name_or_path)
    path = Path(name_or_path)
    try:
        is_file, is_directory = path.is_file(), path.is_dir()
    except OSError:  # too long a name, or a folder that may not be looked into: reading says which
        is_file = is_directory = False
    if known is not None and not is_file:
        return known
    if is_directory:
        path = path / "config.json"
    if not may_be_there(path) and path.suffix not in (".json", ".toml"):
        near = difflib.get_close_matches(_plain(name_or_path), _BY_NAME, n=3, cutoff=0.6)
        # Several of its names may be near one model.
        names = (
            ", ".join(dict.fromkeys(_BY_NAME[each].name for each in near)) or "gpt2, llama3-8b, mixtral-8x7b"
        )
        raise UsageError(
            f"{name_or_path!r} is neither a known model nor a file.",
            hint=f"known are {names} and others (docs/estimate.md); or name a config.json.",
        )
    return _read(path)


def _read(path: Path) -> Architecture:
    try:
        text = read_input(path)
        value = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except OSError as error:
        raise UsageError(
            f"{str(path)!r} cannot be read: {error.strerror}.", hint="name a config.json or a TOML file."
        ) from error
    except (ValueError, RecursionError) as error:
        kind = "TOML" if path.suffix == ".toml" else "JSON"
        raise UsageError(
            f"{str(path)!r} is not {kind}: {where_broken(error)}.",
            hint="docs/estimate.md shows what is read.",
        ) from error
    if not isinstance(value, Mapping):
        raise UsageError(f"{str(path)!r} holds no fields.", hint="docs/estimate.md shows what is read.")
    if "model_type" in value or "text_config" in value:
        return _of_a_size(architecture_from_config(value, str(path)))
    return _of_a_size(architecture_from_fields(value, path.stem))


def _of_a_size(model: Architecture) -> Architecture:
    """The model, unless it is beyond all that a prediction's whole numbers are for."""
    hint = "look for a digit too many in the file."
    if model.n_layers > MOST_LAYERS:
        raise UsageError(f"{model.name!r} has more than {MOST_LAYERS:,} layers.", hint=hint)
    if model.num_parameters() > _MOST_PARAMETERS:  # it may be more than a float can say
        raise UsageError(f"{model.name!r} has more than {_MOST_PARAMETERS:.3g} parameters.", hint=hint)
    experts = model.experts
    if experts is not None and experts.experts_per_token > experts.num_experts:
        raise UsageError(
            f"each token passes {experts.experts_per_token} of {experts.num_experts} experts of {model.name!r}.",
            hint="it passes as many as there are, or fewer.",
        )
    return model


def architecture_from_fields(value: Mapping[str, Any], name: str) -> Architecture:
    """From Architecture's own fields; n_layers, hidden, n_heads and vocab are needed. Raises UsageError."""
    fields: dict[str, Any] = {"name": name, **value}
    for key in ("n_layers", "hidden", "n_heads", "vocab"):
        if key not in fields:
            raise UsageError(f"{name!r} does not say {key}.", hint="docs/estimate.md shows what is needed.")
    for key, kind in _PARTS:
        if fields.get(key) is not None:
            fields[key] = _checked(kind, fields[key], f"{name}.{key}")
    gated = fields.setdefault("gated_mlp", True)
    hidden, n_heads = fields["hidden"], fields["n_heads"]
    fields.setdefault("n_kv_heads", n_heads)
    fields.setdefault("tied_embeddings", False)
    if all(isinstance(each, int) and each > 0 for each in (hidden, n_heads)):
        if "head_dim" not in fields and hidden % n_heads:
            raise UsageError(f"{n_heads} heads do not divide hidden {hidden} of {name!r}.")
        fields.setdefault("head_dim", hidden // n_heads)
        fields.setdefault("ffn", -(-8 * hidden // (3 * 256)) * 256 if gated else 4 * hidden)
    architecture: Architecture = _checked(Architecture, fields, name)
    if architecture.encoder_layers >= architecture.n_layers or (
        architecture.encoder_layers and (architecture.experts or architecture.latent)
    ):
        raise UsageError(
            f"{architecture.encoder_layers} of {architecture.n_layers} layers of {name!r} are an encoder's.",
            hint="a decoder has one layer or more, and neither experts nor latent attention.",
        )
    _check_pattern(architecture)
    return architecture


def _check_pattern(model: Architecture) -> None:
    """Raises UsageError for layers that the model has no parts for."""
    pattern, mixer = model.layer_pattern, model.recurrence
    if not isinstance(pattern, str) or set(pattern) - set(BLOCKS):
        raise UsageError(
            f"layer_pattern of {model.name!r} is {pattern!r}.", hint=f"it is of the letters {BLOCKS}."
        )
    if mixer is not None and mixer.kind not in KINDS:
        raise UsageError(f"a recurrence of kind {mixer.kind!r}.", hint=f"it is one of {', '.join(KINDS)}.")
    for letters, what, part in (("rbR", "recurrence", mixer), ("E", "experts", model.experts)):
        if set(pattern) & set(letters) and part is None:
            raise UsageError(
                f"layers {pattern!r} of {model.name!r} have {what}, which it does not describe.",
                hint=f"add a table [{what}], or leave {' and '.join(letters)} out.",
            )
    if pattern and model.encoder_layers:
        raise UsageError("a layer_pattern beside encoder_layers is not known.", hint="leave one of them out.")


def _checked(kind: type[Any], value: Any, source: str) -> Any:
    """An object of that dataclass; every field is known, of its type, and no number is negative."""
    if not isinstance(value, Mapping):
        raise UsageError(f"{source!r} is {value!r}.", hint="docs/estimate.md shows what belongs there.")
    types = get_type_hints(kind)
    unknown = next((key for key in value if key not in types), None)
    if unknown is not None:
        raise UsageError(
            f"{source!r} has an unknown field {unknown!r}.", hint=f"known are {', '.join(types)}."
        )
    for key, each in value.items():
        if types[key] is int and (not isinstance(each, int) or isinstance(each, bool) or each < 0):
            raise UsageError(f"{key} of {source!r} is {each!r}.", hint="it is a whole number.")
        if types[key] is bool and not isinstance(each, bool):
            raise UsageError(f"{key} of {source!r} is {each!r}.", hint="it is true or false.")
    for key in (
        "n_layers",
        "hidden",
        "n_heads",
        "n_kv_heads",
        "head_dim",
        "ffn",
        "vocab",
        "num_experts",
        "every",
        "state_dim",
        "n_key_heads",
    ):
        if value.get(key) == 0:
            raise UsageError(f"{key} of {source!r} is 0.", hint="it is at least 1.")
    missing = [
        f.name for f in dataclasses.fields(kind) if f.default is dataclasses.MISSING and f.name not in value
    ]
    if missing:
        raise UsageError(
            f"{source!r} does not say {missing[0]}.", hint="docs/estimate.md shows what is needed."
        )
    return kind(**value)
