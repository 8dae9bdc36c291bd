"""A row's columns of parallelism and of code -> TrainingStep."""

from __future__ import annotations

import dataclasses
import re

from memadvisor.architecture import Architecture, target_length
from memadvisor.errors import UsageError
from memadvisor.hardware.cluster import Cluster
from memadvisor.layout import Layout, TrainingStep
from memadvisor.layout_table.adapters import recomputes_unasked
from memadvisor.layout_table.cells import NO, YES, Cells
from memadvisor.layout_table.columns import plain as plain_word
from memadvisor.layout_table.degrees import Degrees
from memadvisor.layout_table.recomputation import recomputation
from memadvisor.layout_table.training_code import software_of, stage_in, strategy_stage
from memadvisor.schedule_names import SCHEDULES, V_SHAPED, schedule_name
from memadvisor.software import find_preset
from memadvisor.software_traits import Preset
from memadvisor.zeropp_options import ZeroPP, zeropp_fields, zeropp_names

# What is sharded, of words that say that alone.
_SHARDS = dict.fromkeys(("optim", "optimizer", "optimizerstates", "distopt", "os"), 1)
_SHARDS |= dict.fromkeys(("full", "hybrid", "pgos"), 3)
_TICKS = set(YES) - {"1", "1.0"}  # yes, and no number
_NAMES_DEGREES = re.compile(r"(?<![a-z])(dp|tp|mp|pp|cp|ep|sp)(\s*[-=:_]?\s*\d|\b)", re.IGNORECASE)


def step_of(
    cells: Cells, degrees: Degrees, architecture: Architecture, seq_len: int, cluster: Cluster
) -> tuple[TrainingStep, bool]:
    """The step of a row, and whether its micro-batch size is left open (then it is 1 here)."""
    preset, software = software_of(cells, architecture, cluster.accelerator)
    micro_batch_size, num_microbatches, is_open = _batch(cells, degrees, seq_len)
    if software.updates_in_backward and num_microbatches > 1:
        cells.note("optimizer_in_backward does nothing to gradients that several microbatches add to")
    chunks, schedule = _schedule(cells, degrees, architecture, preset)
    sequence_parallel = _sequence_parallel(cells)
    zero_stage = _zero_stage(cells, preset)
    shard = _shard(cells, degrees, cluster)
    kind = (cells.text("tp_kind") or "1d").strip().lower()
    imbalance = cells.number("expert_imbalance")
    on_host = [cells.flag(name) or False for name in ("offload_optimizer", "offload_parameters")]
    if preset.offloads_together:
        on_host = [any(on_host)] * 2
    recompute, recompute_share = recomputation(cells, architecture.n_layers / (degrees.pipeline * chunks))
    asked = ("recompute", "recompute_method", "recompute_layers")
    if all(cells.text(name) is None for name in asked) and recomputes_unasked(cells, software):
        cells.note("no recompute: full is taken, which trainers of adapters on a quantised base do unasked")
        recompute = "full"
    expert, whole_experts = _expert(cells, architecture, degrees)
    software = dataclasses.replace(software, whole_experts=whole_experts)
    layout = Layout(
        data=degrees.data,
        tensor=degrees.tensor,
        pipeline=degrees.pipeline,
        context=degrees.context,
        expert=expert,
        zero_stage=zero_stage,
        shard=shard,
        chunks=chunks,
        schedule=schedule,
        tensor_kind=kind,
        tensor_depth=cells.whole("tp_depth") or 1,
        sequence_parallel=(degrees.tensor > 1 and kind == "1d")
        and (preset.sequence_parallel if sequence_parallel is None else sequence_parallel),
        context_kind=_context_kind(cells),
        micro_batch_size=micro_batch_size,
        num_microbatches=num_microbatches,
        recompute=recompute,
        recompute_share=recompute_share,
        offload_optimizer=on_host[0],
        offload_parameters=on_host[1],
        offload_activations=_offloaded_activations(cells, preset, recompute),
        **_zeropp(cells, degrees, shard, cluster.per_node),
        expert_imbalance=1.0 if imbalance is None else imbalance,
    )
    target_len = target_length(architecture, cells.whole("target_len"), seq_len)
    step = TrainingStep(layout=layout, seq_len=seq_len, software=software, target_len=target_len)
    return step, is_open


def _hybrid(text: str, usual: int, replicas: int) -> int:
    """Ranks of a group that shares: the second number of `HSDP (2x4)`, as torch's mesh has them, where both make all replicas."""
    grid = re.search(r"(\d+)\s*[x*\u00d7,]\s*(\d+)", text)
    return int(grid[2]) if grid is not None and int(grid[1]) * int(grid[2]) == replicas else usual


