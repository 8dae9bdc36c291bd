"""What a layer's recurrence (memadvisor/recurrence.py) takes and keeps: its products, the scan itself, and what autograd saves.

Scans of whole sequences run chunk by chunk: products inside a chunk, a state from each chunk to the next. Counted from
the kernels that trainers call, tensor by tensor:

- Mamba 2: mamba_ssm, ops/triton/ssd_combined.py (mamba_split_conv1d_scan_combined). It saves what comes in and its result before the
  gate; the backward runs convolution and states again.
- Gated delta net: flash-linear-attention, ops/gated_delta_rule/chunk.py, chunks of 64 tokens. It saves queries and keys as they were
  normed (once for each head of values), values, steps, and the inverse of each chunk's triangle; w, u and the states run again.
- Kimi delta attention: flash-linear-attention, ops/kda/chunk.py, chunks of 64 tokens, with the gate inside (use_gate_in_kernel). It
  saves queries and keys as they were normed, values, the decays as they came in, and of each chunk its scores and the inverse of
  its triangle; the rest runs again.
- Lightning attention: its authors' kernels (lightning_attn2), blocks of 64 tokens. They save queries, keys and values as SiLU left
  them; SiLU its input, the norm its own, and the gate both factors.
- Short convolutions: Hugging Face's class of LFM2 (models/lfm2/modeling_lfm2.py, Lfm2ShortConv), whose gates are operators of their
  own: what comes in, the convolution's input and its result are kept, and the last product's input.
- Mamba: mamba_ssm, ops/selective_scan_interface.py. MambaInnerFn saves what comes in and the scan's result, and runs the rest
  again; with norms inside (Jamba) the parts are functions of their own, and keep what passes between them.

Nothing of it is fitted: products inside chunks are taken to run at fused attention's rate, all else at the memory's. Five
published steps of one model, of Mamba 2, are held against it (benchmarks/unseen/nemotron_nano.csv).
"""

from __future__ import annotations

from memadvisor.architecture import Architecture
from memadvisor.cost.layouts.kernels import Device, fused_attention_seconds, stream_seconds
from memadvisor.layout import TrainingStep
from memadvisor.recurrence import Recurrence

# Tokens of a chunk: of Mamba 2 as mamba_ssm has it by default, of the delta rule as its kernels are written.
_CHUNK = {"mamba2": 256, "gated_delta_net": 64, "kimi_delta": 64, "lightning": 64}
# The scan's states that Mamba keeps, each of two numbers of 4 bytes, are so many tokens apart.
_SCAN_TOKENS = 2048
# A backward does what the forward did again, and twice as much.
_BACKWARD = 3.0
# Of an exponential, in multiplications and additions that take as long: an SM of A100 and H100 has 16 units for these and
# 128 for those (CUDA C++ Programming Guide, table of arithmetic throughput).
_EXPONENTIAL_FLOPS = 16.0
_SCAN_FLOPS = 7.0
# Of a number of the states and a token, where it is another.
_STATE_FLOPS = {"gated_delta_net": 8.0, "kimi_delta": 8.0, "lightning": 5.0}
_SHORT = "short_convolution"
# Bytes of a column that pass: each gate reads two columns and writes one, the convolution reads and writes one, and the result
# is copied. Backward a gate reads three and writes two.
_SHORT_FORWARD, _SHORT_BACKWARD = 2 * 6.0 + 4.0 + 4.0, 2 * 10.0 + 6.0 + 4.0


def recurrence_products(
    model: Architecture, layer: int, tokens: float, tensor: int
) -> list[tuple[float, float, float, float]]:
    """(rows, columns, depth, count) on one of `tensor` ranks, which part heads; none of other layers."""
    mixer = model.recurrence
    if mixer is None or not model.has_recurrence(layer):
        return []
    hidden, inner = float(model.hidden), mixer.inner / tensor
    products = [(tokens, mixer.in_columns / tensor, hidden, 1.0)]
    if mixer.kind == "mamba":
        products.append((tokens, float(mixer.step_columns), inner, 1.0))
        products.append((tokens, inner, float(mixer.step_rank), 1.0))
    if mixer.kind == "kimi_delta":  # decay and gate
        products.append((tokens, inner, float(mixer.step_rank), 2.0))
    return [*products, (tokens, hidden, inner, 1.0)]


