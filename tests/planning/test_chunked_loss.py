"""A loss in chunks: predicted from the plain run, applied, and measured."""

from __future__ import annotations

import gc
import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import memadvisor
from memadvisor.analyzers.segments import RecordedStep, captured_step
from memadvisor.api_arguments import chunked_loss_of
from memadvisor.asked import Asked
from memadvisor.chunked_loss import ChunkedLoss
from memadvisor.cli.main import main
from memadvisor.engines.apply import apply
from memadvisor.errors import UsageError
from memadvisor.plan_file import load_plan, save_plan

WORDS, WIDTH, LENGTH, BATCH, ROWS = 700, 24, 32, 8, 64


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 4 * WIDTH),
            nn.Linear(4 * WIDTH, WIDTH),
        )

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Gpt(nn.Module):
    """`kind`: how the loss is written."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.tokens = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, WORDS, bias="bias" in kind)
        if "tied" in kind:
            self.head.weight = self.tokens.weight

    def forward(self, words):
        x = self.tokens(words)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def loss(self, words):
        scores = self(words)
        if "capped" in self.kind:
            scores = 5 * torch.tanh(scores / 5)
        if "shifted" in self.kind:
            scores, words = scores[:, :-1], words[:, 1:]
        smoothing = 0.1 if "smooth" in self.kind else 0.0
        loss = F.cross_entropy(
            scores.reshape(-1, WORDS).float(), words.reshape(-1), label_smoothing=smoothing
        )
        return (loss, scores) if "kept" in self.kind else (loss, None)


def recorded(directory, kind, plan=None):
    gc.collect()
    torch.manual_seed(1)
    model = Gpt(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    found = None if plan is None else apply(plan, model, optimizer)
    micro_batches = 2 if "accumulated" in kind else 1
    scores = None
    try:
        with memadvisor.profile(directory, trace_step=3) as prof:
            for _ in range(5):
                for _ in range(micro_batches):
                    words = torch.randint(WORDS, (BATCH, LENGTH))
                    with torch.autocast("cpu", dtype=torch.bfloat16, enabled="autocast" in kind):
                        loss, scores = model.loss(words)
                    loss.backward()
                optimizer.step()
                optimizer.zero_grad()
    finally:
        if found is not None:
            found.remove()
        del scores
    return prof.run


@pytest.mark.parametrize(
    ("kind", "tolerance"),
    [
        ("", 0.001),
        ("tied bias", 0.003),
        ("kept", 0.001),
        ("shifted", 0.01),
        ("shifted kept", 0.01),
        ("accumulated", 0.001),
        ("capped", 0.03),
        ("autocast", 0.03),
        ("smooth", 0.03),
    ],
)
def test_the_peak_is_the_predicted_one(kind, tolerance, tmp_path):
    plain = recorded(tmp_path / "plain", kind)
    advice = memadvisor.advise(plain, memory="100%", chunked_loss=ROWS)
    plan = advice.plans[0].plan
    assert plan.chunked_loss == ChunkedLoss(layer="head", rows=ROWS)
    run = recorded(tmp_path / "run", kind, plan)

    measured_bytes = run.ranks[0].traced_step.peak_allocated_bytes
    before_bytes = plain.ranks[0].traced_step.peak_allocated_bytes
    assert measured_bytes < 0.65 * before_bytes
    assert plan.prediction.peak_bytes == pytest.approx(measured_bytes, rel=tolerance)


def test_it_goes_with_recomputation_in_one_plan(tmp_path):
    plain = recorded(tmp_path / "plain", "")
    most = memadvisor.advise(plain, memory="100%", chunked_loss=ROWS).plans[0].plan.prediction.peak_bytes
    advice = memadvisor.advise(plain, memory=most - 1, chunked_loss=ROWS)
    plan = advice.plans[0].plan
    assert advice.plans[0].fits and plan.recomputed_units
    run = recorded(tmp_path / "run", "", plan)
    assert run.ranks[0].traced_step.peak_allocated_bytes == pytest.approx(
        plan.prediction.peak_bytes, rel=1e-3
    )


def test_the_layers_product_and_what_is_made_of_it_take_their_time_once_more(tmp_path):
    plain = recorded(tmp_path / "plain", "")
    usual = captured_step(plain)
    step = RecordedStep(plain, Asked(chunked_loss=ChunkedLoss(rows=ROWS)))
    forward_s = sum(each.duration_s for each in usual.segments if each.phase == "forward")
    assert 0 < step.chunks_again_s < forward_s
    assert step.captured().step_time_s == pytest.approx(usual.step_time_s + step.chunks_again_s)
    longer = [
        (after.unit, after.phase)
        for before, after in zip(usual.segments, step.captured().segments, strict=True)
        if after.duration_s > before.duration_s
    ]
    assert len(longer) == 1 and longer[0][1] == "backward"


def test_a_plan_file_keeps_it_and_options_say_it(tmp_path, capsys):
    plain = recorded(tmp_path / "plain", "")
    plan = memadvisor.advise(plain, memory="1GiB", chunked_loss=ROWS).plans[0].plan
    save_plan(plan, tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json") == plan

    assert main(["advise", str(plain.path), "--memory", "1GiB", "--chunked-loss", str(ROWS), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["plans"][0]["chunked_loss"] == {"layer": "head", "rows": ROWS}
    assert any("not bit for bit the same" in note for note in found["notes"])
    assert main(["advise", str(plain.path), "--memory", "1GiB", "--chunked-loss", "auto"]) == 2
    assert "give fewer rows" in capsys.readouterr().err


@pytest.mark.parametrize("value", [0, -3, 1.5, True, "many"])
def test_a_wrong_number_of_rows_is_one_line(value):
    with pytest.raises(UsageError, match="chunked_loss is"):
        chunked_loss_of(value)


@pytest.mark.parametrize("value", ["0", "-1", "x", "1.5"])
def test_a_wrong_option_is_one_line(value, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["run", f"--chunked-loss={value}", "script.py"])
    assert ended.value.code == 2
    assert "give auto, or 1 or more" in capsys.readouterr().err
