"""What one layer of a stage does for one microbatch on one rank, and how long that takes.

Products and collectives of tensor parallelism: Shoeybi et al. 2019 (arXiv:1909.08053), section 3, and with sequence
parallelism Korthikanti et al. 2022 (arXiv:2205.05198), section 4.2.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from memadvisor.architecture import Architecture
from memadvisor.cost.layouts.adapters import adapter_parameters, adapter_work
from memadvisor.cost.layouts.attention import attention_columns, attention_seconds
from memadvisor.cost.layouts.casts import cast_seconds
from memadvisor.cost.layouts.coefficients import HOST_OPERATOR_S, Coefficients
from memadvisor.cost.layouts.dtensor_dispatch import dtensor_seconds
from memadvisor.cost.layouts.expert_exchanges import expert_exchange_seconds, exposed_exchange_seconds
from memadvisor.cost.layouts.expert_launches import waiting_seconds
from memadvisor.cost.layouts.kernels import (
    Device,
    matmul_seconds,
    stream_seconds,
)
from memadvisor.cost.layouts.key_index import index_products
from memadvisor.cost.layouts.layer_streams import (
    activation_bytes,
    more_backward_bytes,
    pointwise_bytes,
    routed_bytes,
    stream_bytes,
)
from memadvisor.cost.layouts.links import Group
from memadvisor.cost.layouts.module_hooks import hooks_seconds
from memadvisor.cost.layouts.operators import repeated_products, unneeded_products
from memadvisor.cost.layouts.recurrences import (
    recurrence_exchange_bytes,
    recurrence_products,
    recurrence_seconds,
)
from memadvisor.cost.layouts.saved import layer_tokens
from memadvisor.cost.layouts.tensor_grids import grid_lines, grid_seconds, local_products, unsplit
from memadvisor.layout import Layout, TrainingStep

# A backward reads what the forward read, and the gradient that comes in, and writes one of each operand.
_BACKWARD_STREAM = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """The groups of ranks that a layer talks to; whether stages of the pipeline lie on different nodes."""

    tensor: Group
    context: Group
    expert: Group
    pipeline_crosses_nodes: bool
    lines: tuple[Group, Group, Group] | None = None  # of a grid of tensor-parallel ranks


def layer_groups(
    layout: Layout,
    group: Callable[[int, int], Group],
    pipeline_crosses_nodes: bool,
    *,
    whole_experts: bool = False,
) -> Groups:
    """`group`: of so many ranks, so far apart."""
    expert = group(layout.expert * layout.tensor, 1) if whole_experts else group(layout.expert, layout.tensor)
    return Groups(
        tensor=group(layout.tensor, 1),
        context=group(layout.context, layout.tensor),
        expert=expert,
        pipeline_crosses_nodes=pipeline_crosses_nodes,
        lines=None if layout.tensor_kind == "1d" else grid_lines(layout, group),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Seconds of one microbatch. `forward_s` and `backward_s` are all of it; the others say what of both they hold."""

    forward_s: float
    backward_s: float
    weight_s: float
    recompute_s: float
    matmul_s: float
    attention_s: float
    recurrence_s: float
    stream_s: float
    collective_s: float
    host_s: float


def _projections(model: Architecture) -> list[tuple[float, float]]:
    """(columns, depth) of each product of attention that tensor parallelism splits by columns, then by depth."""
    if model.latent is not None:
        latent = model.latent
        query = model.n_heads * (latent.nope_head_dim + latent.rope_head_dim)
        value = model.n_heads * latent.value_head_dim
        return [
            (query, latent.q_rank or model.hidden),
            (model.n_heads * latent.nope_head_dim + value, latent.kv_rank),
        ]
    queries = model.n_heads * (2 if model.attention_gate else 1)
    return [((queries + 2 * model.n_kv_heads) * model.head_dim, model.hidden)]


