"""A plan's loss in chunks, on trainings that know nothing of it."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from memadvisor.chunked_loss import ChunkedLoss, usual_rows
from memadvisor.engines.losses.chunked_tensor import ChunkedTensor
from memadvisor.errors import PlanError
from memadvisor.plan import UnitPlan
from tests.engines.ranks import run_ranks
from tests.engines.trainings import Model, applied, make_plan

CHUNKED = make_plan(1, chunked_loss=ChunkedLoss(rows=5))
WORDS = 13


def steps(model, optimizer, count=4, look=lambda scores, words: None, rank=0):
    torch.manual_seed(5)
    data, losses, seen = torch.Generator().manual_seed(rank), [], []
    for _ in range(count):
        for _ in range(2):
            words = torch.randint(WORDS, (4, 7), generator=data)
            scores = model(words[:, :-1])
            loss = F.cross_entropy(scores.reshape(-1, WORDS), words[:, 1:].reshape(-1)) / 2
            loss.backward()
            losses.append(float(loss.detach()))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        seen.append(look(scores, words))
        optimizer.zero_grad()
    return losses, seen


def new(**how):
    torch.manual_seed(3)
    model = Model(batch_norm=True, dropout=0.1, smooth=True, **how)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def trained(plan, look=lambda scores, words: None, **how):
    model, optimizer = new(**how)
    notes: list[str] = []
    with applied(plan, note=lambda level, text: notes.append(text)):
        losses, seen = steps(model, optimizer, look=look)
    return losses, copy.deepcopy(model.state_dict()), seen, notes


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "beside",
    [
        {},
        {"policy": "every-layer"},
        {"fused_updates": True},
        {"optimizer_tier": "disk"},
        {"activation_tier": "disk"},
        {"optimizer_bits": 8},
    ],
    ids=str,
)
def test_losses_and_weights_are_those_of_the_same_plan_without_it(beside, tied):
    ours = trained(make_plan(1, chunked_loss=ChunkedLoss(rows=5), **beside), tied=tied)
    theirs = trained(make_plan(1, **beside), tied=tied)
    assert ours[0] == pytest.approx(theirs[0], rel=1e-5)
    torch.testing.assert_close(ours[1], theirs[1], rtol=1e-3, atol=1e-4)
    assert not [text for text in ours[3] if "of the plan's chunked loss" in text]


def test_scores_are_of_before_the_update_whenever_the_script_asks_for_them():
    def accuracy(scores, words):
        return int((scores.argmax(-1) == words[:, 1:]).sum()), float(scores.detach().max())

    ours, theirs = trained(CHUNKED, accuracy), trained(make_plan(1), accuracy)
    assert ours[2] == [(count, pytest.approx(most, rel=1e-5)) for count, most in theirs[2]]


def test_what_needs_all_scores_is_told_of_once_and_gets_them():
    def look(scores, words):
        return float((scores.detach() @ torch.ones(WORDS)).sum())

    ours, theirs = trained(CHUNKED, look), trained(make_plan(1), look)
    assert ours[2] == pytest.approx(theirs[2], rel=1e-3)
    assert [text for text in ours[3] if "as a whole" in text] == [
        "of the plan's chunked loss: the script needs what 'head' returns as a whole (aten.mv), and it is made for that"
    ]


def test_an_evaluation_and_inference_give_what_they_give_without():
    model, _ = new()
    words = torch.arange(24).view(4, 6) % WORDS
    found = []
    for plan in (CHUNKED, make_plan(1)):
        with applied(plan):
            steps(*new(), count=1)  # another model, which the plan is for
            model.eval()
            for mode in (torch.no_grad, torch.inference_mode):
                with mode():
                    found.append(F.cross_entropy(model(words).flatten(0, 1), words.flatten()) + 0)
    torch.testing.assert_close(found[:2], found[2:])


def test_with_gradients_alone_chunks_are_made():
    model, optimizer = new()
    words = torch.zeros(4, 6, dtype=torch.long)
    with applied(CHUNKED):
        steps(model, optimizer, count=1)
        assert type(model(words)) is ChunkedTensor
        assert type(model(words[:1, :5])) is torch.Tensor  # one chunk
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                assert type(model(words)) is torch.Tensor
    assert type(model(words)) is torch.Tensor
    assert nn.Linear.forward.__module__ == "torch.nn.modules.linear"


def test_scores_are_of_before_an_update_that_the_script_does_by_hand():
    """Through `data`, where no version tells."""

    def run(plan):
        model, found = new()[0], []
        optimizer = torch.optim.SGD(model.blocks.parameters(), lr=0.1)
        words = torch.arange(24).view(4, 6) % WORDS
        with applied(plan):
            torch.manual_seed(0)
            for _ in range(3):
                scores = model(words)
                F.cross_entropy(scores.flatten(0, 1), words.flatten()).backward()
                model.head.weight.data -= 2 * model.head.weight.grad
                optimizer.step()
                found.append((float(scores.detach().max()), int(scores.argmax())))
                model.zero_grad()
        return found

    ours, theirs = run(CHUNKED), run(make_plan(1))
    assert [pytest.approx(most, rel=1e-5) for most, _ in theirs] == [most for most, _ in ours]


def test_a_closure_finds_the_scores_of_before_its_update():
    """As L-BFGS and Lightning train."""

    def run(plan):
        model, kept, found = new()[0], [], []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        words = torch.arange(24).view(4, 6) % WORDS

        def closure():
            optimizer.zero_grad()
            kept[:] = [model(words)]
            loss = F.cross_entropy(kept[0].flatten(0, 1), words.flatten())
            loss.backward()
            return loss

        with applied(plan):
            torch.manual_seed(0)
            for _ in range(3):
                optimizer.step(closure)
                found.append(float(kept[0].detach().amax()))
        return found

    assert run(CHUNKED) == pytest.approx(run(make_plan(1)), rel=1e-5)


def test_a_chunk_of_all_rows_is_no_chunk_and_said_so():
    _, _, _, notes = trained(make_plan(1, chunked_loss=ChunkedLoss()))
    assert [text for text in notes if "24 rows, and a chunk has 256" in text]


def test_nothing_of_a_model_is_kept_or_left_behind():
    model, optimizer = new()
    with applied(CHUNKED):
        steps(model, optimizer, count=2)
        assert "forward" not in vars(model.head) and not model.head._forward_pre_hooks
        copy.deepcopy(model)
    reference = torch.utils.weak.WeakTensorKeyDictionary({model.head.weight: 1})
    del model, optimizer
    gc.collect()
    assert len(reference) == 0


class Odd(nn.Linear):
    def forward(self, input):
        return super().forward(input) * 2


class NoLinear(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 3))

    def forward(self, x):
        return x @ self.weight


class WithOdd(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.head = nn.Linear(3, 4), Odd(4, 9)

    def forward(self, x):
        return self.head(self.up(x))


@pytest.mark.parametrize(
    ("model", "chunked", "message"),
    [
        (NoLinear, ChunkedLoss(rows=1), r"has no torch\.nn\.Linear outside"),
        (WithOdd, ChunkedLoss(rows=1), "'head' is a Odd, whose forward is its own"),
        (WithOdd, ChunkedLoss(layer="tail", rows=1), "has no linear layer of this name"),
    ],
)
def test_models_without_such_a_layer_are_refused_before_the_first_update(model, chunked, message):
    built = model()
    optimizer = torch.optim.SGD(built.parameters(), lr=0.1)
    with applied(make_plan(1, chunked_loss=chunked)), pytest.raises(PlanError, match=message):
        built(torch.ones(4, 3)).sum().backward()
        optimizer.step()


@pytest.mark.parametrize(
    ("beside", "message"),
    [
        ({"delayed_update": True, "optimizer_tier": "disk"}, "one step late"),
        ({"chunked_loss": ChunkedLoss(rows=0)}, "chunks of 0 rows"),
    ],
)
def test_plans_that_take_the_weights_away_are_refused(beside, message):
    from memadvisor.plan_checks import check_plan

    with pytest.raises(PlanError, match=message):
        check_plan(make_plan(1, **{"chunked_loss": ChunkedLoss(rows=5), **beside}), "This plan")


def test_parameters_elsewhere_are_refused():
    model, optimizer = new()
    plan = make_plan(
        1, zero=3, chunked_loss=ChunkedLoss(rows=5), parameter_tier="disk", optimizer_tier="disk"
    )
    with applied(plan), pytest.raises(PlanError, match="needs them until the loss"):
        steps(model, optimizer, count=1)


def test_a_compiled_model_is_refused():
    model, optimizer = new()
    compiled = torch.compile(model, backend="eager")
    with applied(CHUNKED), pytest.raises(PlanError, match=r"compiled by torch\.compile"):
        steps(compiled, optimizer, count=1)


def test_the_usual_number_of_rows_makes_a_chunk_as_large_as_the_layers_input_or_256():
    assert usual_rows(8192, 4096, 128_256) == 512  # 8192 x 4096 / 128256 = 262
    assert usual_rows(1024, 768, 50_257) == 256
    assert usual_rows(65_536, 4096, 32_000) == 16_384


# ---- ranks ---------------------------------------------------------------------------------------


def on_ranks(rank, plan):
    torch.manual_seed(3)
    model = DistributedDataParallel(Model(tied=True, smooth=True))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model.eval()

    def accuracy(scores, words):
        return int((scores.argmax(-1) == words[:, 1:]).sum())

    losses, seen = steps(model, optimizer, look=accuracy, rank=rank)
    return losses, seen, {name: value.clone() for name, value in model.module.state_dict().items()}


def planned(rank, plan):
    with applied(plan):
        return on_ranks(rank, plan)


@pytest.mark.parametrize("stages", [(0,), (1,), (2,), (0, 2, 1, 2), (3, 2, 3, 3)])
def test_sharded_ranks_train_as_without_it(stages):
    names = ["", "blocks.0", "blocks.1", "blocks.2", "head", "tokens"]
    units = tuple(
        UnitPlan(name=name, zero_stage=stages[place % len(stages)], recompute=name == "blocks.1")
        for place, name in enumerate(names)
        if name != "head"  # tied: it owns nothing
    )
    plan = make_plan(
        2,
        zero=max(stages),
        policy="chosen",
        units=units,
        chunked_loss=ChunkedLoss(layer="head", rows=5),
    )
    ours, theirs = run_ranks(planned, 2, plan), run_ranks(on_ranks, 2, plan)
    for mine, its in zip(ours, theirs, strict=True):
        assert mine[0] == pytest.approx(its[0], rel=1e-5) and mine[1] == its[1]
        torch.testing.assert_close(mine[2], its[2], rtol=1e-3, atol=1e-4)


def refused(rank, plan):
    with applied(plan), pytest.raises(PlanError, match="ZeRO stage 2 or lower"):
        on_ranks(rank, plan)
    return True


def test_stage_3_of_the_layer_is_refused():
    assert run_ranks(refused, 2, make_plan(2, zero=3, chunked_loss=ChunkedLoss(rows=5))) == [True, True]