def recurrence_flops(mixer: Recurrence) -> float:
    """Of one token's forward, without products and convolution (two for each of their parameters), as Megatron Bridge
    counts them (training/utils/flop_utils.py): 7 for each number of Mamba's states, 8 of the delta rule's. Lightning attention
    has 5: a decay, what a token adds, and what it reads."""
    if mixer.kind == _SHORT:  # two gates
        return 2.0 * mixer.inner
    states = mixer.inner * mixer.state_dim
    return _STATE_FLOPS.get(mixer.kind, _SCAN_FLOPS) * states


def recurrence_seconds(
    model: Architecture, step: TrainingStep, layer: int, device: Device
) -> tuple[float, float]:
    """Forward and backward of a layer's convolution, scan and gate on one rank; none of other layers."""
    mixer = model.recurrence
    if mixer is None or not model.has_recurrence(layer):
        return 0.0, 0.0
    tokens = step.microbatch_tokens / step.layout.tensor
    if mixer.kind == _SHORT:
        moved = tokens * mixer.inner
        return stream_seconds(device, _SHORT_FORWARD * moved), stream_seconds(device, _SHORT_BACKWARD * moved)
    around_s = stream_seconds(device, tokens * (4.0 * mixer.convolved + 6.0 * mixer.inner))
    moved_s = stream_seconds(device, tokens * _moved_bytes(mixer))
    if mixer.kind == "mamba":
        flops = (_SCAN_FLOPS + _EXPONENTIAL_FLOPS) * mixer.inner * mixer.state_dim
        computed_s = tokens * flops / (device.plain_flops_per_s or device.peak_flops_per_s)
    else:
        computed_s = fused_attention_seconds(device, tokens * _chunk_flops(mixer))
    forward_s = around_s + max(computed_s, moved_s)
    return forward_s, _BACKWARD * forward_s


def _chunk_flops(mixer: Recurrence) -> float:
    """Of one token's forward, of products inside chunks, and of those with the states."""
    chunk, keys = _CHUNK[mixer.kind], mixer.n_heads * mixer.state_dim
    states = mixer.inner * mixer.state_dim
    if (
        mixer.kind == "mamba2"
    ):  # scores of each group; with the values; states from values, results from states
        return 2.0 * chunk * (mixer.keys + mixer.inner) + 4.0 * states
    if mixer.kind == "lightning":  # scores, with the values; values from states, states from values
        return 2.0 * chunk * (keys + mixer.inner) + 4.0 * states
    # Keys with keys, w and u, queries with keys, scores with values; values from states, states from values, results from
    # states.
    return 2.0 * chunk * (3 * keys + 2 * mixer.inner) + 6.0 * states


def _moved_bytes(mixer: Recurrence) -> float:
    """Of one token's forward, what kernels between convolution and gate read and write; states and scores in 4 bytes, or as said."""
    inner, heads = mixer.inner, mixer.n_heads
    if mixer.kind == "mamba":  # convolved columns, steps and gate are read, the result is written
        return 10.0 * inner
    chunk = _CHUNK[mixer.kind]
    if mixer.kind == "mamba2":
        # Values twice, the result, B three times and C twice; scores of groups and states of chunks written and read,
        # passed on too.
        once = 6.0 * inner + 10.0 * mixer.keys + 16.0 * heads
        return once + 8.0 * chunk * mixer.n_key_heads + 16.0 * inner * mixer.state_dim / chunk
    if mixer.kind == "lightning":  # queries and keys once for each half of the values; values, the result
        return 8.0 * mixer.keys + 4.0 * inner
    if mixer.kind == "kimi_delta":
        # Queries and keys normed, decays summed in 4 bytes; all three read for the scores; keys and decays again for w, u and
        # the keys that the states take; these with the states; queries and decays with the result. Scores and triangles of 2
        # bytes twice each way.
        once = 42.0 * mixer.keys + 12.0 * inner
        return once + 8.0 * chunk * heads + 4.0 * inner * mixer.state_dim / chunk
    # Queries and keys are repeated for every head of values and normed, then read four and two times; values copied; w, u
    # and new values written and read, the result written; a chunk's triangle in 4 bytes and its inverse in 2, states in
    # 2.
    keys = heads * mixer.state_dim
    once = 4.0 * mixer.keys + 26.0 * keys + 16.0 * inner
    return once + 12.0 * chunk * heads + 4.0 * inner * mixer.state_dim / chunk


