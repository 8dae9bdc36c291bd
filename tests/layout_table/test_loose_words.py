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
