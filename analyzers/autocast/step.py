"""The recorded rank as it would be with its models' forwards under autocast to bfloat16 (memadvisor/autocast.py).

The traced step tells which storages each operator was given and has made, and which node of the backward is whose. So
dtypes are worked out from one operator to the next by torch's rules (rules.py): operands of products are copies in
bfloat16, of a weight one copy until the forward ends, and autograd keeps these; what is made of bfloat16 alone is
bfloat16; a gradient has the dtype of what it is of, and is cast where its node computed it in the other.

What the script itself converts to float32, which is float32 anyway, and where it switches autocast off, the run tells
(script_casts.py). Evaluations of models that train are forwards like others.

What matrix products in bfloat16 allocate for themselves on a CPU is there as far as somebody has measured it (products.py).
Not known, and not in it: how long anything takes in bfloat16.
"""

from __future__ import annotations

from memadvisor.analyzers.autocast.backward import Backwards
from memadvisor.analyzers.autocast.convolutions import add_convolutions
from memadvisor.analyzers.autocast.forward import Forwards
from memadvisor.analyzers.autocast.graph import Call, StepGraph
from memadvisor.analyzers.autocast.operands import operand_shape
from memadvisor.analyzers.autocast.products import add_workspaces
from memadvisor.analyzers.autocast.recasting import WIDE, Recasting
from memadvisor.analyzers.autocast.rules import has_wide_operand_inside, has_wide_result_inside, is_recurrent
from memadvisor.analyzers.derivatives import differentiated_backwards
from memadvisor.analyzers.inner_workspaces import INSIDE
from memadvisor.analyzers.weight_casts import is_weight_cast
from memadvisor.autocast import WorkspacesOf
from memadvisor.errors import UsageError
from memadvisor.run.records import Storage
from memadvisor.run.run import RankRun

# And their backwards; transposed ones have theirs inside of the second.
_WITH_COPIES = ("aten::convolution", "aten::_convolution", "aten::mkldnn_convolution")


def required_autocast(rank: RankRun, workspaces_of: WorkspacesOf | None = None) -> RankRun:
    """Raises UsageError where the script computes in bfloat16 already, or nobody can say what would change."""
    why = why_not(rank)
    if why is not None:
        raise UsageError(f"--autocast: {why[0]}", hint=why[1])
    return under_autocast(rank, workspaces_of)


def why_not(rank: RankRun) -> tuple[str, str] | None:
    """Why nothing is predicted of it, and what to do; None where it is."""
    if any(row.dtype in ("bfloat16", "float16") for row in rank.parameters) or any(
        is_weight_cast(row, rank.parameters) for row in rank.storages
    ):
        return "this training is in 16 bits already.", "leave it out."
    if not any(row.dtype == WIDE for row in rank.parameters):
        return f"no parameter of this training is {WIDE}.", "leave it out."
    if not rank.operator_reads:
        return "this run does not tell what its operators read.", "profile the script again."
    if any(is_recurrent(row.name) for row in rank.operators):
        return (
            "what torch's recurrent layers allocate in 16 bits is not known.",
            "leave it out; `run --autocast bf16` measures it.",
        )
    if differentiated_backwards(rank):
        return (
            "this loss is made of a derivative, and what autocast makes of that is not predicted.",
            "leave it out; `run --autocast bf16` measures it.",
        )
    return None


def under_autocast(rank: RankRun, workspaces_of: WorkspacesOf | None = None) -> RankRun:
    """`workspaces_of`: of products and convolutions on this run's device."""
    graph, recasting = StepGraph(rank), Recasting(rank)
    forwards = Forwards(rank, graph, recasting)
    Backwards(graph, forwards, recasting)
    for row in rank.storages:
        if row.operator.startswith(INSIDE) and _is_copy_of_narrow(row, graph, recasting):
            recasting.halved.add(row.storage_id)
    device_type = rank.process.device.partition(":")[0]
    for call in graph.calls:
        _add_inner_copy(call, device_type, recasting)
    if workspaces_of is not None and device_type == "cpu":
        add_workspaces(forwards, recasting, workspaces_of)
        add_convolutions(rank, forwards, recasting, workspaces_of)
    return recasting.done()


def _add_inner_copy(call: Call, device_type: str, recasting: Recasting) -> None:
    """What an operator has for itself in float32, and only of bfloat16."""
    name, row = call.row.name, None
    if has_wide_operand_inside(name, device_type):
        row = next(iter(call.reads), None)
    elif has_wide_result_inside(name, device_type):
        row = call.result
    if row is not None and row.storage_id in recasting.narrow:
        shape = operand_shape(call, row, ()) if row in call.reads else ""
        recasting.add(row, WIDE, row, birth_s=call.row.start_s, death_s=call.row.end_s, shape=shape)


def _is_copy_of_narrow(row: Storage, graph: StepGraph, recasting: Recasting) -> bool:
    """Whether an operator has it for itself as a copy of what is bfloat16 now: it is as large as that, or a convolution's on a
    CPU, in a layout of its own."""
    if row.device == "cpu" and row.operator.removeprefix(INSIDE).startswith(_WITH_COPIES):
        return True
    call = graph.running_at(row.birth_s)
    return call is not None and any(
        one.storage_id in recasting.narrow and one.size_bytes == row.size_bytes for one in call.reads
    )
