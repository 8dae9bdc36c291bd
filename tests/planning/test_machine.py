"""What is known of a machine: measured before a data sheet's, and each called what it is."""

import pytest

from memadvisor.analyzers.segments import captured_step
from memadvisor.errors import UsageError
from memadvisor.hardware.hardware import Hardware, TierBandwidth
from memadvisor.hardware.load import named_hardware
from memadvisor.planning.advice_notes import rates_text
from memadvisor.planning.machine import machine_for
from memadvisor.schedule import Lane
from tests.make_run import make_run


def transfers(device, name, hardware=None):
    run = make_run(num_ranks=1, device=device, device_name=name)
    machine = machine_for(run, captured_step(run), 1, hardware)
    assert (machine.transfers is None) == (machine.paged_transfers is None)
    return machine.transfers


def measured(**tiers):
    return Hardware(
        name="this machine",
        kind="measured",
        source="a test",
        memory_bytes=None,
        memory_bandwidth_bytes_per_s=None,
        peak_flops_per_s={},
        **tiers,
    )


@pytest.mark.parametrize(
    ("name", "bytes_per_s", "words"),
    [
        ("NVIDIA H100 80GB HBM3", 64e9, "PCIe 5.0 x16, 64 GB/s each way"),
        ("NVIDIA A100-SXM4-80GB", 32e9, "PCIe 4.0 x16, 32 GB/s each way"),
    ],
)
def test_the_way_to_a_known_gpus_host_is_its_data_sheets_and_said_to_be(name, bytes_per_s, words):
    found = transfers("cuda:0", name)
    assert found.bandwidths == {
        Lane.HOST: TierBandwidth(read_bytes_per_s=bytes_per_s, write_bytes_per_s=bytes_per_s)
    }
    assert rates_text(found, to_host=True).startswith(f"a data sheet's rate ({words})")


def test_what_was_measured_comes_first_and_a_disk_beside_a_data_sheet_stays_measured():
    tier = TierBandwidth(read_bytes_per_s=2e9, write_bytes_per_s=1e9)
    found = transfers("cuda:0", "NVIDIA H100 80GB HBM3", measured(host=tier))
    assert found.bandwidths == {Lane.HOST: tier}
    assert rates_text(found, to_host=True) == "measured bandwidths (a test)"
    found = transfers("cuda:0", "NVIDIA H100 80GB HBM3", measured(disk=tier))
    assert found.bandwidths[Lane.DISK] == tier and found.bandwidths[Lane.HOST].read_bytes_per_s == 64e9
    assert rates_text(found, to_host=False) == "measured bandwidths (a test)"


def test_a_device_that_was_named_counts_in_place_of_the_runs_own():
    found = transfers("cuda:0", "NVIDIA H100 80GB HBM3", named_hardware("A100-SXM-80GB"))
    assert found.bandwidths[Lane.HOST].read_bytes_per_s == 32e9


@pytest.mark.parametrize(
    "device", [("cpu", "x86_64"), ("cpu", "NVIDIA H100 80GB HBM3"), ("cuda:0", "Paper GPU")]
)
def test_nothing_is_known_of_cpus_and_unknown_gpus(device):
    assert transfers(*device) is None


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("NVIDIA H100 80GB HBM3", " Or ask for layouts by data sheets: --gpus 8xH100-SXM-80GB."),
        ("Paper GPU", ""),
    ],
)
def test_ranks_whose_collectives_nobody_measured_are_sent_to_both_ways_on(name, way):
    run = make_run(num_ranks=1, device="cuda:0", device_name=name)
    with pytest.raises(UsageError) as caught:
        machine_for(run, captured_step(run), 8, None)
    assert caught.value.hint.endswith(f"and pass --hardware hardware.json.{way}")
