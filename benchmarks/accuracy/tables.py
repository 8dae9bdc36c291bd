"""Published tables -> one frame each, with what was measured, what is predicted, and what the null baseline says.

Columns of a frame: `measured_s`, `predicted_s`, `null_s`, `measured_bytes`, `predicted_bytes`, `null_bytes`, `p_oom`,
`fits`, `ran`, `error` (why a row has no prediction), the shape (`model n_layers hidden ffn vocab seq_len n_gpus dp tp pp
cp micro_batch_size global_batch_seqs recompute`), the table's own columns that are not among those, and `bubble_share`.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd

from benchmarks.accuracy.scores import null_bytes, null_seconds
from memadvisor.cost.layouts.estimate import StepEstimate
from memadvisor.layout_table.read import LayoutCase, LayoutRow, read_layout_table, read_table
from memadvisor.planning.predict_layouts import RowPrediction, predict_row


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A table of measured steps. `seconds`, `num_bytes`: what was measured, from the table's own columns; None where it
    was not. `memory`: the predicted figure that its authors' counter means. `time_target`, `memory_target`: MAPE to reach.
    `beside`: columns of all rows that the table lacks and its authors' own scripts have.
    """

    name: str
    source: str
    note: str
    seconds: Callable[[pd.DataFrame], pd.Series]
    num_bytes: Callable[[pd.DataFrame], pd.Series] | None = None
    memory: Callable[[StepEstimate], float] = lambda estimate: estimate.peak_memory_bytes
    time_target: float | None = None
    memory_target: float | None = None
    group: str = "model"
    beside: Mapping[str, str] = field(default_factory=dict)


def published_rows(directory: Path, published: Published) -> list[LayoutRow]:
    """The rows of its file, with what is known beside it."""
    path = directory / f"{published.name}.csv"
    beside = published.beside
    if not beside:
        return read_layout_table(path).rows
    with path.open(encoding="utf-8", newline="") as file:
        header, *lines = csv.reader(file)
    return read_table([[*header, *beside], *([*line, *beside.values()] for line in lines)], str(path)).rows


def _none(table: pd.DataFrame) -> pd.Series:
    return pd.Series(float("nan"), index=table.index)


def _pipeline_seconds(table: pd.DataFrame) -> pd.Series:
    """Samples of a step over samples a second of all its accelerators."""
    return table.micro_batch_size * table.n_microbatches / (table.samples_per_gpu_per_s * table.pp_gpus)


TABLES = (
    Published(
        name="layout_sweep_h100",
        source="nanotron's sweep of layouts on H100, the ultra-scale playbook "
        "(huggingface.co/spaces/nanotron/ultrascale-playbook, fragments/benchmarks_interactive.html)",
        note="1B to 80B, 8 to 512 H100, sequence 4096, 1 M tokens a step. Failures mix out-of-memory, crashes and time-outs; "
        "whether memory is allocated or reserved is not stated (it is compared with the reserved peak).",
        seconds=lambda table: table.step_time_s.where(table.status == "ok"),
        num_bytes=lambda table: (table.gpu_memory_gb * 1e9).where((table.status == "ok") & table.step_time_s.notna()),
        memory_target=0.12,
    ),
    Published(
        name="iteration_time_a100",
        source="vTrain (arXiv:2312.12391; github.com/VIA-Research/vTrain, data/ground_truth_single.csv)",
        note="Megatron-DeepSpeed on 2 to 8 A100, full recomputation. The vocabulary is not in the table: GPT-2's is taken.",
        seconds=lambda table: table.iter_time_ms / 1e3,
        time_target=0.15,
        group="tp",
    ),
    Published(
        name="fsdp_throughput_a100",
        source="MosaicML (github.com/mosaicml/llm-foundry, scripts/train/benchmarking/README.md)",
        note="FSDP of MPT 125M to 70B on A100, sequence 512 to 65k, 8 to 128 accelerators.",
        seconds=lambda table: table.step_time_s,
        time_target=0.12,
    ),
    Published(
        name="megatron_scaling_a100",
        source="Narayanan et al. 2021 (arXiv:2104.04473), table 1",
        note="1.7B to 1T on 32 to 3072 A100. The micro-batch size is not given: the fastest that fits, by the prediction, is "
        "taken. Step times are derived from the published FLOP/s.",
        seconds=lambda table: table.step_time_s_derived,
        time_target=0.10,
        group="tp",
    ),
    Published(
        name="recompute_time_a100",
        source="Korthikanti et al. 2022 (arXiv:2205.05198), tables 3 and 5, section 6.3",
        note="Full recomputation against selective with sequence parallelism, 22B to 1T on 8 to 2240 A100.",
        seconds=lambda table: table.iter_time_s,
        time_target=0.10,
        group="recompute",
    ),
    Published(
        name="pipeline_schedules",
        source="Qi et al. 2023 (arXiv:2401.10241), tables 3, 4 and 5",
        note="1F1B, interleaved 1F1B, ZB-1p and ZB-2p on 8 to 32 A100; memory is in whole GB; bubble shares are the authors', "
        "computed from profiled times. ZB-H1 and ZB-H2 have a bubble share alone. The vocabulary, which is not given, is the 32,004 "
        "words (padded) of the tokenizer in the authors' scripts (github.com/sail-sg/zero-bubble-pipeline-parallelism): the sizes in "
        "the models' names leave 24,000 to 33,000, and GPT-2's words would make them 6.3B, 14.7B and 28.4B.",
        seconds=_pipeline_seconds,
        num_bytes=lambda table: table.memory_gb * 1e9,
        memory=lambda estimate: estimate.worst.allocated_bytes,
        time_target=0.10,
        memory_target=0.05,
        group="schedule",
        beside={"vocab": "32128"},
    ),
    Published(
        name="offload_ratio_memory",
        source="Yuan et al., ATC 2024, figure 7 (github.com/kwai/Megatron-Kwai, examples/atc24/README.md)",
        note="Llama-65B on 256 H800, exact max_memory_allocated against the share of activations on the host; compared with the "
        "tensors of the worst stage.",
        seconds=_none,
        num_bytes=lambda table: table.max_memory_allocated_bytes,
        memory=lambda estimate: estimate.worst.allocated_bytes,
        memory_target=0.08,
        group="ckpt",
    ),
)  # fmt: skip


