"""Headers as people publish them: one name, the same words in another order, a unit, several columns together, or not read."""

import csv
import io

import pytest

from memadvisor.errors import UsageError
from memadvisor.layout_table.headers import headings
from memadvisor.layout_table.read import read_table


def rows_of(text):
    return read_table(csv.reader(io.StringIO(text)), "a table").rows


def test_letters_alone_are_a_header():
    (row,) = rows_of("L,h,a,V,s,b,B,t,p,d\n24,2048,16,51200,2048,4,512,2,1,16\n")
    assert (row.case.architecture.n_layers, row.case.step.layout.tensor) == (24, 2)


def test_names_of_groups_of_columns_stand_above_the_header():
    (row,) = rows_of(
        "Model Config,,,Parallel,,,Result\nmodel,seq,gpus,tp,pp,mbs,tput\nLlama-2-13B,4096,64,2,4,1,100\n"
    )
    assert row.error is None and (row.case.step.layout.tensor, row.case.step.layout.pipeline) == (2, 4)


def test_runs_in_columns_under_their_own_names():
    first, second = rows_of(
        "Parameter,Run A,Run B\nModel,Llama-3-8B,Llama-3-70B\nGPUs,8,64\nGPU,H100,H100\nTP,1,8\n"
        "Sequence length,8192,8192\nMicro batch size,1,1\nGlobal batch size,128,128\n"
    )
    assert (first.case.architecture.name, second.case.architecture.name) == ("llama3-8b", "llama3-70b")
    assert second.case.step.layout.tensor == 8


def test_a_count_may_stand_with_what_it_counts():
    (row,) = rows_of(
        'model,gpu,gpus,mbs,gbs,seq\nLlama-2-7B,H100,16 GPUs,1 seq,64 sequences,"4,096 tokens"\n'
    )
    assert row.error is None and row.case.step.layout.num_microbatches == 4


def columns_of(name):
    found, unread = headings(["model", name])
    return (found[1].columns if len(found) > 1 else None, unread)


@pytest.mark.parametrize(
    ("name", "columns"),
    [
        ("Tensor MP size", ("tp",)),
        ("Pipeline MP size", ("pp",)),
        ("MP Degree", ("tp",)),
        ("# micro-batch", ("grad_accum",)),
        ("Micro batch per GPU", ("micro_batch_size",)),
        ("Batch size (global)", ("global_batch_seqs",)),
        ("Grad. Accum.", ("grad_accum",)),
        ("TP/PP/DP", ("tp", "pp", "dp")),
        ("(p, t, d)", ("pp", "tp", "dp")),
        ("DP x TP x PP", ("dp", "tp", "pp")),
        ("TP-PP-CP-EP", ("tp", "pp", "cp", "ep")),
        ("Parallelism (TP/PP)", ("tp", "pp")),
        ("Num nodes x GPUs", ("nodes", "gpus_per_node")),
        ("Nodes / GPUs", ("nodes", "n_gpus")),
        ("model.micro_batch_size", ("micro_batch_size",)),
        ("float8_enabled", ("fp8",)),
        ("CP degree (ring)", ("cp",)),
        ("# of nodes", ("nodes",)),
        ("Activation checkpoiting", ("recompute",)),
        ("SeqLen (T)", ("seq_len",)),
        ("GlobalBatchSize (T)", ("global_batch_tokens",)),
        ("MBS/GBS", ("micro_batch_size", "global_batch_seqs")),
        ("input_num_gpus", ("n_gpus",)),
    ],
)
def test_headers_that_are_understood(name, columns):
    assert columns_of(name) == (columns, [])


@pytest.mark.parametrize(
    "name",
    [
        "tokens/s/GPU", "Number of samples", "ckpt size", "recompute time", "Model size (GB)", "Params per GPU", "Peak memory (GB)",
        "gpu mem", "Gradient checkpoints written", "Max batch size", "layers per stage", "Optimizer memory", "Training tokens", "TP/throughput",
    ],
)  # fmt: skip
def test_headers_of_other_things_are_named_and_not_guessed_at(name):
    assert columns_of(name) == (None, [name])


def read(text):
    return read_table(csv.reader(io.StringIO(text)), "a test")


def test_a_table_without_a_header_is_told_what_its_first_row_is_for():
    with pytest.raises(UsageError, match=r"its first row is 'gpt2,8,2'") as caught:
        read("gpt2,8,2\nllama3-8b,8,2\n")
    columns = caught.value.hint.partition("as in ")[2].partition(";")[0]
    (row,) = read(f"{columns}\nllama3-8b,8,2,2,1\n").rows
    assert row.error is None and row.case.step.layout.tensor == 2

    with pytest.raises(UsageError, match="it is empty"):
        read("")


@pytest.mark.parametrize("cell", ["8/4/2", "(8, 4, 2)", "8-4-2", "8x4x2", "TP8 PP4 DP2", "tp=8, pp=4, dp=2"])
def test_cells_of_several_columns(cell):
    (row,) = read(f'model,GPUs,TP/PP/DP,mbs,seq\nllama2-70b,64,"{cell}",1,4096\n').rows
    layout = row.case.step.layout

    assert (layout.tensor, layout.pipeline, layout.data) == (8, 4, 2)


def test_a_cell_that_has_other_numbers_than_its_header_is_refused():
    (row,) = read("model,GPUs,TP/PP/DP,mbs,seq\nllama2-70b,64,8/4,1,4096\n").rows

    assert row.error is not None and "'8/4'" in row.error


def test_units_of_a_header():
    (row,) = read("model,GPUs,Seq (K),Batch size (M tokens),mbs\nllama2-7b,8,4,0.524288,1\n").rows

    assert (row.case.step.seq_len, row.case.step.global_batch_sequences) == (4096, 128)


def test_a_column_that_is_said_twice_in_two_ways_says_so():
    (row,) = read("model,GPUs,mbs,LBS,config,Parallelism,seq\nllama2-7b,8,1,2,bf16,TP2,4096\n").rows

    assert row.case.step.layout.micro_batch_size == 1 and row.case.step.layout.tensor == 2
    assert "micro_batch_size is said twice, '1' and '2': the first is read" in row.notes


def test_names_that_are_not_read_are_handed_on():
    assert read("model,tokens/s,Fused kernels,seq\nllama2-7b,1,yes,4096\n").unread == (
        "tokens/s",
        "Fused kernels",
    )


@pytest.mark.parametrize(
    "name",
    ["\u663e\u5b58\u5360\u7528 (MB)", "\u663e\u5b58\u5360\u7528(`MB^1`)", "GPU \u663e\u5b58 (GB)", "\u8017\u65f6 (s)"],
)  # fmt: skip
def test_a_unit_beside_words_of_another_language_is_no_column(name):
    """Memory in MB was read for a micro-batch size, and time in seconds for a sequence."""
    assert columns_of(name) == (None, [name])


def test_a_known_name_beside_words_of_another_language_is_read():
    assert columns_of("TP \u5927\u5c0f") == (("tp",), [])


def test_a_name_is_the_models_where_no_other_column_is():
    (row,) = rows_of("name,seq,gpus,tp,mbs\nllama2-13b,4096,8,2,1\n")
    assert row.case.architecture.name == "llama2-13b"
    (row,) = rows_of("name,model,seq,gpus,tp,mbs\nrun 1,llama2-13b,4096,8,2,1\n")
    assert row.case.architecture.name == "llama2-13b"
    (row,) = rows_of("name,layers,hidden,seq,gpus,mbs\nrun 1,24,2048,2048,8,1\n")
    assert row.case.architecture.n_layers == 24
