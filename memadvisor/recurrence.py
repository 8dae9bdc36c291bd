"""Mixers of tokens in place of attention, that hand on a state of one size whatever the sequence's length: their shapes.

Gated delta net: Yang et al. 2024 (arXiv:2412.06464). Mamba 2: Dao and Gu 2024 (arXiv:2405.21060). Mamba: Gu and Dao 2023
(arXiv:2312.00752). Of each: one product makes all that comes in, a short causal convolution goes over a part of it, the
recurrence runs, a gate multiplies its result, and one product leads back. Short convolution: LFM2's (Hugging Face transformers,
models/lfm2), where the convolution, with a gate before it and one behind it, is all there is. Kimi delta attention: Kimi Team
2025 (arXiv:2510.26692), a delta net whose decay is each column's own, made through few columns like its gate. Lightning
attention: Qin et al. 2024 (arXiv:2405.17381), MiniMax-01 (arXiv:2501.08313), whose decay is each head's constant; it has no
convolution.
"""

from __future__ import annotations

from dataclasses import dataclass

KINDS = ("gated_delta_net", "kimi_delta", "lightning", "mamba2", "mamba", "short_convolution")
# What of a model's layer is there, one letter a layer: a mixer (attention, recurrence, both side by side) and a
# feed-forward block behind it, or one of these alone (`E`: experts).
BLOCKS = "arbARFE"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recurrence:
    """`n_heads` of `head_dim` columns of values each, and `n_key_heads` of `state_dim` columns of queries and of keys
    (Mamba's C and B, whose heads are called groups). Mamba has a head for each inner column, and steps of `step_rank`
    columns; a short convolution has a head for each column too, and no keys. Of Kimi's delta attention `step_rank` are the
    columns through which the decay, and the gate, of all columns are made.

    `convolution`: tokens that the convolution looks at. `norm`: parameters of the norms inside. `in_bias`, `out_bias`: the
    products have biases.
    """

    kind: str
    n_heads: int
    head_dim: int
    state_dim: int
    n_key_heads: int = 1
    convolution: int = 4
    convolution_bias: bool = False
    in_bias: bool = False
    out_bias: bool = False
    norm: int = 0
    step_rank: int = 0

    @property
    def inner(self) -> int:
        """Columns of all values."""
        return self.n_heads * self.head_dim

    @property
    def keys(self) -> int:
        """Columns of all keys, and of all queries."""
        return self.n_key_heads * self.state_dim

    @property
    def convolved(self) -> int:
        """Columns that the convolution goes over."""
        return self.inner if self.kind in ("mamba", "short_convolution") else self.inner + 2 * self.keys

    @property
    def in_columns(self) -> int:
        """What the first product makes: values, gate, queries, keys, and of each head its step (and how much it replaces).
        Kimi's decay and gate are there in few columns."""
        if self.kind == "kimi_delta":
            return self.convolved + 2 * self.step_rank + self.n_heads
        per_head = {"gated_delta_net": 2, "lightning": 0, "mamba2": 1, "mamba": 0, "short_convolution": 1}[
            self.kind
        ]
        return self.convolved + self.inner + per_head * self.n_heads

    @property
    def step_columns(self) -> int:
        """Of Mamba, what a second product makes of the convolved columns: steps, B and C; none of the others."""
        return self.step_rank + 2 * self.state_dim if self.kind == "mamba" else 0

    def num_parameters(self, hidden: int) -> int:
        """Of one layer's recurrence."""
        products = hidden * self.in_columns + self.inner * hidden
        ranks = 2 if self.kind == "kimi_delta" else 1
        products += self.step_columns * self.inner + ranks * self.step_rank * self.inner
        biases = self.in_columns * self.in_bias + hidden * self.out_bias
        convolution = self.convolved * (self.convolution + self.convolution_bias)
        if self.kind in ("short_convolution", "lightning"):
            vectors = 0
        elif self.kind == "kimi_delta":  # of each column its step's bias, of each head its decay
            vectors = self.inner + self.n_heads
        elif self.kind == "mamba":  # decay of each column's state, its skip, and the steps' bias
            vectors = self.inner * (self.state_dim + 2)
        else:  # decay and step of each head; Mamba 2 has a skip
            vectors = self.n_heads * (3 if self.kind == "mamba2" else 2)
        return products + biases + convolution + vectors + self.norm
