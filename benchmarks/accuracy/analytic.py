"""Tables of ZeRO and of selective recomputation that follow from formulas: the model must give them exactly."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd

from memadvisor.architectures.load import load_architecture
from memadvisor.cost.layouts.coefficients import FITTED
from memadvisor.cost.layouts.estimate import estimate_step
from memadvisor.cost.layouts.memory import StageContents, StageMemory, stage_memory, stage_parameters
from memadvisor.layout import Layout, TrainingStep
from memadvisor.layout_table.read import LayoutCase, read_layout_table
from memadvisor.software import DEEPSPEED

_STAGES = {1: "p_os", 2: "p_os_g", 3: "p_os_g_p"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One published figure beside the predicted one; `rounding` is one unit of its last digit."""

    what: str
    published: float
    predicted: float
    rounding: float

    @property
    def is_exact(self) -> bool:
        """The published figure is the predicted one rounded, to nearest or down (the paper does both)."""
        return abs(self.predicted - self.published) < self.rounding


def bytes_per_parameter(zero_stage: int, data: int) -> float:
    """Model states of one rank over the parameters of the model, by the cost model, of a model that stands for all."""
    model = load_architecture("gpt3-175b")
    contents = StageContents(layers=tuple(range(model.n_layers)), embeddings=1, heads=1)
    layout = Layout(data=data, zero_stage=zero_stage)
    step = TrainingStep(layout=layout, seq_len=1024, software=DEEPSPEED.software)
    memory: StageMemory = stage_memory(model, step, contents, 0.0, FITTED)
    states = memory.parameter_bytes + memory.gradient_bytes + memory.optimizer_bytes
    return states / stage_parameters(model, step, contents).all


def zero_states(directory: Path) -> list[Cell]:
    """GB of model states by ZeRO stage (arXiv:1910.02054, table 1)."""
    table = pd.read_csv(directory / "zero_model_states.csv", dtype=str)
    return [
        _cell(
            f"{row.params_b}B, {row.dp} replicas, stage {stage}",
            getattr(row, f"{column}_gb"),
            float(row.params_b) * bytes_per_parameter(stage, int(row.dp)),
        )
        for row in table.itertuples()
        for stage, column in _STAGES.items()
    ]


def zero_largest(directory: Path, memory_gb: float = 32.0) -> list[Cell]:
    """Billions of parameters whose states fill a V100 (arXiv:1910.02054, table 2, left): `mp` ranks share each replica.

    The paper rounds its first row and multiplies that by `mp`, so a unit of the last digit is `mp` times the first row's.
    """
    table = pd.read_csv(directory / "zero_max_model.csv", dtype=str)
    columns = {0: "baseline_b", 1: "pos_b", 2: "posg_b", 3: "posgp_b"}
    return [
        Cell(
            what=f"{row.n_gpus} V100, model parallel {row.mp}, stage {stage}",
            published=float(getattr(row, column)),
            predicted=int(row.mp) * memory_gb / bytes_per_parameter(stage, int(row.n_gpus) // int(row.mp)),
            rounding=int(row.mp) * (0.1 if stage in (1, 2) else 1.0),
        )
        for row in table.itertuples()
        for stage, column in columns.items()
    ]


def recompute_cells(directory: Path) -> list[Cell]:
    """Activations and states of the first stage (arXiv:2205.05198, figures 1 and 7), shapes from the times' table. Percentages
    are of tensor parallelism alone. They were read off figures, so `rounding` is a hundredth of each.
    """
    table = pd.read_csv(directory / "recompute_memory.csv", dtype={"model": str})
    shapes: dict[str, LayoutCase] = {}
    for row in read_layout_table(directory / "recompute_time_a100.csv").rows:
        if row.case is not None:
            shapes.setdefault(row.case.architecture.name, row.case)
    cells = []
    for row in table.itertuples():
        case = shapes[str(row.model)]
        plain = _first_stage(case, "none", False)
        variants = {
            "act_pct_seq": ("none", True),
            "act_pct_sel": ("selective", False),
            "act_pct_seqsel": ("selective", True),
            "act_pct_full": ("full", False),
        }
        states = plain.parameter_bytes + plain.optimizer_bytes + plain.gradient_bytes
        both = _first_stage(case, "selective", True)
        for what, published, predicted in (
            ("parameters, gradients and optimizer, GiB", row.params_opt_gib, states / 2**30),
            ("activations, tensor parallel, GiB", row.act_none_gib, plain.activation_bytes / 2**30),
            ("activations, sequence + selective, GiB", row.act_seq_sel_gib, both.activation_bytes / 2**30),
        ):
            cells.append(
                Cell(
                    what=f"{row.model}: {what}",
                    published=published,
                    predicted=predicted,
                    rounding=0.01 * published,
                )
            )
        for column, (recompute, parallel) in variants.items():
            share = 100 * _first_stage(case, recompute, parallel).activation_bytes / plain.activation_bytes
            cells.append(
                Cell(
                    what=f"{row.model}: {column}",
                    published=getattr(row, column),
                    predicted=share,
                    rounding=0.01 * getattr(row, column),
                )
            )
    return cells


def _first_stage(case: LayoutCase, recompute: str, sequence_parallel: bool) -> StageMemory:
    layout = replace(case.step.layout, recompute=recompute, sequence_parallel=sequence_parallel)
    step = replace(case.step, layout=layout)
    return estimate_step(case.architecture, step, case.cluster).first


def _cell(what: str, published: str, predicted: float) -> Cell:
    decimals = len(published.partition(".")[2]) if not published.endswith(".0") else 0
    return Cell(what=what, published=float(published), predicted=predicted, rounding=math.pow(10, -decimals))
