"""Whose tile a storage's bytes are in."""

import dataclasses
from types import SimpleNamespace

import pytest

from memadvisor.analyzers.analysis import analyze
from memadvisor.analyzers.peak import ModuleBytes
from memadvisor.report.page import render
from memadvisor.report.peak_modules import _foreground, _maker
from tests.make_run import make_run


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


def test_parameters_that_were_gathered_ahead_are_their_own_units():
    """A block's whole weights were bytes of the layer norm that ran when they were gathered."""
    run = make_run(num_ranks=1)
    [rank] = run.ranks
    step = rank.traced_step
    ahead = dataclasses.replace(
        rank.storages[0],
        storage_id=10**6,
        birth_s=step.start_s,
        death_s=None,
        size_bytes=10**9,
        category="parameter",
        module="ln_f",
        unit="blocks.1",
        phase="backward",
        operator="aten::add",
    )
    logits = dataclasses.replace(ahead, storage_id=10**6 + 1, module="", unit="", phase="baseline")
    ranks = (dataclasses.replace(rank, storages=(*rank.storages, ahead, logits)),)
    analysis = analyze(dataclasses.replace(run, ranks=ranks))
    peak = analysis.ranks[0].peak
    rows = {row.module: row.unit for row in peak.by_module if row.size_bytes >= 10**9}
    table = render(analysis).partition("Largest storages at the peak")[2]

    assert rows["blocks.1"] == "blocks.1"
    assert "<td>blocks.1</td>" in table and "<td>(no module)</td>" in table
    assert ahead.place == "blocks.1" and rank.storages[0].place == rank.storages[0].module


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
