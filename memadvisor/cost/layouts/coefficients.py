"""What data sheets do not say of a training step: few numbers, each with a meaning, for all models, layouts and machines.

They are fitted to published measurements by `benchmarks/fit_layouts.py`, then rounded, and none belongs to a row of
theirs. Where the tables hardly tell values apart, physics chose: `across_share` lies between what their clusters show
(0.4) and what InfiniBand reaches (0.8). Shares are of the rate that the data sheet names.
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

    `host_forward_s`, `host_backward_s`: what the host takes to launch a layer; a device cannot be faster.
    `host_call_s`: for one collective more. `inside_share`, `across_share`: of a link's rate in large collectives.
    `collective_s`: what a collective takes before anything moves; `inside_alpha_s`, `across_alpha_s`: of each of its
    messages on the way. `overlap_slowdown`: by how much computation is slower while collectives go on.

    `allocator_share`: what the caching allocator reserves, of its tensors' bytes (fragments); `allocator_fixed_bytes`:
    workspaces and its smallest blocks. `context_bytes`: of driver and communicators, beside the allocator.
    `memory_sigma`: standard deviation of the logarithm of measured over predicted peaks.
    """

    matmul_share: float = 0.783
    matmul_share_fast: float = 0.58
    fast_flops_per_s: float = 500e12
    matmul_fixed_s: float = 6.3e-6
    attention_share: float = 0.65
    attention_backward_share: float = 0.5
    bandwidth_share: float = 0.737
    kernel_s: float = 4e-6
    host_forward_s: float = 0.5e-3
    host_backward_s: float = 2.33e-3
    host_call_s: float = 22e-6
    inside_share: float = 0.9
    across_share: float = 0.5
    collective_s: float = 69e-6
    inside_alpha_s: float = 1.2e-6
    across_alpha_s: float = 30e-6
    pipeline_message_s: float = 0.3e-3
    overlap_slowdown: float = 0.4
    step_fixed_s: float = 4.2e-3
    allocator_share: float = 1.04
    allocator_fixed_bytes: float = 0.35e9
    context_bytes: float = 2.0e9
    memory_sigma: float = 0.13


FITTED = Coefficients()
