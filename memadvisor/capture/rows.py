"""From a trace's logs to the journal's operator and collective rows."""

from __future__ import annotations

from memadvisor.capture.tracer import Trace
from memadvisor.run.records import Collective, Operator


def operator_rows(trace: Trace) -> list[Operator]:
    """One row an operator; what is recomputed in the backward is executed, but the model does not need it."""
    offset_ns = trace.offset_ns
    return [
        Operator(
            name=call.name,
            module=call.place.module,
            unit=call.place.unit,
            phase=call.place.phase,
            start_s=(call.start_ns + offset_ns) / 1e9,
            end_s=(call.end_ns + offset_ns) / 1e9,
            executed_flops=call.executed_flops,
            model_flops=0 if call.place.phase == "recompute" else call.model_flops,
        )
        for call in trace.calls
    ]


def collective_rows(trace: Trace, step: int) -> list[Collective]:
    def seconds(time_ns: int | None) -> float | None:
        return None if time_ns is None else (time_ns + trace.offset_ns) / 1e9

    return [
        Collective(
            step=step,
            operation=call.operation,
            group=call.group,
            group_size=call.group_size,
            sequence=call.sequence,
            size_bytes=call.size_bytes,
            dtype=call.dtype,
            phase=call.phase,
            unit=call.unit,
            asynchronous=call.wait_start_ns is None or call.wait_start_ns - call.issue_ns > 1_000_000,
            issue_s=(call.issue_ns + trace.offset_ns) / 1e9,
            end_s=seconds(call.end_ns),
            wait_start_s=seconds(call.wait_start_ns),
            wait_end_s=seconds(call.wait_end_ns),
        )
        for call in trace.collectives
    ]