def recurrence_saved_bytes(model: Architecture, step: TrainingStep, layer: int, tokens: float) -> float:
    """What autograd keeps of a layer's recurrence on one rank, the input of its first product left out."""
    mixer = model.recurrence
    if mixer is None or not model.has_recurrence(layer):
        return 0.0
    kept = _kept_bytes(mixer) * tokens / step.layout.tensor
    return kept + recurrence_output_bytes(model, step, layer, tokens) * step.software.saved_input_bytes / 2.0


def _kept_bytes(mixer: Recurrence) -> float:
    """Of one token, the last product's input left out."""
    inner, heads = mixer.inner, mixer.n_heads
    if mixer.kind == _SHORT:  # all that comes in, the convolution's input and its result
        return 2.0 * (mixer.in_columns + 2 * inner)
    if mixer.kind == "mamba2":  # all that comes in, the result, and one number of each group's norm
        return 2.0 * (mixer.in_columns + inner) + 4.0 * mixer.n_key_heads
    if mixer.kind == "mamba":
        steps = 2.0 * mixer.step_columns + 4.0 * mixer.state_dim
        between = 4.0 * inner if mixer.norm else 0.0  # convolved columns and steps
        return (
            2.0 * (mixer.in_columns + inner) + steps + between + 8.0 * inner * mixer.state_dim / _SCAN_TOKENS
        )
    if (
        mixer.kind == "lightning"
    ):  # SiLU's input and its result, the norm's input, and both factors of the gate
        return 4.0 * mixer.convolved + 6.0 * inner
    if mixer.kind == "kimi_delta":
        # The convolution's input, normed queries and keys, decays, values, the result and the gate; the few columns of both;
        # of each head what normed it, its step as it came in and in 4 bytes, and its rows of scores and inverse.
        columns = 2.0 * mixer.convolved + 6.0 * mixer.keys + 6.0 * inner + 4.0 * mixer.step_rank
        return columns + heads * (8.0 + 6.0 + 4.0 + 4.0 * _CHUNK[mixer.kind])
    # The convolution's input, queries and keys of each head with what normed them, values, the result and the gate; of
    # each head its steps and decays, and its row of the chunk's inverse.
    columns = 2.0 * mixer.convolved + 4.0 * heads * mixer.state_dim + 6.0 * inner
    return columns + heads * (8.0 + 20.0 + 2.0 * _CHUNK[mixer.kind])


def recurrence_output_bytes(model: Architecture, step: TrainingStep, layer: int, tokens: float) -> float:
    """The last product's input, in two bytes; Hugging Face's Mamba classes have that product inside the kernels'
    function, whose backward makes it again."""
    mixer = model.recurrence
    if mixer is None or not model.has_recurrence(layer):
        return 0.0
    is_inside = mixer.kind == "mamba" and not mixer.norm
    is_inside |= mixer.kind == "mamba2" and step.software.reference_code
    return 0.0 if is_inside else 2.0 * tokens * mixer.inner / step.layout.tensor


def recurrence_exchange_bytes(model: Architecture, tokens: float, tensor: int) -> float:
    """What context-parallel ranks exchange, who scan whole sequences of some of the heads each: all that comes in, and
    the result (megatron/core/ssm/mamba_context_parallel.py)."""
    mixer = model.recurrence
    if mixer is None or mixer.kind == _SHORT:  # which sees a few tokens of the rank before
        return 0.0
    return 2.0 * tokens * (mixer.in_columns + mixer.inner) / tensor
