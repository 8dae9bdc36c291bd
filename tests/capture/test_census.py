"""What is alive at a boundary is found behind every kind of tensor."""

import pytest
import torch

from memadvisor.capture.census import residents


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc])
def test_a_sparse_tensors_values_and_places_are_alive(layout):
    """A graph's adjacency that a script made before its steps was unexplained: it has no storage of its own."""
    matrix = torch.eye(1000).to_sparse(layout=layout)
    values = matrix._values() if layout is torch.sparse_coo else matrix.values()
    found = {row.address: row for row in residents((), torch.device("cpu"))}
    other = {row.address for row in residents([(matrix, "parameter", "a")], torch.device("cpu")) if row.unit}

    assert found[values.untyped_storage().data_ptr()].size_bytes == 4000
    assert len(other) == (2 if layout is torch.sparse_coo else 3)