# Decisions are those of the table, also where a batch that does not divide was rounded for the prediction.
_AS_PUBLISHED = ("model", "n_gpus", "seq_len", "dp", "pp", "global_batch_seqs", "micro_batch_size")


def score_table(directory: Path, published: Published) -> pd.DataFrame:
    """Read, predict, and lay both side by side."""
    table = pd.read_csv(directory / f"{published.name}.csv")
    rows = published_rows(directory, published)
    predictions = [predict_row(row) for row in rows]
    frame = pd.DataFrame([_predicted(each, published) for each in predictions])
    shapes = pd.DataFrame([_shape(row.case, each) for row, each in zip(rows, predictions, strict=True)])
    for column in _AS_PUBLISHED:
        if column in table:
            shapes[column] = table[column]
    own = table[[column for column in table if column not in shapes]]
    frame = pd.concat([frame, shapes, own], axis=1)
    frame["measured_s"] = published.seconds(table)
    frame["measured_bytes"] = _none(table) if published.num_bytes is None else published.num_bytes(table)
    frame["ran"] = table.status.eq("ok") if "status" in table else True
    frame["null_s"] = null_seconds(frame)
    frame["null_bytes"] = null_bytes(frame)
    return frame


def _predicted(row: RowPrediction, published: Published) -> dict[str, object]:
    if row.prediction is None:
        nothing = dict.fromkeys(("predicted_s", "predicted_bytes", "bubble_share", "p_oom"), float("nan"))
        return {**nothing, "fits": False, "error": row.error}
    estimate = row.prediction.estimate
    bubble_s = estimate.time_s["pipeline_bubble"]
    after_s = estimate.time_s["gradients_and_parameters"] + estimate.time_s["optimizer"]
    return {
        "predicted_s": estimate.step_time_s,
        "predicted_bytes": published.memory(estimate),
        "bubble_share": bubble_s / (estimate.step_time_s - after_s),
        "p_oom": estimate.p_oom,
        "fits": estimate.fits,
        "error": None,
    }


def _shape(case: LayoutCase | None, row: RowPrediction) -> dict[str, object]:
    """What the null baseline counts with; of a block of two matrices `ffn` is two thirds, for it takes three."""
    if case is None:
        return {}
    model = case.architecture
    step = case.step if row.prediction is None else row.prediction.step
    layout = step.layout
    return {
        "model": model.name,
        "n_layers": model.n_layers,
        "hidden": model.hidden,
        "ffn": model.ffn * (1 if model.gated_mlp else 2 / 3),
        "vocab": model.vocab,
        "seq_len": step.seq_len,
        "n_gpus": layout.num_ranks,
        "dp": layout.data,
        "tp": layout.tensor,
        "pp": layout.pipeline,
        "cp": layout.context,
        "micro_batch_size": layout.micro_batch_size,
        "global_batch_seqs": step.global_batch_sequences,
        "recompute": layout.recompute,
    }
