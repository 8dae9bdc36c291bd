"""Low-rank adapters beside frozen matrices (Hu et al. 2021, arXiv:2106.09685), and in what the frozen ones are held (Dettmers
et al. 2023, arXiv:2305.14314, section 3)."""

from __future__ import annotations

import re
from dataclasses import dataclass

from memadvisor.errors import UsageError

ATTENTION = ("query", "key", "value", "output")
FEED_FORWARD = ("gate", "up", "down")
LINEAR = (*ATTENTION, *FEED_FORWARD)
# `qkv` is one matrix in place of three, with one adapter.
MATRICES = (*LINEAR, "qkv")

# Bytes of an element of a frozen matrix. 4 bits have a scale of each block: NF4's of 64 elements in fp32, quantised in
# turn with double quantisation (8 bits, and fp32 of each 256 blocks); GPTQ's and AWQ's of 128 in fp16, with a zero of 4
# bits.
BASES = {
    "fp32": 4.0,
    "16bit": 2.0,
    "int8": 1.0,
    "nf4": 0.5 + 4 / 64,
    "nf4-dq": 0.5 + 1 / 64 + 4 / (64 * 256),
    "int4": 0.5 + 2.5 / 128,
}
# What making an element 16 bits wide for a product moves: it is read and written in one kernel; GPTQ's go through torch's
# operators, a shift in 32 bits, a cast to 8, a mask, the zeros' difference and the scales (auto_gptq,
# qlinear_cuda_old.py).
_WIDENING = {
    "int8": BASES["int8"] + 2.0,
    "nf4": BASES["nf4"] + 2.0,
    "nf4-dq": BASES["nf4-dq"] + 2.0,
    "int4": (0.5 + 4) + (4 + 1) + (1 + 1) + (1 + 1) + (1 + 2),
}
_BASE_WORDS = (
    (r"fp32|float32|^32", "fp32"),
    (r"8", "int8"),
    (r"gptq|awq|int4|hqq|aqlm", "int4"),
    (r"nf4.*(dq|double)|^4(bits?)?$|qlora|bnb4bit|loadin4bit|^(true|yes)$", "nf4-dq"),
    (r"nf4|fp4|bnb|4", "nf4"),
    (r"16|none|^no$|false|half", "16bit"),
)
# By the names of matrices in the trainers that people write down.
_TARGET_WORDS = (
    (r"^(q|query|wq|qproj)$", ("query",)),
    (r"^(k|key|wk|kproj)$", ("key",)),
    (r"^(v|value|wv|vproj)$", ("value",)),
    (r"^(o|output|out|wo|oproj|outproj|outputproj|linearproj|dense|attnoutput)$", ("output",)),
    (r"^(qkv|attentionqkv|cattn|wpack|querykeyvalue|linearqkv|wqkv)$", ("qkv",)),
    (r"^(gate|gateproj|w2gate)$", ("gate",)),
    (r"^(up|upproj|cfc|fc1|wi|denseh4h|denseh4|dense4)$", ("up",)),
    (r"^(gateup|gateupproj|linearfc1|w1w3)$", ("gate", "up")),
    (r"^(down|downproj|fc2|linearfc2|dense4hh)$", ("down",)),
    (r"^(attn|attention|selfattn)$", ATTENTION),
    (r"^(mlp|ffn|feedforward)$", FEED_FORWARD),
    (r"^(all|alllinear|linear|alllinearlayers|7|default7)$", LINEAR),
)


_LARGEST_RANK = 2**20  # far wider than any matrix


@dataclass(frozen=True, slots=True, kw_only=True)
class Lora:
    """Beside each of the matrices `targets` (of MATRICES) of every layer are two more, of `rank` columns and `rank` rows;
    they alone are trained. `base`: in what the frozen matrices of layers are held (of BASES); all else that is frozen has
    16 bits, or 32 where `widened`, as peft's prepare_model_for_kbit_training casts what is not quantised. `keeps_inputs`:
    products with frozen matrices keep what comes in, as bitsandbytes' of 4 bits did until 0.43.2 of July 2024
    (github.com/bitsandbytes-foundation/bitsandbytes/pull/1270), as an attribute of their context.
    `shares_inputs`: one autograd function does the products with a matrix and its adapter, and keeps one input for both,
    and none that it can make of what else it keeps (Unsloth, kernels/fast_lora.py). `dropout`: before the adapters.
    `trains_ends`: copies of the embedding and of the head are trained too (peft's modules_to_save).
    """

    rank: int
    targets: tuple[str, ...] = LINEAR
    dropout: bool = False
    base: str = "16bit"
    widened: bool = False
    keeps_inputs: bool = False
    shares_inputs: bool = False
    trains_ends: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.rank <= _LARGEST_RANK:
            raise UsageError(f"the rank of LoRA is {self.rank}.", hint=f"it is 1 to {_LARGEST_RANK:,}.")
        unknown = [name for name in self.targets if name not in MATRICES]
        if unknown or not self.targets:
            raise UsageError(
                f"LoRA beside {', '.join(unknown) or 'no matrix'}.", hint=f"it is of {', '.join(MATRICES)}."
            )
        if self.base not in BASES:
            raise UsageError(f"a base in {self.base!r}.", hint=f"it is one of {', '.join(BASES)}.")

    @property
    def is_quantized(self) -> bool:
        """Matrices are made 16 bits wide for each product."""
        return BASES[self.base] < 2

    @property
    def matrix_bytes(self) -> float:
        """Of an element of a frozen matrix of a layer."""
        return BASES[self.base]

    @property
    def widening_bytes(self) -> float:
        """What making an element of such a matrix 16 bits wide reads and writes; 0 where it is."""
        return _WIDENING.get(self.base, 0.0)

    @property
    def end_bytes(self) -> float:
        """Of an element of the frozen embedding and head."""
        return 4.0 if self.base == "fp32" or self.widened else 2.0


def base_named(text: str) -> str:
    """Of BASES, by words such as `bnb.nf4-dq`, `int8`, `4`, `gptq`. Raises UsageError for others."""
    word = re.sub(r"[^a-z0-9]", "", text.lower())
    found = next((base for spelled, base in _BASE_WORDS if re.search(spelled, word)), None)
    if found is None:
        raise UsageError(
            f"a base in {text!r} is not known.", hint=f"it is one of {', '.join(BASES)}, in any spelling."
        )
    return found


def targets_named(text: str) -> tuple[str, ...]:
    """Of MATRICES, from `q_proj,v_proj`, `all-linear`, `qkv o`, `attention`. Raises UsageError for others."""
    whole = re.sub(r"[^a-z0-9]", "", text.lower())
    found = _targets_of(whole)
    if found is None:
        found = ()
        for part in re.split(r"[\s,;+&/|]+", text.strip()):
            word = re.sub(r"[^a-z0-9]", "", part.lower())
            of_word = _targets_of(word)
            if of_word is None:
                raise UsageError(
                    f"LoRA beside {part!r}: no such matrix is known.",
                    hint=f"they are {', '.join(MATRICES)}, attention, mlp, all.",
                )
            found += of_word
    return tuple(name for name in MATRICES if name in found)


def _targets_of(word: str) -> tuple[str, ...] | None:
    return next((found for spelled, found in _TARGET_WORDS if re.search(spelled, word)), None)
