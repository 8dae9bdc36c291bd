"""What one accelerator and its links can do. Unknown is None; no other machine's figure stands in for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkPiece:
    """A message of `from_bytes` and more, up to the next piece, takes alpha_s + its bytes / bytes_per_s.

    `residual_fraction`: how far that is at most from the points that it was fitted to (pieces.py).
    """

    from_bytes: int
    alpha_s: float
    bytes_per_s: float
    residual_fraction: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCurve:
    """Measured seconds of one collective against its full message size, for one number of ranks.

    `operation` is all_reduce, all_gather, reduce_scatter or broadcast. Points ascend in bytes. `pieces` are fitted to
    them; empty where they were not. `algorithm`: by which of ours (executors.py); None: as the engine does without a plan's
    word.
    """

    operation: str
    num_ranks: int
    sizes_bytes: tuple[int, ...]
    durations_s: tuple[float, ...]
    pieces: tuple[LinkPiece, ...] = ()
    algorithm: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MatmulRate:
    """Measured FLOP/s of a product of (rows x depth) and (depth x columns): 2 rows columns depth of its seconds."""

    dtype: str
    rows: int
    columns: int
    depth: int
    flops_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerRate:
    """Elements of float32 parameters that an update takes in a second; `implementation` is torch's: fused or foreach."""

    optimizer: str
    implementation: str
    elements_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TierBandwidth:
    """How fast bytes go between the memory that computes and a tier: `read` brings them, `write` puts them away.

    Of a disk, what it keeps up when the page cache does not help.
    """

    read_bytes_per_s: float
    write_bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PageCache:
    """How fast bytes of files go that the kernel keeps in memory. `size_bytes`: what of it was free when measured."""

    bandwidth: TierBandwidth
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapSlowdown:
    """What compute and collectives of the same ranks cost each other.

    `compute`, `collective`: the seconds that what takes one second alone then takes at the same time, at least 1.
    `late_s`: by how much longer a small message of the engine's lane takes on average while ranks compute: to be handed
    over, to get the interpreter's lock and a core, and for the other ranks to come. `spread`: by how much longer the slowest
    rank takes for the same compute than ranks do on average, as a share of that. None where not measured.
    """

    compute: float
    collective: float
    late_s: float | None = None
    spread: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCost:
    """Processor seconds that the built-in engine takes of the thread that computes, beyond what DDP takes there.

    `gradient_s`: for each parameter whose gradient comes in a backward, to put it into its unit's flat. `collective_s`:
    for each collective of a unit, to begin it and take what it brings; `lane_s`: what other threads take for it, the
    lane's and the backend's, of a core that computes, which is 0 where each rank has two. `piece_s`: for each parameter
    of stages 1 to 3 in an optimizer step, to put this rank's piece, and its state, in its place; beyond the rank's share
    of the optimizer's own time. `shown_s`: for each parameter of stage 3, each time that it is gathered and released.
    """

    gradient_s: float
    collective_s: float
    lane_s: float
    piece_s: float
    shown_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PagingCost:
    """The same of one process whose parameters and gradients lie on a disk, or what autograd keeps, beyond the plain script.

    `transfer_s`: to begin a read or a write of a unit's, and to take what it brings. `shown_s`: for each parameter, each time
    that it is read into its place for a forward or a backward and leaves it, with half of what taking its gradient takes.
    `update_s`: for each in an optimizer step of AdamW, with its state. `moved_s`: for each storage that autograd keeps and that
    is written and read back, with what looking at those that stay takes.
    """

    transfer_s: float
    shown_s: float
    update_s: float
    moved_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """`kind` says where the figures come from: `datasheet`, `measured` (calibrate) or `given` (by the user).

    Peaks are dense FLOP/s by dtype name as torch prints it without its prefix (`bfloat16`, `float32`). `disk`: of files
    in the directory that was measured; `page_cache`: of those that fit in it. `host`: of pinned memory of a GPU's host.
    `..._both_ways`: of either direction while the other goes on too. `matmuls`: products of many shapes, of which
    `peak_flops_per_s` is the best. `coder`: of float32 optimizer state that the device decodes from 8 bits, and codes.
    `overlap`: of the ranks of `collectives`. `alternatives`: of other algorithms. `engine`, `paging`: what the engine
    itself takes of several ranks, and of one; None where not measured.
    """

    name: str
    kind: str
    source: str
    memory_bytes: int | None
    memory_bandwidth_bytes_per_s: float | None
    peak_flops_per_s: Mapping[str, float]
    collectives: tuple[CollectiveCurve, ...] = ()
    disk: TierBandwidth | None = None
    page_cache: PageCache | None = None
    host: TierBandwidth | None = None
    coder: TierBandwidth | None = None
    overlap: OverlapSlowdown | None = None
    matmuls: tuple[MatmulRate, ...] = ()
    optimizers: tuple[OptimizerRate, ...] = ()
    disk_both_ways: TierBandwidth | None = None
    page_cache_both_ways: TierBandwidth | None = None
    host_both_ways: TierBandwidth | None = None
    alternatives: tuple[CollectiveCurve, ...] = ()
    engine: EngineCost | None = None
    paging: PagingCost | None = None