def layer_work(model: Architecture, step: TrainingStep, layer: int, device: Device, groups: Groups) -> Work:
    """One microbatch through layer `layer`, as the plan recomputes it."""
    layout, software = step.layout, step.software
    tokens = layer_tokens(model, step, layer)
    products, stream = _products(model, step, layer, tokens)
    if groups.lines is not None:
        products = local_products(layout, _products(model, unsplit(step), layer, tokens)[0])
    matmul_s = sum(matmul_seconds(device, *shape) for shape in products)
    adapters = adapter_work(model, step, layer, tokens)
    adapter_s = sum(matmul_seconds(device, *shape) for shape in adapters.products)
    # Frozen matrices have no gradients of their own.
    weight_s = matmul_s if software.lora is None else adapter_s
    core_forward_s, core_backward_s = attention_seconds(model, step, layer, device)
    scan_forward_s, scan_backward_s = recurrence_seconds(model, step, layer, device)
    stream_s = stream_seconds(device, stream)
    stream_s += device.coefficients.kernel_s * (len(products) + adapters.num_operators)
    widening_s = stream_seconds(device, adapters.widening_bytes)
    input_cast_s, gradient_cast_s = cast_seconds(device, products, software)
    parameters = _layer_parameters(model, step, layer)
    accumulate_s = stream_seconds(device, parameters * (accumulate_bytes(step) + weight_cast_bytes(step)))
    forward_calls_s, backward_calls_s = _collectives(model, step, layer, tokens, groups, core_forward_s)
    far_s = software.far_call_s * (groups.tensor.nodes - 1)
    far_s *= 2 * min(2, model.num_sublayers(layer))
    forward_calls_s, backward_calls_s = forward_calls_s + far_s, backward_calls_s + far_s
    forward_stream_s = stream_s + stream_seconds(device, adapters.stream_bytes) + input_cast_s + widening_s
    forward_stream_s += stream_seconds(device, parameters * weight_cast_bytes(step))
    forward_gpu = matmul_s + adapter_s + core_forward_s + scan_forward_s + forward_stream_s + forward_calls_s
    backward_bytes = adapters.backward_bytes + more_backward_bytes(model, step, layer, tokens)
    backward_stream_s = _BACKWARD_STREAM * stream_s + stream_seconds(device, backward_bytes)
    backward_stream_s += gradient_cast_s + accumulate_s + widening_s
    backward_gpu = matmul_s + adapter_s + weight_s + core_backward_s + scan_backward_s
    backward_gpu += backward_stream_s + backward_calls_s
    known = device.coefficients
    exchange_s = expert_exchange_seconds(model, step, layer, tokens, groups.expert)
    exchanges = [
        exposed_exchange_seconds(step, gpu, exchange_s, known) for gpu in (forward_gpu, backward_gpu)
    ]
    forward_gpu, backward_gpu = forward_gpu + exchanges[0], backward_gpu + exchanges[1]
    hosts = _host_seconds(model, step, layer, groups, known, adapters.num_operators)
    forward_idle, backward_idle = _idle_seconds(
        model, step, layer, tokens, device, (forward_gpu, backward_gpu), hosts
    )
    forward_s = forward_gpu + forward_idle
    recompute = recompute_seconds(model, step, layer, device, groups, forward_s)
    backward_s = backward_gpu + backward_idle + recompute
    return Work(
        forward_s=forward_s,
        backward_s=backward_s,
        weight_s=weight_s + accumulate_s,
        recompute_s=recompute,
        matmul_s=2 * (matmul_s + adapter_s) + weight_s,
        attention_s=core_forward_s + core_backward_s,
        recurrence_s=scan_forward_s + scan_backward_s,
        stream_s=forward_stream_s + backward_stream_s,
        collective_s=forward_calls_s + backward_calls_s + sum(exchanges),
        host_s=forward_idle + backward_idle,
    )


def _host_seconds(
    model: Architecture, step: TrainingStep, layer: int, groups: Groups, known: Coefficients, num_more: int
) -> tuple[float, float]:
    """What the host takes of one layer, forward and backward; `num_more`: operators of adapters."""
    call_s = _host_calls_seconds(model, step, layer, groups, known) + num_more * HOST_OPERATOR_S
    call_s += hooks_seconds(model, step, layer)
    launches = min(1.0, model.num_sublayers(layer) / 2)  # of a layer's, where it has one part of two
    dtensors_s = dtensor_seconds(model, step, layer)
    forward_s = known.host_forward_s * launches + call_s + dtensors_s[0]
    backward_s = known.host_backward_s * launches + call_s + dtensors_s[1]
    return forward_s * step.software.launch_share, backward_s * step.software.launch_share


def _idle_seconds(
    model: Architecture,
    step: TrainingStep,
    layer: int,
    tokens: float,
    device: Device,
    gpu_s: tuple[float, float],
    host_s: tuple[float, float],
) -> tuple[float, float]:
    """For how long the device has nothing to do, forward and backward: until the host has launched it."""
    if model.experts is None or not model.has_experts(layer) or step.software.pads_experts:
        return max(0.0, host_s[0] - gpu_s[0]), max(0.0, host_s[1] - gpu_s[1])
    # The host reads how many tokens each expert has where that is open, and cannot run ahead of the device.
    late = waiting_seconds(model, step, layer, tokens, device)
    return host_s[0] + late[0], host_s[1] + late[1]


