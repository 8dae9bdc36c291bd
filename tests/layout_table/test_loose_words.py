"""Words that are no cell's own but can mean one thing."""

import pytest

from tests.layout_table.test_read import case_of, read_one

SIXTEEN = {"n_gpus": "16", "global_batch_seqs": "64"}


@pytest.mark.parametrize(
    ("columns", "size", "number"),
    [
        ({"micro_batch_size": "2 per GPU"}, 2, 2),
        ({"micro_batch_size": "2x"}, 2, 2),
        ({"micro_batch_size": "2048 tokens"}, 2, 2),
        ({"micro_batch_size": "4k tokens", "seq_len": "2048"}, 2, 2),
        ({"micro_batch_size": "b=2"}, 2, 2),
        ({"micro_batch_size": "1", "global_batch_seqs": "GBS 32"}, 1, 2),
        ({"micro_batch_size": "2", "global_batch_seqs": "4 per GPU"}, 2, 2),
        ({"micro_batch_size": None, "global_batch_seqs": "4 per GPU"}, 4, 1),
        ({"micro_batch_size": "max"}, 1, 4),
        ({"micro_batch_size": "1", "global_batch_seqs": "32 x 1024"}, 1, 2),
        ({"micro_batch_size": "1", "global_batch_seqs": "16x2"}, 1, 2),
    ],
)
def test_sequences(columns, size, number):
    layout = case_of(**{**SIXTEEN, **columns}).step.layout
    assert (layout.micro_batch_size, layout.num_microbatches) == (size, number)


@pytest.mark.parametrize(
    ("text", "stage", "shard"),
    [("ZeRO++", 3, None), ("Gemini", 3, None), ("optimizer sharding", 1, None), ("MiCS", 3, 8), ("data parallel", 0, None)],
)  # fmt: skip
def test_who_shards(text, stage, shard):
    row = read_one(**SIXTEEN, strategy=text)
    assert row.case is not None
    layout = row.case.step.layout
    assert (layout.zero_stage, layout.shard) == (stage, shard)
    assert "not understood" not in "".join(row.notes)


@pytest.mark.parametrize(
    ("batch", "seq_len", "sequences"),
    [("4M tokens", "2048", 2048), ("0.5M", "2048", 256), ("4M", "2000", 2000), ("4194304 tokens", "4096", 1024), ("3M tokens", "1536", 2048)],
)  # fmt: skip
def test_round_tokens_of_a_batch_are_whole_sequences(batch, seq_len, sequences):
    layout = case_of(n_gpus="1", micro_batch_size="1", global_batch_seqs=batch, seq_len=seq_len).step.layout
    assert layout.num_microbatches == sequences


def test_a_length_with_its_name():
    for text in ("seq2048", "seq_len=2048", "max 2048", "ctx 2k"):
        assert case_of(seq_len=text).step.seq_len == 2048
    assert "no positive whole number" in (read_one(seq_len="512-2048").error or "")


def test_parameters_in_words():
    found = case_of(model="ours", n_params="13 billion", n_layers=None, hidden=None, n_heads=None, vocab=None)
    assert found.architecture.n_layers == 40


def test_a_schedule_as_a_method():
    layout = case_of(n_gpus="8", strategy="GPipe").step.layout
    assert (layout.pipeline, layout.schedule) == (8, "gpipe")
    layout = case_of(n_gpus="8", pp="4", strategy="GPipe").step.layout
    assert (layout.pipeline, layout.data, layout.schedule) == (4, 2, "gpipe")
    assert case_of(n_gpus="8", pp="4", schedule="1F1B-interleaving").step.layout.schedule == "interleaved"


def test_bits_are_those_of_a_frozen_base():
    row = read_one(model="llama2-7b", precision="4-bit", n_layers=None, hidden=None, n_heads=None, vocab=None)
    assert row.case is not None and "frozen base" in "".join(row.notes)
    asked = read_one(model="llama2-7b", precision="8bit", lora_rank="16", n_layers=None, hidden=None, n_heads=None, vocab=None)  # fmt: skip
    assert asked.case is not None and asked.error is None
    assert "no precision" in (read_one(precision="int8").error or "")


@pytest.mark.parametrize("text", ["TP4", "tp=4", "4-way", "4.0"])
def test_degrees_with_their_names(text):
    assert case_of(dp=None, n_gpus="8", tp=text).step.layout.tensor == 4
    assert "no positive whole number" in (read_one(dp=None, n_gpus="8", pp="TP4").error or "")


@pytest.mark.parametrize(
    ("text", "stage"),
    [("yes", 1), ("\u221a", 1), ("True", 1), ("1+2", 2), ("2 (offload)", 2), ("os_g", 2), ("p_g_os", 3)],
)
def test_zero_without_its_stage(text, stage):
    row = read_one(zero_stage=text)
    assert row.case.step.layout.zero_stage == stage
    assert any("says no stage" in note for note in row.notes) == (stage == 1)


@pytest.mark.parametrize("text", ["GQA", "multi-head", "causal", "ring attention", "THD"])
def test_what_attends_to_what_says_no_kernel(text):
    row = read_one(attention=text)
    assert row.case.step.software == case_of().step.software
    assert f"attention {text!r} says no kernel: the trainer's own is taken" in row.notes


@pytest.mark.parametrize(
    ("text", "of_norms", "kind"),
    [("SP", True, "ring"), ("Ulysses", False, "ulysses"), ("ring", False, "ring"), ("\u221a", True, "ring")],
)
def test_kinds_of_sequence_parallelism_where_it_is_asked_for(text, of_norms, kind):
    layout = case_of(dp=None, n_gpus="8", tp="2", cp="2", sequence_parallel=text).step.layout
    assert (layout.sequence_parallel, layout.context_kind) == (of_norms, kind)


@pytest.mark.parametrize(
    ("text", "schedule", "chunks"),
    [("yes", "interleaved", 6), ("interleaved", "interleaved", 6), ("no", "1f1b", 1)],
)
def test_interleaving_that_is_a_switch(text, schedule, chunks):
    layout = case_of(dp=None, n_gpus="8", pp="4", **{"Interleaving": text}).step.layout
    assert (layout.schedule, layout.chunks) == (schedule, chunks)
