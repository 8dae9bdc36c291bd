"""What data sheets do not say of a training step: few numbers, each with a meaning, for all models, layouts and machines.

They are fitted to published measurements by `benchmarks/fit_layouts.py`, then rounded, and none belongs to a row of
theirs. Where the tables hardly tell values apart, physics chose: `across_share` lies between what their clusters show
(0.4) and what InfiniBand reaches (0.8). Shares are of the rate that the data sheet names. Latencies of links are the links'
own, measured or NCCL's (`memadvisor/hardware/links.py`).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Coefficients:
    """`matmul_share`: of the peak that a large product reaches (it is power that limits, the more so the newer the
    card: `matmul_share_fast` is that of cards above `fast_flops_per_s`). `matmul_fixed_s`: what a product takes beyond
    its arithmetic (filling and draining of tiles, of whose last wave a part idles). `attention_share`: what a fused
    attention reaches of a large product's rate; its backward reaches `attention_backward_share` of that.
    `bandwidth_share`: of a kernel that streams. `kernel_s`: the least time between two kernels.

    `host_forward_s`, `host_backward_s`: what the host takes to launch a layer; a device cannot be faster. `host_call_s`:
    for one collective more. `inside_share`, `across_share`: of a link's rate in large collectives. `tree_share`: of a
    ring's rate that a tree reaches (NCCL, src/graph/tuning.cc: 0.5 to 0.9 by size). `collective_s`: what a collective
    takes before anything moves. `overlap_slowdown`: by how much computation is slower while collectives go on.

    `allocator_share`: what the caching allocator reserves, of its tensors' bytes (fragments); `allocator_fixed_bytes`:
    workspaces and its smallest blocks. `driver_bytes`, `communicator_bytes`: what driver and kernels take beside the
    allocator, and the buffers of each communicator of a rank. `context_bytes`: what of the sheet's memory is left to all
    of them where it is asked whether a peak fits; a card has more than its sheet says. `peak_sigma`: by what share a peak
    of parameters, gradients and optimizer state alone is off (standard deviation); `activations_sigma`: by what share all
    the rest is, besides.
    """

    matmul_share: float = 0.81
    matmul_share_fast: float = 0.6
    fast_flops_per_s: float = 500e12
    matmul_fixed_s: float = 8e-6
    attention_share: float = 0.63
    attention_backward_share: float = 0.7
    bandwidth_share: float = 0.66
    kernel_s: float = 4e-6
    host_forward_s: float = 0.5e-3
    host_backward_s: float = 2.2e-3
    host_call_s: float = 22e-6
    inside_share: float = 0.9
    across_share: float = 0.65
    tree_share: float = 0.6
    collective_s: float = 60e-6
    pipeline_message_s: float = 0.3e-3
    overlap_slowdown: float = 0.4
    step_fixed_s: float = 3.6e-3
    allocator_share: float = 1.05
    allocator_fixed_bytes: float = 0.3e9
    driver_bytes: float = 1.0e9
    communicator_bytes: float = 1.2e9
    context_bytes: float = 2.0e9
    peak_sigma: float = 0.05
    activations_sigma: float = 0.2


FITTED = Coefficients()

# What the host takes to launch one operator more than a layer's usual ones: about what PyTorch's dispatch and autograd
# take of one. Not fitted: no row of the published tables that fits run on has such operators.
HOST_OPERATOR_S = 10e-6