def _host_calls_seconds(
    model: Architecture, step: TrainingStep, layer: int, groups: Groups, known: Coefficients
) -> float:
    """What a layer's collectives take the host, forward or backward."""
    layout, software = step.layout, step.software
    tp = layout.tensor
    calls = 2 * _gathering_sublayers(model, step, layer) if tp > 1 else 0
    calls += 2 if layout.context > 1 and (model.has_attention(layer) or model.has_recurrence(layer)) else 0
    calls += 2 if step.expert_ranks > 1 and model.has_experts(layer) else 0
    call_s = known.host_call_s + software.far_call_s * (groups.tensor.nodes - 1)
    call_s += software.call_s if tp > 1 else 0.0
    if layout.pipeline > 1 and groups.pipeline_crosses_nodes and tp > 1:
        call_s += software.pipelined_call_s * tp
    return calls * call_s


def recompute_seconds(
    model: Architecture, step: TrainingStep, layer: int, device: Device, groups: Groups, forward_s: float
) -> float:
    """What a layer's backward runs again of its forward, which takes `forward_s`; the mean of those that do and do not."""
    how = step.layout.recompute
    if how == "full":
        unneeded = (
            []
            if groups.lines is not None
            else unneeded_products(model, step, layer, layer_tokens(model, step, layer))
        )
        again_s = forward_s - sum(matmul_seconds(device, *each.shape) for each in unneeded)
        return step.layout.recompute_share * max(0.0, again_s)
    if step.repeats_operators:
        return _repeated_seconds(model, step, layer, device, groups)
    if how == "selective" and not step.software.fused_attention:
        return attention_seconds(model, step, layer, device)[0]
    if how == "pointwise":
        tokens = layer_tokens(model, step, layer)
        again_s = stream_seconds(device, pointwise_bytes(model, step, layer, tokens))
        if model.latent is not None and step.software.repeats_latent:
            shapes = [(tokens, columns / step.layout.tensor, depth) for columns, depth in _projections(model)]
            again_s += sum(matmul_seconds(device, *shape) for shape in shapes)
        return again_s
    return 0.0


def _repeated_seconds(
    model: Architecture, step: TrainingStep, layer: int, device: Device, groups: Groups
) -> float:
    """Products that are not kept, all that moves between products, and gathers (or sums) before them; the host goes through
    the whole forward again."""
    layout, tokens = step.layout, layer_tokens(model, step, layer)
    whole = step if groups.lines is None else unsplit(step)
    products = [each.shape for each in repeated_products(model, whole, layer, tokens)]
    calls_s = 0.0
    if groups.lines is not None:
        calls_s = grid_seconds(layout, products, groups.lines)[0]
        products = local_products(layout, products)
    elif layout.tensor > 1:
        activations = step.software.element_bytes * tokens * model.hidden
        sublayers = model.num_sublayers(layer)
        attentions = sublayers - 1
        # What is scattered is kept; sums are not, but for the feed-forward's nobody asks.
        calls_s = sublayers * groups.tensor.seconds("all_gather", activations)
        if not layout.sequence_parallel:
            calls_s = attentions * groups.tensor.seconds("all_reduce", activations)
        calls_s *= 1.0 - step.software.tensor_overlap
    calls_s += expert_exchange_seconds(model, step, layer, tokens, groups.expert)
    stream_s = stream_seconds(device, _products(model, step, layer, tokens)[1])
    stream_s += device.coefficients.kernel_s * len(products)
    if not step.software.fused_attention:  # nothing of scores is kept
        stream_s += attention_seconds(model, step, layer, device)[0]
    stream_s += recurrence_seconds(model, step, layer, device)[0]  # it is none of the operators that are kept
    stream_s += cast_seconds(device, products, step.software)[0]
    again_s = sum(matmul_seconds(device, *shape) for shape in products) + stream_s + calls_s
    return max(again_s, device.coefficients.host_forward_s * step.software.launch_share)


def _products(
    model: Architecture, step: TrainingStep, layer: int, tokens: float
) -> tuple[list[tuple[float, float, float, float]], float]:
    """(rows, columns, depth, count) of the forward's products, and the bytes that everything between them moves."""
    layout, hidden = step.layout, model.hidden
    tp = layout.tensor
    query, value = attention_columns(model)
    attends, feeds_forward = model.has_attention(layer), model.has_feed_forward(layer)
    products = recurrence_products(model, layer, tokens, tp)
    if attends:
        products += [(tokens, columns / tp, depth, 1.0) for columns, depth in _projections(model)]
        if model.latent is not None:
            ranks = (model.latent.q_rank or 0) + model.latent.kv_rank + model.latent.rope_head_dim
            products.append((tokens, float(ranks), float(hidden), 1.0))
            products += index_products(model, tokens)
        products.append((tokens, float(hidden), value / tp, 1.0))
    crosses = model.has_cross_attention(layer)
    if crosses:  # queries of the decoder's tokens, keys and values of the encoder's result
        columns = 2.0 * model.n_kv_heads * model.head_dim
        products.append((tokens, query / tp, float(hidden), 1.0))
        products.append((step.microbatch_tokens, columns / tp, float(hidden), 1.0))
        products.append((tokens, float(hidden), value / tp, 1.0))
    inner = 2 if model.gated_mlp else 1
    per_column = activation_bytes(model, step)
    columns = float(model.ffn) if feeds_forward else 0.0
    if model.experts is not None and model.has_experts(layer):
        experts = model.experts
        passed = tokens * experts.experts_per_token * layout.expert_imbalance
        # Whole experts are fewer, and take the tokens of all ranks that would have had a part of each.
        here, parts = max(1.0, experts.num_experts / step.expert_ranks), step.expert_tensor_ranks
        local = passed * parts / tp
        products.append((local / here, inner * experts.expert_ffn / parts, float(hidden), here))
        products.append((local / here, float(hidden), experts.expert_ffn / parts, here))
        products.append((tokens, float(experts.num_experts), float(hidden), 1.0))
        columns = float(experts.shared_ffn)
        stream_ffn = passed * experts.expert_ffn * per_column / tp + local * hidden * routed_bytes(step)
    else:
        stream_ffn = 0.0
    if columns:
        products.append((tokens, inner * columns / tp, float(hidden), 1.0))
        products.append((tokens, float(hidden), columns / tp, 1.0))
        stream_ffn += tokens * columns * per_column / tp
    stream = stream_bytes(model, step, layer, tokens) + stream_ffn
    return products, stream * step.software.element_bytes / 2


