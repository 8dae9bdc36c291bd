"""In which dtypes a plan has parameters computed with, gradients summed, and what the optimizer updates kept."""

from __future__ import annotations

from dataclasses import dataclass

from memadvisor.errors import PlanError

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}  # of the dtypes that a precision may name


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """What parameters that are float32 in the script are computed with, and their gradients summed in.

    `param_dtype`: what modules see in a forward, and what gathers carry. `reduce_dtype`: what the gradients
    of the ranks are added up in, and what reductions carry. None: float32, as without a plan. What the
    optimizer keeps and updates of them is float32 in any case. Parameters of other dtypes keep theirs.

    `optimizer_dtype` float32 is for trainable parameters that are bfloat16 or float16 in the script: of them each rank
    has a shard of float32 masters, which the optimizer keeps its state for and updates; modules see them rounded.
    """

    param_dtype: str | None = None
    reduce_dtype: str | None = None
    optimizer_dtype: str | None = None

    @property
    def is_lossy(self) -> bool:
        """Whether anything is rounded that float32 would keep."""
        return {self.param_dtype, self.reduce_dtype} - {None, "float32"} != set()

    @property
    def has_masters(self) -> bool:
        """Whether anything is kept that the script would round."""
        return self.optimizer_dtype is not None

    def of_parameter(self, dtype: str) -> str:
        """The dtype of gathered copies of a parameter that is `dtype` in the script."""
        return self.param_dtype or dtype if dtype == "float32" else dtype

    def of_reduction(self, dtype: str) -> str:
        """The dtype in which the gradient of such a parameter is summed, where it becomes shards."""
        return self.reduce_dtype or dtype if dtype == "float32" else dtype

    def sums_as_made(self, dtype: str) -> bool:
        """Whether the gradient of such a parameter is summed in the dtype in which autograd makes it."""
        return self.of_parameter(dtype) == self.of_reduction(dtype)

    def of_optimizer(self, dtype: str) -> str:
        """The dtype in which the optimizer updates such a parameter, if it is trainable."""
        return self.optimizer_dtype or dtype if dtype in ("bfloat16", "float16") else dtype

    @property
    def least_stage(self) -> int:
        """The lowest ZeRO stage that every unit must have."""
        if self.param_dtype not in (None, "float32"):
            return 3
        return 2 if self.reduce_dtype not in (None, "float32") else int(self.has_masters)


def precision_text(precision: Precision) -> str:
    """Another precision in a few words that follow others, after a comma: `, computes in bfloat16`; else nothing."""
    rounded = "".join(
        f", {what} in {dtype}"
        for what, dtype in (("computes", precision.param_dtype), ("sums", precision.reduce_dtype))
        if dtype is not None and precision.is_lossy
    )
    return rounded + (f", updates in {precision.optimizer_dtype}" if precision.has_masters else "")


def loss_text(precision: Precision) -> str:
    """What a lossy precision rounds, in words."""
    return (
        f"modules compute in {precision.param_dtype or 'float32'}, gradients are summed over the ranks in "
        f"{precision.reduce_dtype or 'float32'}; what the optimizer keeps stays float32. Losses will differ "
        "from those without it."
    )


def masters_text(precision: Precision) -> str:
    """What an optimizer dtype changes, in words."""
    return (
        f"parameters that are bfloat16 or float16 are updated in {precision.optimizer_dtype} masters, of which "
        "each rank keeps its share. Losses will differ from those without it."
    )


def bytes_in(size_bytes: int, dtype: str, other: str) -> int:
    """Bytes of what takes `size_bytes` in one dtype, in another that a precision makes of it."""
    return size_bytes if dtype == other else size_bytes // ITEM_BYTES[dtype] * ITEM_BYTES[other]


FULL_PRECISION = Precision()


def check_precision(precision: Precision, num_ranks: int, stages: set[int], source: str) -> None:
    """Raise PlanError, naming `source`: a parameter dtype needs parameters in shards, one of sums gradients that become
    shards, one of the optimizer shards of its state."""
    least = {"param_dtype": 3, "reduce_dtype": 2, "optimizer_dtype": 1}
    for field, stage in least.items():
        dtype = getattr(precision, field)
        if dtype is None:
            continue
        if dtype not in ITEM_BYTES:
            raise PlanError(f"{source} has {field} {dtype!r}.", hint=f"use {', '.join(ITEM_BYTES)}.")
        if field == "optimizer_dtype" and dtype != "float32":
            raise PlanError(f"{source} has {field} {dtype!r}.", hint="use float32, or leave it out.")
        found = 0 if num_ranks == 1 else min(stages)
        if (dtype != "float32" or field == "optimizer_dtype") and found < stage:
            where = "one rank" if num_ranks == 1 else f"ZeRO stage {found}"
            instead = "; with 1 or 2, have the script make its model narrow, and add --optimizer-dtype fp32"
            instead = instead if field == "param_dtype" and found else ""
            raise PlanError(
                f"{source} has {field} {dtype} with {where}.",
                hint=f"it needs several ranks and stage {('1, 2 or 3', '2 or 3', '3')[stage - 1]} for every unit{instead}.",
            )
