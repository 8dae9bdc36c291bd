"""What the page says to do next, of trainings whose answer is known."""

import dataclasses
import gc

import pytest
import torch

import memadvisor
from memadvisor.analyzers.analysis import analyze
from memadvisor.report.headline import headline
from memadvisor.report.next_steps import next_steps, slow_parts
from memadvisor.report.view import RankView
from memadvisor.run.documents import Note
from memadvisor.run.parallel_records import PipelineStage
from tests.make_run import make_run
from tests.report.rendered import rendered


class Chunked(torch.autograd.Function):
    """As a fused loss: its backward works in a buffer far larger than all that is kept for it."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sum()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        buffer = torch.empty(4096, 4096)
        buffer.copy_(x.mean())
        return grad.expand_as(x) * 1.0 + buffer.mean() * 0.0


def test_where_a_temporary_is_most_of_the_peak_it_is_named_first(tmp_path):
    gc.collect()  # what tests before left behind is in the peak too, and should be little beside the buffer
    model = torch.nn.Linear(16, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with memadvisor.profile(tmp_path / "run", trace_step=1) as prof:
        for _ in range(3):
            optimizer.zero_grad()
            Chunked.apply(model(torch.ones(64, 16))).backward()
            optimizer.step()

    page = rendered(analyze(prof.run))

    advice = page[page.index("What to do next") :]
    first = advice[advice.index("<li>") : advice.index("</li>")]
    assert first.startswith("<li>Temporaries are ")
    assert "the largest takes 64.0 MiB (float32 [4096, 4096], made by empty, outside any module)" in first


def test_a_pipelines_states_are_no_matter_of_zero():
    run = make_run()
    stage = PipelineStage(
        model="", index=0, num_stages=2, position=0, num_ranks=2, schedule="Schedule1F1B", num_micro_batches=4,
        splits_backward=False, first_rank=0,
    )  # fmt: skip
    ranks = tuple(dataclasses.replace(rank, pipeline_stages=(stage,)) for rank in run.ranks)

    page = rendered(analyze(dataclasses.replace(run, ranks=ranks)))

    assert "a pipeline of more stages leaves each rank fewer of them" in page
    assert "ZeRO shards them" not in page


@pytest.mark.parametrize(("device", "where"), [("cpu", "on disk"), ("cuda:0", "in the host")])
def test_where_states_may_wait_is_the_next_tier_of_the_device(device, where):
    """Of a GPU's run it said: on disk."""
    page = rendered(analyze(make_run(num_ranks=1, device=device)))

    assert f"a plan may keep some {where}" in page


def test_a_run_without_a_step_is_told_why_and_not_to_take_more_of_them():
    why = "No training step was seen: a model was called, with no backward pass and no step of an optimizer."
    run = make_run(num_ranks=1, traced_step=None)
    note = Note(level="warning", text=why, time_s=None)
    without = dataclasses.replace(run.ranks[0], steps=(), spans=(), notes=(note,))

    page = rendered(analyze(dataclasses.replace(run, ranks=(without,))))
    assert "What to do next" in page and "profile a run of more steps" not in page
    steps = page.partition("What to do next")[2].partition("</ol>")[0]
    assert "No training step was seen" in steps

    short = dataclasses.replace(run.ranks[0], notes=(note,))
    page = rendered(analyze(dataclasses.replace(run, ranks=(short,))))
    assert "profile a run of more steps" in page


def test_of_a_damaged_run_more_steps_are_not_asked_for():
    """Its traced step may have been there."""
    run = dataclasses.replace(
        make_run(num_ranks=1, traced_step=None), problems=("rank0.journal: checksum mismatch",)
    )
    page = rendered(analyze(run))
    steps = page.partition("What to do next")[2].partition("</ol>")[0]

    assert "profile the script again" in steps and "more steps" not in steps
    assert "One is traced after the warm-up" not in page
    assert f"What can be read of this run holds {len(run.ranks[0].steps)} steps of this rank" in page


def _first_view(run):
    analysis = analyze(run)
    return RankView(analysis, run.ranks[0], analysis.ranks[0], 300)


def test_where_communication_is_waiting_for_a_late_rank_smaller_messages_are_not_the_way():
    """Ranks begin 0, 20, 40 and 60 ms late, and a transfer takes 10 ms: whoever is early waits for rank 3."""
    late, even = (_first_view(make_run(num_ranks=4, rank_delay_s=delay_s)) for delay_s in (0.02, 0.0))
    (said,) = [text for text in slow_parts(late) if text.startswith("Communication")]

    assert (
        "of all communication is waiting for other ranks, most for rank 3: look at what makes them late"
        in said
    )
    assert "micro-batches" not in said and "bits" not in said
    assert not any("makes them late" in text for text in slow_parts(even))


def test_a_model_of_one_unit_is_not_said_to_keep_most_of_itself():
    view = _first_view(make_run(num_ranks=1, micro_batch_size=32))
    first, *_ = view.result.activations.units
    alone = dataclasses.replace(view.result.activations, units=(first,))
    single = dataclasses.replace(view, result=dataclasses.replace(view.result, activations=alone))

    for each, is_named in ((view, True), (single, False)):
        said = " ".join(step.text for step in next_steps(each))
        assert ("Activations are" in said, "keeps most" in said) == (True, is_named)
    assert "1 unit keeps it" in headline(single).text