def _layer_parameters(model: Architecture, step: TrainingStep, layer: int) -> float:
    """Those of a layer that are trained, on one rank."""
    layout, lora = step.layout, step.software.lora
    if lora is not None:
        shared, experts = adapter_parameters(model, lora, layer, layout.tensor)
        return shared + experts / layout.expert
    shared = model.shared_layer_parameters(layer) / layout.weight_ranks
    return shared + model.expert_layer_parameters(layer) / (layout.tensor * layout.expert)


def accumulate_bytes(step: TrainingStep) -> float:
    """What adding one microbatch's gradient to the accumulated one moves, in bytes of each parameter."""
    software = step.software
    if software.fused_accumulation:
        return float(
            software.gradient_bytes
        )  # read and written under the product's arithmetic, which hides half of it
    if step.layout.num_microbatches == 1 and software.gradient_bytes == software.parameter_bytes:
        return 0.0
    return software.parameter_bytes + 2.0 * software.gradient_bytes


def weight_cast_bytes(step: TrainingStep) -> float:
    """What torch.autocast moves of a matrix's element: cast from fp32 to two bytes, and so its gradient back, for each microbatch."""
    software = step.software
    return 6.0 if software.autocast and software.lora is None else 0.0


def _gathering_sublayers(model: Architecture, step: TrainingStep, layer: int) -> int:
    """Blocks of a layer whose tokens tensor-parallel ranks gather: not routed experts alone that each rank has whole."""
    found = model.num_sublayers(layer)
    is_routed_alone = model.experts is not None and model.has_experts(layer) and not model.experts.shared_ffn
    return found - 1 if step.software.whole_experts and is_routed_alone else found


def _collectives(
    model: Architecture, step: TrainingStep, layer: int, tokens: float, groups: Groups, core_forward_s: float
) -> tuple[float, float]:
    """Seconds of a layer's collectives that nothing hides: forward and backward."""
    layout = step.layout
    activations = step.software.element_bytes * tokens * model.hidden
    forward = backward = 0.0
    if groups.lines is not None:
        return grid_seconds(layout, _products(model, unsplit(step), layer, tokens)[0], groups.lines)
    if layout.tensor > 1:
        if layout.sequence_parallel:
            pair = groups.tensor.seconds("all_gather", activations) + groups.tensor.seconds(
                "reduce_scatter", activations
            )
        else:
            pair = groups.tensor.seconds("all_reduce", activations)
        exposed = _gathering_sublayers(model, step, layer) * pair * (1.0 - step.software.tensor_overlap)
        forward, backward = exposed, exposed
    if layout.context > 1 and model.has_recurrence(layer):
        exchanged = recurrence_exchange_bytes(model, tokens, layout.tensor)
        forward += groups.context.exchange_seconds(exchanged)
        backward += groups.context.exchange_seconds(exchanged)
    if layout.context > 1 and model.has_attention(layer):
        keys = 2.0 * step.software.element_bytes * tokens * model.n_kv_heads * model.head_dim / layout.tensor
        if layout.context_kind == "ring":
            passing = groups.context.seconds("all_gather", keys * layout.context)
            forward += max(0.0, passing - core_forward_s)
            backward += max(0.0, 2 * passing - 2.5 * core_forward_s)
        else:
            query, value = attention_columns(model)
            exchanged = step.software.element_bytes * tokens * (query + value) / layout.tensor + keys
            forward += groups.context.exchange_seconds(exchanged)
            backward += groups.context.exchange_seconds(exchanged)
    return forward, backward
