"""The lines of `memadvisor show` about the CUDA allocator."""

import io
import json

from rich.console import Console

from memadvisor.analyzers.analysis import analysis_to_json, analyze
from memadvisor.analyzers.fragmentation import Fragmentation
from memadvisor.cli.summary_allocator import allocator
from memadvisor.cost.allocator_settings import MIB
from tests.cuda_run import cuda_run
from tests.make_run import make_run


def shown(found):
    console = Console(file=io.StringIO(), width=160)
    console.print(allocator(found))
    return console.file.getvalue()


def test_measured_predicted_and_unrecorded_are_told_apart():
    text = shown(analyze(cuda_run()).ranks[0].fragmentation)

    assert "60.0 MiB  at most, for 50.0 MiB allocated and 52.0 MiB active at most" in text
    assert (
        "24.0 MiB are reserved but not allocated: 12.0 MiB inside segments in use, 10.0 MiB in free" in text
    )
    assert "12.0 MiB free of 20.0 MiB (large), pinned by " in text
    assert "outside the allocator (CUDA context, NCCL): not recorded" in text
    assert "predicted by replay: " in text and "% of measured)" in text


def test_a_cpu_run_is_predicted_for_a_cuda_device():
    found = Fragmentation(
        settings="",
        measured=None,
        predicted_allocated_bytes=100 * MIB,
        predicted_reserved_bytes=160 * MIB,
        is_for_other_device=True,
    )
    assert found.is_worth_showing
    assert "may be larger than what is asked for: 160 MiB reserved for 100 MiB allocated" in " ".join(
        shown(found).split()
    )


def test_json_has_the_keys_where_they_are_known_and_where_not():
    cuda = json.loads(json.dumps(analysis_to_json(analyze(cuda_run()))))["ranks"][0]["allocator"]
    cpu = json.loads(json.dumps(analysis_to_json(analyze(make_run(num_ranks=1)))))["ranks"][0]["allocator"]

    assert cuda["measured"]["fragmentation_bytes"] == 24 * MIB
    assert cuda["measured"]["segments"][0]["pinned_by"][0]["size_bytes"] > 0
    assert cpu["measured"] is None and cpu["predicted_reserved_bytes"] > 0
    assert cuda.keys() == cpu.keys()