def _shard(cells: Cells, degrees: Degrees, cluster: Cluster) -> int | None:
    """Among how many ranks, where a row says it."""
    shard = cells.whole("shard")
    if degrees.context > 1 and shard == degrees.data * degrees.context:
        shard = None  # all, with those that share a sequence
    strategy = cells.text("strategy") or cells.text("zero_stage") or ""
    if shard is not None or not re.match("hybrid|hsdp", plain_word(strategy)):
        return shard
    return _hybrid(
        strategy, min(cells.whole("gpus_per_node") or cluster.per_node, degrees.data), degrees.data
    )


def _batch(cells: Cells, degrees: Degrees, seq_len: int) -> tuple[int, int, bool]:
    """Micro-batch size, number of microbatches, and whether the first is open."""
    size, count, total = (cells.whole(n) for n in ("micro_batch_size", "grad_accum", "global_batch_seqs"))
    tokens = cells.number("global_batch_tokens")
    if total is None and tokens is not None:
        total = max(1, round(_whole_sequences(tokens, seq_len) / seq_len))
    if total is None:
        if count is None:
            cells.note("no batch: one microbatch of each replica is taken")
        return size or 1, count or 1, size is None
    if total < degrees.data:
        raise UsageError(f"a global batch of {total} sequences is too small for {degrees.data} replicas.")
    if size is None and count is not None:
        size = -(-total // (degrees.data * count))
    if size is None:
        return 1, -(-total // degrees.data), True
    rounded = -(-total // (degrees.data * size))
    if rounded * degrees.data * size != total:
        cells.note(
            f"dp {degrees.data} x micro-batch {size} does not divide {total} sequences: {rounded} microbatches"
        )
    elif count is not None and count != rounded:
        cells.note(f"grad_accum {count} contradicts the global batch of {total}: {rounded} microbatches")
    return size, rounded, False


def _whole_sequences(tokens: float, seq_len: int) -> float:
    """A batch's tokens, binary where a round number is so one of whole sequences and else is not: 4M of 2048 each are 2^22."""
    if tokens % seq_len == 0:
        return tokens
    binary = (tokens * unit for unit in (1.024**2, 1.024))
    return next((each for each in binary if abs(each / seq_len - round(each / seq_len)) < 1e-9), tokens)


# A schedule's name that is not known: `V-Half`, `Seq1F1B`, `Hanayo (wave)`, `InterleavedZeroBubble`, `kFkB`.
_SOME_PIPELINE = re.compile(
    r"[\dk]f[\dk]b|f\db\d|bubble|\bzb|pipe|\bv[\s_-]|wave|hanayo|interleav|eager|async|vpp", re.IGNORECASE
)


def _schedule(cells: Cells, degrees: Degrees, architecture: Architecture, preset: Preset) -> tuple[int, str]:
    """Chunks a rank and the schedule's name."""
    text = cells.text("schedule")
    schedule = None
    if text is not None:
        schedule = schedule_name(text)
        if schedule is None and degrees.pipeline > 1 and text.lower() not in NO:
            if not _SOME_PIPELINE.search(text):
                raise UsageError(f"{text!r} is no known schedule; known are {', '.join(SCHEDULES)}.")
            cells.note(f"schedule {text!r} is not known: 1f1b is taken, interleaved where there are chunks")
    said = (cells.text("chunks") or "").lower()
    if said in _TICKS or said.startswith("interleaved"):  # that there are some
        schedule = "interleaved" if schedule in (None, "1f1b") else schedule
        chunks = None
    else:
        chunks = None if said in NO else cells.count("chunks")
    part = cells.whole("layers_per_virtual_stage")
    if chunks is None and part is not None and degrees.pipeline > 1:
        chunks = -(-architecture.n_layers // (degrees.pipeline * part))
    if chunks is None and schedule in ("interleaved", "breadth-first"):
        chunks = preset.chunks_of(-(-architecture.n_layers // degrees.pipeline))
    if chunks is None and schedule in V_SHAPED:
        chunks = 2
    if degrees.pipeline == 1:
        return 1, "1f1b"
    if schedule is None or (schedule == "1f1b" and chunks is not None and chunks > 1):
        schedule = "interleaved" if chunks is not None and chunks > 1 else "1f1b"
    return chunks or 1, schedule


def _zero_stage(cells: Cells, preset: Preset) -> int:
    text = cells.text("zero_stage")
    if text is not None:
        if text.lower() in NO:
            return 0
        if text.lower() in _TICKS:
            cells.note(f"zero_stage {text!r} says no stage: {preset.zero_stage or 1} is taken")
            return preset.zero_stage or 1
        number = re.fullmatch(
            r"(?:[0-3]\s*\+\s*)?[zZ]?([0-3])(?:\.0*)?(?:\s*[(+,/].*)?", text
        )  # `3 (offload)`, `1+2`
        stage = int(number.group(1)) if number is not None else _SHARDS.get(plain_word(text), stage_in(text))
        if stage is None or text.startswith("-"):
            raise UsageError(f"zero_stage is {text!r}; it is 0, 1, 2 or 3.")
        return stage
    if cells.text("strategy") is None:
        return preset.zero_stage
    stage = strategy_stage(cells)
    if stage is None:
        text = cells.text("strategy") or ""
        if find_preset(text) is None and not _NAMES_DEGREES.search(text):  # nor a trainer's name, nor degrees
            cells.note(f"strategy {cells.text('strategy')!r} is not understood")
        return preset.zero_stage
    return stage


def _zeropp(cells: Cells, degrees: Degrees, shard: int | None, per_node: int) -> ZeroPP:
    text, ranks = cells.text("zeropp"), cells.count("hpz_ranks")
    names = zeropp_names(
        None if text is not None and plain_word(text) in ("none", "no", "false", "off") else text
    )
    shard_ranks = (degrees.data if shard is None else shard) * degrees.context
    found = zeropp_fields(names, shard_ranks=shard_ranks, tensor=degrees.tensor, per_node=per_node)
    if ranks and (ranks > 1 or "hpz" in names):
        found["secondary_shard"] = ranks
    if found["quantized_weights"] or found["quantized_gradients"]:
        cells.note("qwZ and qgZ are lossy: what travels is rounded to 8 and 4 bits")
    return found


def _sequence_parallel(cells: Cells) -> bool | None:
    """Yes or no; some tables give the number of ranks that share a sequence so."""
    text = cells.text("sequence_parallel")
    if text is not None and text.isdigit() and int(text) > 1:
        return True
    word = plain_word(text or "")
    if word in ("sp", "megatron", "megatronsp", "tp", "tpsp"):
        return True
    if _is_of_attention(word):
        return False
    return cells.flag("sequence_parallel")


def _is_of_attention(word: str) -> bool:
    """A sequence parallelism whose ranks split all of each sequence: its kind, in the column that says whether norms do."""
    return re.search(r"ulysses|a2a|all2all|alltoall|ring|p2p|zigzag|stripe", word) is not None


def _context_kind(cells: Cells) -> str:
    text, beside = cells.text("context_kind"), plain_word(cells.text("sequence_parallel") or "")
    word = plain_word(text or "") or (beside if _is_of_attention(beside) else "ring")
    if re.search(r"ulysses|a2a|all2all|alltoall", word):
        return "ulysses"
    if re.search(r"ring|p2p|allgather|zigzag|stripe|megatron", word):
        return "ring"
    raise UsageError(f"context_kind is {text!r}; it is ring or ulysses.")


def _expert(cells: Cells, architecture: Architecture, degrees: Degrees) -> tuple[int, bool]:
    """Ranks among which experts are parted, and whether tensor-parallel ranks have experts of their own in place of parts of
    them (Megatron Core's expert_tensor_parallel_size of 1; Liu et al. 2025, arXiv:2504.14960): then ep / tp counts, for each
    rank holds as much. So it is where ep is more than there are replicas, too.
    """
    ranks = cells.whole("ep") or 1
    count = architecture.experts.num_experts if architecture.experts is not None else 1
    if count % ranks:
        raise UsageError(f"ep {ranks} does not divide {count} experts.")
    replicas, tensor = degrees.data * degrees.context, degrees.tensor
    parts = cells.whole("expert_tensor")
    if parts not in (None, 1, tensor):
        raise UsageError(f"expert_tensor is {parts}; it is 1 or tp, which is {tensor}.")
    is_folded = ranks % tensor == 0 and replicas % (ranks // tensor) == 0
    if parts == 1 and tensor > 1 and count > 1:
        if not is_folded:
            raise UsageError(f"ep {ranks} on {tensor} tensor-parallel ranks with whole experts is not known.")
        return ranks // tensor, True
    if replicas % ranks and is_folded:
        cells.note(f"ep {ranks} is more than {replicas} replicas: tensor-parallel ranks are among them")
        return ranks // tensor, tensor > 1
    return ranks, False


def _offloaded_activations(cells: Cells, preset: Preset, recompute: str) -> float:
    if cells.text("offload_activations") is None and recompute == "full" and preset.offloads_recomputed:
        return 1.0
    return _share(cells, "offload_activations")


def _share(cells: Cells, column: str) -> float:
    text = (cells.text(column) or "0").lower()
    if text in NO:
        return 0.0
    if text in YES or text in ("cpu", "host"):
        return 1.0
    try:
        value = float(text.rstrip("% ")) / (100.0 if text.endswith("%") else 1.0)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise UsageError(f"{column} is {text!r}; it is a share of 0 to 1.")
    return value
