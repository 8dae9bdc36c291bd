"""A model's larger and smaller relatives: as wide for their depth as it is itself.

The rule: with k layers in place of L, every width (of a head, of the hidden vector, of the feed-forward block, of experts
and of latent attention) is k / L of the model's own, rounded to multiples of 8, or of what the model's own is a multiple of
if that is less. Numbers of heads and of experts, the vocabulary and the table of positions stay. So parameters of the layers
grow as k cubed, widths never shrink as k grows, and k = L is the model itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import gcd

from memadvisor.architecture import Architecture, Experts, LatentAttention
from memadvisor.recurrence import Recurrence

_WIDTHS_ARE_MULTIPLES_OF = 8
_Width = Callable[[int], int]


def scaled_model(model: Architecture, n_layers: int) -> Architecture:
    """The relative with `n_layers` layers."""
    if n_layers == model.n_layers:
        return model

    def width(own: int) -> int:
        multiple = gcd(own, _WIDTHS_ARE_MULTIPLES_OF)
        wanted = own * n_layers / model.n_layers
        return multiple * max(1, round(wanted / multiple)) if own else 0

    head_dim = width(model.head_dim)
    is_heads = model.hidden == model.n_heads * model.head_dim
    return replace(
        model,
        name=f"{model.name} at {n_layers} layers",
        n_layers=n_layers,
        head_dim=head_dim,
        hidden=model.n_heads * head_dim if is_heads else width(model.hidden),
        ffn=width(model.ffn),
        qk_norm=width(model.qk_norm),
        encoder_layers=_scaled_encoder(model, n_layers),
        experts=None if model.experts is None else _scaled_experts(model.experts, width, n_layers),
        latent=None if model.latent is None else _scaled_latent(model.latent, width),
        recurrence=None if model.recurrence is None else _scaled_recurrence(model.recurrence, width),
        layer_pattern=_scaled_pattern(model, n_layers),
    )


def _scaled_encoder(model: Architecture, n_layers: int) -> int:
    """The same share of the layers, as near as whole ones come; of two stacks each has one at least."""
    if not model.encoder_layers:
        return 0
    return max(1, min(n_layers - 1, round(model.encoder_layers * n_layers / model.n_layers)))


def _scaled_experts(experts: Experts, width: _Width, n_layers: int) -> Experts:
    return replace(
        experts,
        expert_ffn=width(experts.expert_ffn),
        shared_ffn=width(experts.shared_ffn),
        first_dense=min(experts.first_dense, n_layers),
        every=min(experts.every, n_layers),
    )


def _scaled_latent(latent: LatentAttention, width: _Width) -> LatentAttention:
    return replace(
        latent,
        kv_rank=width(latent.kv_rank),
        q_rank=None if latent.q_rank is None else width(latent.q_rank),
        rope_head_dim=width(latent.rope_head_dim),
        nope_head_dim=width(latent.nope_head_dim),
        value_head_dim=width(latent.value_head_dim),
    )


def _scaled_recurrence(mixer: Recurrence, width: _Width) -> Recurrence:
    """States of Mamba are as wide as they were; its heads are the inner columns themselves, those of Mamba 2 and of the
    delta rule are not."""
    if mixer.kind == "mamba":
        n_heads, step_rank = width(mixer.n_heads), width(mixer.step_rank)
        norm = step_rank + 2 * mixer.state_dim if mixer.norm else 0
        return replace(mixer, n_heads=n_heads, step_rank=step_rank, norm=norm)
    if mixer.kind == "short_convolution":  # as wide as the stream
        return replace(mixer, n_heads=width(mixer.n_heads))
    head_dim = width(mixer.head_dim)
    if mixer.kind == "mamba2":
        return replace(mixer, head_dim=head_dim, norm=mixer.n_heads * head_dim if mixer.norm else 0)
    if mixer.kind == "lightning":
        return replace(mixer, head_dim=head_dim, state_dim=head_dim, norm=mixer.n_heads * head_dim)
    step_rank = width(mixer.step_rank) if mixer.step_rank else 0
    return replace(
        mixer, head_dim=head_dim, state_dim=width(mixer.state_dim), norm=head_dim, step_rank=step_rank
    )


def _scaled_pattern(model: Architecture, n_layers: int) -> str:
    """The same where it repeats; else each layer is what is as far down the model itself."""
    pattern = model.layer_pattern
    if 2 * len(pattern) <= model.n_layers:
        return pattern
    return "".join(pattern[layer * model.n_layers // n_layers] for layer in range(n_layers))
