"""Parts of units that put keys into a cache: where it has something of the unit before a part, that part's keys stay in it."""

import contextlib
import sys
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

import memadvisor
from memadvisor.analyzers.segments import captured_step
from memadvisor.cost.simulate import simulate
from memadvisor.engines.apply import apply
from memadvisor.plan import UnitPlan
from memadvisor.write_schedule import write_schedule
from tests.engines.trainings import make_plan

DIM = 32


class Cache:
    """As transformers' EncoderDecoderCache: what a layer attends to of its own, and of the encoder; long where its own is."""

    def __init__(self):
        self.own, self.others = {}, {}

    def get_seq_length(self, layer_idx):
        return self.own[layer_idx].shape[1] if layer_idx in self.own else 0


class Attention(nn.Module):
    def __init__(self, layer_idx, kind):
        super().__init__()
        self.layer_idx, self.kind = layer_idx, kind
        self.query, self.keys = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x, to, past_key_values=None):
        keys = self.keys(to)
        if past_key_values is not None:
            getattr(past_key_values, self.kind)[self.layer_idx] = keys
        return x + F.scaled_dot_product_attention(self.query(x), keys, keys)


class Block(nn.Module):
    def __init__(self, layer_idx):
        super().__init__()
        self.own, self.others = Attention(layer_idx, "own"), Attention(layer_idx, "others")
        self.after = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.ReLU(), nn.Linear(4 * DIM, DIM))

    def forward(self, x, encoded, past_key_values=None):
        x = self.own(x, x, past_key_values=past_key_values)
        x = self.others(x, encoded, past_key_values=past_key_values)
        return x + self.after(x)


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block(index) for index in range(3))

    def forward(self, x, encoded):
        cache = Cache()
        for block in self.blocks:
            x = block(x, encoded, past_key_values=cache)
        return x, cache


def _recorded(directory, plan):
    torch.manual_seed(1)
    model = Decoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    losses = []
    found = apply(plan, model)
    with contextlib.ExitStack() as stack:
        stack.callback(found.remove)
        stack.enter_context(memadvisor.profile(directory, trace_step=1))
        for _ in range(3):
            loss = model(torch.randn(4, 16, DIM), torch.randn(4, 64, DIM))[0].square().mean()
            loss.backward()
            losses.append(float(loss.detach()))
            optimizer.step()
            optimizer.zero_grad()
    return memadvisor.load(directory), losses


def test_no_choice_of_parts_takes_more_than_predicted(monkeypatch, tmp_path):
    """Keys of the encoder's outputs were predicted to go with their part, 6 % of T5's peak."""
    monkeypatch.setitem(sys.modules, "transformers.cache_utils", SimpleNamespace(Cache=Cache))
    run, losses = _recorded(tmp_path / "plain", make_plan(1, policy="none"))
    step = captured_step(run)
    options = {
        (kind, place): place
        for kind in ("lower", "sparing")
        for place in range(len(getattr(step.parted["blocks.0", 0], kind)))
    }
    has_cached = False
    for number, (kind, place) in enumerate(options):
        chosen = {
            unit: getattr(found, kind)[place].modules
            for (unit, _), found in step.parted.items()
            if place < len(getattr(found, kind))
        }
        has_cached |= any(name.endswith(".others") for names in chosen["blocks.0"] for name in names)
        units = tuple(
            UnitPlan(name=u.name, zero_stage=0, recompute=False, parts=chosen.get(u.name, ()))
            for u in step.units
        )
        plan = make_plan(1, policy="chosen", units=units)
        predicted = simulate(step, write_schedule(plan, step.units), None).prediction()
        ours, losses_ours = _recorded(tmp_path / f"run{number}", plan)

        assert losses_ours == losses
        assert predicted.peak_bytes >= ours.ranks[0].traced_step.peak_allocated_bytes
    assert has_cached
