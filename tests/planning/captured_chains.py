"""Captured models made by hand: chains of units that each take and hold the same."""

from memadvisor.cost.captured_units import CapturedModel, CapturedUnit, Pass


def a_unit(
    name, *, forward_s=0.01, flops=10**9, moved_bytes=10**6, cut_bytes=1000, elements=1000, saved_bytes=10**6
):
    return CapturedUnit(
        name=name,
        forward=Pass(seconds=forward_s, flops=flops, moved_bytes=moved_bytes, num_operators=10),
        backward=Pass(seconds=2 * forward_s, flops=2 * flops, moved_bytes=2 * moved_bytes, num_operators=20),
        recompute_s=forward_s,
        elements=elements,
        optimizer_bytes=8 * elements,
        saved_bytes=saved_bytes,
        again_bytes=saved_bytes // 2,
        working_bytes=saved_bytes // 10,
        cut_bytes=cut_bytes,
        no_cut="" if cut_bytes is not None else "it is the last unit",
    )


def a_model(*units, **changes):
    values = {
        "units": units,
        "device_name": "this machine",
        "on_cpu": True,
        "dtype": "float32",
        "parameter_bytes": 4,
        "micro_batch_size": 4,
        "num_micro_batches": 1,
        "batch_samples": 4,
        "optimizer_s": 0.004,
        "outside_s": 0.001,
        "step_time_s": 1.0,
        "other_bytes": 0,
        "model_flops": 1e9,
        **changes,
    }
    return CapturedModel(**values)


def a_chain(number):
    last = a_unit(f"unit {number - 1}", cut_bytes=None)
    return a_model(*(a_unit(f"unit {place}") for place in range(number - 1)), last)
