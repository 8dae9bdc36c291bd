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
from memadvisor.architectures.not_described import why_not
from memadvisor.architectures.other_names import OTHER_NAMES
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

_SUFFIXES = re.compile(
    r"(-(hf|base|instruct|thinking|think|sft|2[3-9](0[1-9]|1[0-2])|chat|it|v0\.[0-9]|4k|8k|128k|deduped|preview|dense|bf16|fp8|pt))+$"
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
_BY_NAME.update({_plain(other): _BY_NAME[_plain(name)] for other, name in OTHER_NAMES.items()})


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
        if (reason := why_not(name_or_path)) is not None:
            raise UsageError(
                f"{name_or_path!r} cannot be described here: {reason}.",
                hint="a TOML file of a model of about that shape is priced as what it says (docs/estimate.md).",
            )
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
