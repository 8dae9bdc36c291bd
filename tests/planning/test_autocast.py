"""Forwards under autocast: predicted from the plain float32 run, applied, and measured."""

from __future__ import annotations

import gc
import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import memadvisor
from memadvisor.analyzers.segments import RecordedStep
from memadvisor.asked import Asked
from memadvisor.cli.main import main
from memadvisor.cost.simulate import simulate
from memadvisor.engines.apply import apply
from memadvisor.plan import UnitPlan
from memadvisor.plan_file import load_plan, save_plan
from memadvisor.write_schedule import write_schedule
from tests.engines.trainings import make_plan

WORDS, WIDTH, LENGTH, BATCH = 300, 64, 48, 16


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = (
            part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1)
        )
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(x)))


class Gpt(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words):
        x = self.tokens(words)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def recorded(directory, plan=None, num_micro_batches=1):
    gc.collect()
    torch.manual_seed(1)
    model = Gpt()
    optimizer = torch.optim.AdamW(model.parameters())
    applied = None if plan is None else apply(plan, model, optimizer)
    try:
        with memadvisor.profile(directory, trace_step=3) as prof:
            for _ in range(5):
                for _ in range(num_micro_batches):
                    words = torch.randint(WORDS, (BATCH, LENGTH))
                    F.cross_entropy(model(words).flatten(0, 1), words.flatten()).backward()
                optimizer.step()
                optimizer.zero_grad()
    finally:
        if applied is not None:
            applied.remove()
    return prof.run


@pytest.mark.parametrize(("memory", "num_micro_batches"), [("100%", 1), ("60%", 1), ("50%", 1), ("60%", 2)])
def test_the_peak_is_the_predicted_one(memory, num_micro_batches, tmp_path):
    plain = recorded(tmp_path / "plain", num_micro_batches=num_micro_batches)
    advice = memadvisor.advise(plain, memory=memory, autocast="bf16")
    plan = next(each.plan for each in advice.plans if not each.changes_script)
    assert plan.autocast == "bf16"
    assert any(unit.recompute for unit in plan.units) == (memory != "100%")
    after = recorded(tmp_path / "after", plan, num_micro_batches)
    measured = after.ranks[0].traced_step.peak_allocated_bytes
    assert plan.prediction.peak_bytes == pytest.approx(measured, rel=0.01)


def test_copies_of_weights_that_parts_run_again_make_go_as_the_model_returns(tmp_path):
    """Where the script computes its loss they are not there: autocast is on inside of the model's call alone. Nor do they
    stay for being copied as they are, and then transposed."""
    step = RecordedStep(recorded(tmp_path / "plain"), Asked(autocast="bf16")).captured()
    names = [f"blocks.{number}" for number in range(4)]
    units = tuple(
        UnitPlan(name=name, zero_stage=0, recompute=False, parts=((f"{name}.norm", f"{name}.qkv"),))
        for name in names
    )
    plan = make_plan(1, units=units, autocast="bf16")
    predicted = simulate(step, write_schedule(plan, step.units), None).prediction()
    after = recorded(tmp_path / "after", plan)

    assert predicted.peak_position == "backward outside any unit"
    assert predicted.peak_bytes == after.ranks[0].traced_step.peak_allocated_bytes


def test_all_plans_have_it_and_say_so_and_what_is_asked_for_is_no_more_advised(tmp_path):
    plain = recorded(tmp_path / "plain")
    without = memadvisor.advise(plain, memory="100%")
    advice = memadvisor.advise(plain, memory="100%", autocast="bf16")
    assert {each.plan.autocast for each in advice.plans} == {"bf16"}
    assert any("lossy" in note and "autocast" in note for note in advice.notes)
    assert any("Times of compute are those recorded" in note for note in advice.notes)
    kinds = [{change.kind for change in each.script_changes} for each in (without, advice)]
    assert "autocast" in kinds[0] and "autocast" not in kinds[1]


def test_a_peak_that_copies_of_weights_raise_is_named(tmp_path):
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with memadvisor.profile(tmp_path / "run") as prof:
        for _ in range(4):
            model(torch.randn(4, 256)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    advice = memadvisor.advise(prof.run, memory="1GiB", autocast="bf16")
    assert any(note.startswith("Autocast alone raises the peak") for note in advice.notes)
    assert not any("raises" in note for note in memadvisor.advise(prof.run, memory="1GiB").notes)


def test_a_plan_file_keeps_it(tmp_path):
    plain = recorded(tmp_path / "plain")
    plan = memadvisor.advise(plain, memory="100%", autocast="bf16").plans[0].plan
    save_plan(plan, tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json").autocast == "bf16"


def test_a_run_in_16_bits_is_refused_in_one_line(tmp_path, capsys):
    narrow = nn.Linear(16, 16).to(torch.bfloat16)
    optimizer = torch.optim.SGD(narrow.parameters(), lr=0.1)
    with memadvisor.profile(tmp_path / "run"):
        for _ in range(4):
            narrow(torch.randn(8, 16, dtype=torch.bfloat16)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert main(["advise", str(tmp_path / "run"), "--memory", "100%", "--autocast", "bf16"]) == 2
    said = capsys.readouterr().err
    assert "in 16 bits already" in said and "Traceback" not in said


def test_json_has_it(tmp_path, capsys):
    recorded(tmp_path / "plain")
    assert main(["advise", str(tmp_path / "plain"), "--memory", "100%", "--autocast", "bf16", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["plans"][0]["autocast"] == "bf16"
