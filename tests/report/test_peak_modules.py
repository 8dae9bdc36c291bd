"""Whose tile a storage's bytes are in."""

from types import SimpleNamespace

import pytest

from memadvisor.analyzers.peak import ModuleBytes
from memadvisor.report.peak_modules import _foreground, _maker


def test_what_no_trained_model_holds_has_a_tile_of_its_own():
    """Averaged weights were inside the model's, as what its own forward makes is."""
    rows = [
        ModuleBytes(module=module, unit=unit, category=category, size_bytes=size_bytes)
        for module, unit, category, size_bytes in (
            ("(AveragedModel)", "", "other", 40),
            ("blocks.0.act", "blocks.0", "activation", 30),
            ("stem", "", "activation", 20),
            ("", "", "other", 10),
        )
    ]
    peak = SimpleNamespace(by_module=tuple(rows), by_root_bytes={})
    tiles = {(unit, size_bytes) for unit, _, _, size_bytes in _foreground(peak, 20) if size_bytes}

    assert tiles == {("(AveragedModel)", 40), ("blocks.0", 30), ("(model)", 20), ("(no module)", 10)}


@pytest.mark.parametrize(
    ("operator", "phase", "said"),
    [
        ("aten::mm", "forward", "mm, forward"),
        ("inside aten::mkldnn_convolution", "backward", "inside mkldnn_convolution, backward"),
        ("", "baseline", "before the step"),
    ],
)
def test_who_made_a_storage_and_when_are_one_column(operator, phase, said):
    """Of seven columns the last, the bytes, was off the screen of a narrow window."""
    assert _maker(SimpleNamespace(operator=operator, phase=phase)) == said
