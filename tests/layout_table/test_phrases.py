"""A run that is described in a phrase is the one that its numbers say."""

import pytest

from tests.layout_table.test_read import case_of, read_one


def layout_of(**columns):
    return case_of(**columns).step.layout


@pytest.mark.parametrize(
    ("phrase", "fields"),
    [
        ("8 GPUs, `tp2`, batch 2 \u00d7 4096, checkpointing on", {"data": 4, "micro_batch_size": 2, "recompute": "full"}),
        ("1 GPU, batch 8 x 2048, no checkpointing", {"data": 1, "micro_batch_size": 8, "recompute": "none"}),
        ("8 GPUs, b4, s4096, GC-off", {"data": 8, "micro_batch_size": 4, "recompute": "none"}),
        ("8 GPUs, b2 s16k, with recompute", {"micro_batch_size": 2, "recompute": "full"}),
    ],
)  # fmt: skip
def test_a_phrase_says_cards_batch_and_recomputation(phrase, fields):
    layout = layout_of(Shape=phrase, n_gpus=None)

    assert {name: getattr(layout, name) for name in fields} == fields


@pytest.mark.parametrize(
    ("name", "model", "fields"),
    [
        ("llama3-8b-tp1-pp1-dp8-mbs1-gbs128-seq8192-bf16", "llama3-8b", {"data": 8, "num_microbatches": 16}),
        (
            "gpt3_175b_tp8_pp16_mbs1_gbs1536",
            "gpt3-175b",
            {"tensor": 8, "pipeline": 16, "num_microbatches": 1536},
        ),
        ("7B_TP2_PP2_MBS1_SEQ8192", "llama2-7b", {"tensor": 2, "pipeline": 2}),
        ("GPT-3 175B (TP=8, PP=8)", "gpt3-175b", {"tensor": 8, "pipeline": 8}),
        ("llama-2-7b TP=2 PP=2", "llama2-7b", {"tensor": 2, "pipeline": 2}),
        ("llama2-7b-fsdp", "llama2-7b", {"zero_stage": 3}),
        ("llama2-7b-chat-hf", "llama2-7b", {"tensor": 1, "zero_stage": 0}),
    ],
)
def test_the_name_of_a_benchmark_is_a_model_and_its_layout(name, model, fields):
    found = case_of(model=name, gpu="H100", seq_len="8192", n_layers=None, hidden=None, n_heads=None, vocab=None, dp=None, n_gpus=None)  # fmt: skip
    layout = found.step.layout
    assert found.architecture.name == model and found.step.seq_len == 8192
    assert {field: getattr(layout, field) for field in fields} == fields


def test_a_configuration_begins_with_its_model():
    found = case_of(model=None, configuration="Llama2-7B FSDP bs=4 seq=4096", seq_len=None, n_layers=None, hidden=None, n_heads=None, vocab=None)  # fmt: skip
    assert (found.architecture.name, found.step.seq_len) == ("llama2-7b", 4096)
    assert (found.step.layout.micro_batch_size, found.step.layout.zero_stage) == (4, 3)


def test_a_phrase_says_the_sequence():
    assert case_of(config="b4, s4096, GC-off", seq_len=None).step.seq_len == 4096
    assert case_of(shape="batch 8 x 2k", seq_len=None).step.seq_len == 2048


def test_a_column_has_the_say_over_a_phrase():
    layout = layout_of(config="8 GPUs, b4, s4096, GC-off", n_gpus="8", micro_batch_size="2", recompute="full")

    assert (layout.micro_batch_size, layout.recompute) == (2, "full")


def test_paddle_says_who_shares_shards_and_in_which_stage():
    layout = layout_of(**{"\u5206\u5e03\u5f0f\u7b56\u7565": "tp2sd4_stage2", "n_gpus": None})

    assert (layout.tensor, layout.data, layout.zero_stage) == (2, 4, 2)
    assert layout_of(strategy="sd8_stage3", n_gpus="8").zero_stage == 3


def test_what_stands_behind_a_known_name_is_read():
    case = case_of(model="GPT-OSS 20B, 32k context", n_layers=None, hidden=None, seq_len=None)

    assert (case.architecture.name, case.step.seq_len) == ("gpt-oss-20b", 32768)


def test_experts_alone_tell_the_fewest_replicas():
    row = read_one(model="gpt-oss-20b", n_layers=None, hidden=None, topology="ep8", n_gpus=None)

    assert row.case is not None
    assert row.case.step.layout.data == 8
    assert any("share the experts" in note for note in row.notes)
