"""From a trace's logs to the journal's rows of operators, module calls and collectives."""

from __future__ import annotations

from memadvisor.capture.clock import seconds_of
from memadvisor.capture.collective_call import Mark
from memadvisor.capture.label_log import OperatorCall
from memadvisor.capture.tracer import Trace
from memadvisor.run.records import CallTensor, Collective, ModuleCall, Operator, OperatorRead


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
            shapes=call.shapes or None,
            read_bytes=call.read_bytes,
            written_bytes=call.written_bytes,
            changes=_changed_storage(trace, call),
            is_random=call.is_random,
            operator_id=number,
            node=call.node,
        )
        for number, call in enumerate(trace.calls)
    ]


def operator_read_rows(trace: Trace) -> list[OperatorRead]:
    """Which storages each operator was given."""
    given_at = trace.account.given_at
    return [
        OperatorRead(number, storage_id)
        for number, call in enumerate(trace.calls)
        for address in call.inputs
        if (storage_id := given_at(address, call.start_ns)) is not None
    ]


def _changed_storage(trace: Trace, call: OperatorCall) -> int | None:
    """What an operator in place writes into: by torch's rule of names its first argument."""
    if not call.name.endswith("_") or not call.inputs:
        return None
    return trace.account.storage_at(call.inputs[0], call.end_ns)


def module_call_rows(trace: Trace) -> tuple[list[ModuleCall], list[CallTensor]]:
    """Calls that have ended, and the storages that went in and came out."""
    calls, tensors = [], []
    for number, call in enumerate(call for call in trace.module_calls if call.end_ns is not None):
        end_ns = call.end_ns or call.start_ns
        calls.append(
            ModuleCall(
                call_id=number,
                module=call.info.name,
                unit=call.info.unit,
                phase=call.phase,
                micro_batch=call.micro_batch,
                start_s=(call.start_ns + trace.offset_ns) / 1e9,
                end_s=(end_ns + trace.offset_ns) / 1e9,
                takes_last=call.takes_last,
                is_transformed=call.is_transformed,
            )
        )
        found: list[tuple[int | None, str, bool, bool | None]] = [
            (*_input(trace, address, call.start_ns, end_ns), is_changed, needs_gradient)
            for address, is_changed, needs_gradient in call.inputs
        ]
        found += [
            (trace.account.storage_at(address, end_ns), role, False, None)
            for role, addresses in (("output", call.outputs), ("cache", call.cached))
            for address in addresses
        ]
        tensors += [
            CallTensor(number, storage_id, role, is_changed, needs_gradient)
            for storage_id, role, is_changed, needs_gradient in found
            if storage_id is not None
        ]
    return calls, tensors


def _input(trace: Trace, address: int, start_ns: int, end_ns: int) -> tuple[int | None, str]:
    """What a call was given, which was there when it ended, and its role: it may have come when the call had begun."""
    given = trace.account.storage_at(address, end_ns)
    return given, "input" if given == trace.account.storage_at(address, start_ns) else "late_input"


def collective_rows(trace: Trace, step: int) -> list[Collective]:
    """An end that the device has not come to is not recorded."""

    def seconds(time_ns: int | None) -> float | None:
        return None if time_ns is None else (time_ns + trace.offset_ns) / 1e9

    def passed(mark: Mark | None) -> float | None:
        return None if mark is None else seconds_of(mark)

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
            asynchronous=call.asynchronous,
            issue_s=(call.issue_ns + trace.offset_ns) / 1e9,
            end_s=passed(call.end_mark) if call.is_on_device else seconds(call.end_ns),
            wait_start_s=seconds(call.wait_start_ns),
            wait_end_s=seconds(call.wait_end_ns),
            module=call.module,
            peer=call.peer,
            tag=call.tag,
            device_start_s=passed(call.start_mark),
        )
        for call in trace.collectives
    ]
