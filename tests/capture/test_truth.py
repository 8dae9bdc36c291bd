"""What the allocator's own account tells of a device's memory, wherever it is taken and let go."""

from types import SimpleNamespace

import pytest
import torch

from memadvisor.capture.truth import _STEP, AllocatorAccount, _memory_nodes, _outermost


def node(name, *children, size_bytes=0):
    return SimpleNamespace(name=name, children=children, size_bytes=size_bytes)


def test_our_own_span_is_no_operator():
    """Around a device's step lies a span of ours, and what is in it alone is in no operator."""
    freed, taken = node("[memory]", size_bytes=-8), node("[memory]", size_bytes=8)
    roots = [node(_STEP, freed, node("aten::add", taken)), node("[memory]", size_bytes=-4)]
    told = {memory.size_bytes: operator for memory, operator, _ in _memory_nodes(_outermost(roots))}

    assert told == {-8: "", 8: "aten::add", -4: ""}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("names_operators", [True, False])
def test_what_python_frees_on_a_device_is_seen(names_operators):
    """torch's tree of events leaves out a device's memory that is freed outside of every operator."""
    device = torch.device("cuda", torch.cuda.current_device())
    before, other = (torch.zeros(1000, device=device) for _ in range(2))
    addresses = {tensor.data_ptr() for tensor in (before, other)}
    allocated_bytes = torch.cuda.memory_allocated(device)
    account = AllocatorAccount(device, names_operators=names_operators)
    del before
    made = other + 1
    addresses.add(made.data_ptr())
    del other, made
    events = account.stop()

    assert {event.address for event in events if event.delta_bytes < 0} == addresses
    for event in events:
        allocated_bytes += event.delta_bytes
        assert event.allocated_bytes == allocated_bytes
