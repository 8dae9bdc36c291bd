"""`memadvisor estimate` answers for one layout and for tables; a mistake is one line and exit code 2."""

import csv
import json
import subprocess
import sys

import pytest

from memadvisor.cli.main import main

LAYOUT = [
    "estimate",
    "--model",
    "llama3-8b",
    "--gpus",
    "8xH100,nodes=2",
    "--seq",
    "4096",
    "--batch",
    "64",
    "--tp",
    "8",
    "--zero",
    "1",
]
TABLE = (
    "model,gpu,n_gpus,tp,pp,dp,seq_len,micro_batch_size,global_batch_seqs,act_ckpt,zero_stage\n"
    "llama3-8b,H100-80GB-SXM,8,8,1,1,4096,1,16,none,0\n"
    "llama3-8b,H100-80GB-SXM,8,8,1,2,4096,1,16,none,0\n"
    "no such model,H100-80GB-SXM,8,8,1,1,4096,1,16,none,0\n"
    "llama3-8b,A100_80GB,16,8,2,1,4096,,16,full,1\n"
)


def test_one_layout_in_words(capsys):
    assert main(LAYOUT) == 0
    said = capsys.readouterr().out

    assert "8.03 G parameters" in said and "DGX H100" in said and "datasheet" in said
    assert "dp 2 x tp 8, ZeRO 1" in said
    assert said.count("predicted") >= 2 and "Predicted memory" in said and "fits" in said


def test_layers_that_differ_are_named_and_what_of_them_was_never_measured(capsys):
    words = [
        "estimate",
        "--model",
        "qwen3-next-80b-a3b",
        "--gpus",
        "8xH100,nodes=16",
        "--seq",
        "4096",
        "--ep",
        "8",
        "--zero",
        "1",
    ]
    main([*words, "--json"])
    said = json.loads(capsys.readouterr().out)
    main(words)
    shown = capsys.readouterr().out

    assert said["model"]["layer_kinds"] == [
        {"layers": "gated delta net and experts", "num_layers": 36},
        {"layers": "attention and experts", "num_layers": 12},
    ]
    assert said["predicted"]["time_s"]["recurrence"] > 0
    assert "36 of gated delta net and experts, 12 of attention and experts" in shown
    assert "compared with 13 published steps" in shown


IMAGES = [
    "estimate",
    "--model",
    "llava-1.5-7b",
    "--gpus",
    "8xH100",
    "--seq",
    "2048",
    "--micro-batch",
    "1",
    "--zero",
    "1",
]


def test_a_tower_of_images_is_named_and_what_is_assumed_of_it(capsys):
    main(IMAGES)
    without = capsys.readouterr().out
    main([*IMAGES, "--images", "2", "--freeze-vision"])
    frozen = capsys.readouterr().out
    main([*IMAGES, "--images", "2", "--json"])
    tower = json.loads(capsys.readouterr().out)["model"]["tower"]

    assert "324 M parameters, trained; no image is counted (--images N)" in without
    assert "frozen; 2 images of 576 tokens (576 patches) in each sequence" in frozen
    assert (tower["num_params"], tower["images"], tower["is_trained"]) == (324_487_168, 2, True)


def test_a_search_names_model_machines_and_images(capsys):
    words = [
        "estimate",
        "--model",
        "llava-1.5-7b",
        "--gpus",
        "2xH100",
        "--seq",
        "2048",
        "--batch",
        "8",
        "--images",
        "1",
    ]
    main([*words, "--lora-rank", "8"])
    said = capsys.readouterr().out

    assert "model      llava-1.5-7b: 7.06 G parameters; 2048 tokens x 8 sequences a step" in said
    assert "2 x H100-SXM-80GB" in said and "1 image of 576 tokens" in said
    assert "frozen" in said and "trained    LoRA of rank 8" in said


@pytest.mark.parametrize(
    ("more", "named"),
    [
        (["--model", "llama3-8b", "--images", "1"], "no vision tower"),
        (["--model", "qwen2.5-vl-7b", "--images", "1"], "depends on its size"),
        (["--model", "llava-1.5-7b", "--images", "4"], "more than the sequence's 2048"),
        (["--model", "llava-1.5-7b", "--images", "0"], "--images"),
        (["--model", "llava-1.5-7b", "--images", "1", "--cp", "2"], "images is not modelled"),
    ],
)
def test_images_that_cannot_be_are_one_line(more, named, capsys):
    assert (
        main(["estimate", "--gpus", "8xH100", "--seq", "2048", "--zero", "1", "--micro-batch", "1", *more])
        == 2
    )
    said = capsys.readouterr().err

    assert named in said and "Hint" in said and len(said.splitlines()) == 1


def test_one_layout_as_json(capsys):
    assert main([*LAYOUT, "--micro-batch", "4", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    predicted = said["predicted"]

    assert said["layout"]["micro_batch_size"] == 4 and said["global_batch_seqs"] == 64
    assert sum(predicted["time_s"].values()) == pytest.approx(predicted["step_time_s"])
    worst = predicted["memory_bytes"]["worst"]
    assert sum(worst.values()) == pytest.approx(predicted["total_memory_bytes"], abs=len(worst))
    assert said["cluster"]["across"]["bytes_per_s"] == 50e9


def test_tensor_parallelism_on_a_grid_is_named(capsys):
    """Without sequence parallelism, for grids part tokens by themselves."""
    words = ["estimate", "--model", "llama3-8b", "--gpus", "8xH100", "--seq", "2048", "--micro-batch", "1"]
    main([*words, "--tp", "8", "--tp-kind", "2.5d", "--tp-depth", "2", "--json"])
    layout = json.loads(capsys.readouterr().out)["layout"]
    assert (layout["tensor_kind"], layout["tensor_depth"], layout["sequence_parallel"]) == ("2.5d", 2, False)
    main([*words, "--tp", "8", "--tp-kind", "3d"])
    assert "tensor parallel on a 3d grid" in " ".join(capsys.readouterr().out.split())


def test_adapters_beside_a_quantised_base(capsys):
    """7 matrices of rank 16 in 32 layers: 41.9 M parameters, in fp32 with gradients and moments 16 bytes each."""
    words = ["estimate", "--model", "llama3-8b", "--gpus", "1xRTX4090", "--seq", "512", "--micro-batch", "1"]
    words += ["--framework", "huggingface", "--recompute", "full", "--lora-rank", "16"]
    assert main([*words, "--quantized-base", "nf4"]) == 0
    assert "LoRA of rank 16 beside query, key" in (said := capsys.readouterr().out) and "41.9 M" in said
    assert main([*words, "--quantized-base", "nf4", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["software"]["lora"]["base"] == "nf4" and said["software"]["lora"]["widened"]
    assert said["predicted"]["memory_bytes"]["worst"]["optimizer"] == 8 * 41_943_040


def test_what_lets_a_whole_fine_tuning_fit_one_card_is_named(capsys):
    """Llama 3.1 8B on one RTX 4090, 18.9 GiB of tensors: torchtune's README.md of September 2024."""
    words = ["--model", "llama3-8b", "--seq", "2048", "--gpus", "1xRTX4090", "--micro-batch", "2"]
    words += ["--recompute", "full", "--framework", "torchtune", "--zero", "0", "--json"]
    words += ["--optimizer", "paged_adamw_8bit", "--optimizer-in-backward"]
    main(["estimate", *words])
    memory = json.loads(capsys.readouterr().out)["predicted"]["memory_bytes"]["worst"]
    tensors = sum(size for name, size in memory.items() if name not in ("allocator", "context"))
    assert tensors / 2**30 == pytest.approx(18.9, rel=0.05)
    words.remove("--json")
    main(["estimate", *words])
    said = capsys.readouterr().out
    assert "optimizer state paged to the host" in said and "updates in the backward" in said


def test_the_schedule_drawn(tmp_path, capsys):
    words = ["estimate", "--model", "tinyllama-1.1b", "--gpus", "8xH100", "--seq", "1024", "--batch", "16", "--micro-batch", "1",
             "--pp", "4", "--show-schedule", "-o", str(tmp_path / "page.html")]  # fmt: skip
    for schedule in ("zb-h1", "dualpipe", "interleaved"):
        assert main([*words, "--schedule", schedule]) == 0
        said = capsys.readouterr()
        assert "device 3" in said.out and "page.html" in said.err
    assert "<html" in (tmp_path / "page.html").read_text()


def test_some_layers_alone_run_again(capsys):
    words = [
        "estimate",
        "--model",
        "llama3-8b",
        "--gpus",
        "8xH100",
        "--seq",
        "4096",
        "--tp",
        "2",
        "--pp",
        "4",
        "--batch",
        "8",
    ]
    assert main([*words, "--micro-batch", "1", "--recompute", "full", "--recompute-layers", "2"]) == 0
    assert "full recomputation of 25% of the layers" in " ".join(capsys.readouterr().out.split())


def test_a_layout_that_does_not_fit_ends_with_1(capsys):
    assert main([*LAYOUT, "--memory", "8GiB"]) == 1
    said = capsys.readouterr().out
    assert "does not fit" in said and "next       with --batch N" in said


def test_a_layout_that_is_likelier_to_fit_than_not_may_not(capsys):
    """And ends with 1 all the same, for one in ten such crashes are too many."""
    words = [
        "estimate",
        "--model",
        "llama3-70b",
        "--gpus",
        "8xMI300X",
        "--seq",
        "8192",
        "--zero",
        "3",
        "--framework",
        "fsdp",
    ]
    assert main([*words, "--recompute", "full", "--micro-batch", "2", "--json"]) == 1
    assert 0.1 < json.loads(capsys.readouterr().out)["predicted"]["p_oom"] < 0.5
    main([*words, "--recompute", "full", "--micro-batch", "2"])
    assert "predicted  may not fit: " in capsys.readouterr().out


def test_mfu_is_named_by_its_peak_and_by_how_attention_is_counted(capsys):
    words = [
        "estimate",
        "--model",
        "llama3-8b",
        "--gpus",
        "8xH100",
        "--seq",
        "131072",
        "--cp",
        "8",
        "--zero",
        "3",
    ]
    main([*words, "--json"])
    predicted = json.loads(capsys.readouterr().out)["predicted"]
    main(words)
    said = capsys.readouterr().out

    assert predicted["mfu_halved"] < 0.7 * predicted["mfu"]
    assert f"({predicted['mfu_halved']:.1%}".replace("%", " %") + " with causal attention halved)" in said
    assert "of 990 TFLOP/s each" in said and "x 1 sequence a step" in said


def test_columns_of_a_table_that_are_not_read_are_named(tmp_path, capsys):
    (tmp_path / "layouts.csv").write_text("model,GPUs,tokens/s,Fused kernels\nllama2-7b,8,1,yes\n")
    assert main(["estimate", "--table", str(tmp_path / "layouts.csv"), "-o", str(tmp_path / "out.csv")]) == 0

    assert "'tokens/s', 'Fused kernels'" in capsys.readouterr().err


def test_llama_3_s_own_layout_is_not_said_for_sure_not_to_fit(capsys):
    """It ran (arXiv:2407.21783, table 4, without recomputation); it is predicted 10 % above what a card's sheet has."""
    words = [
        "estimate",
        "--model",
        "llama3-405b",
        "--gpus",
        "8xH100,nodes=2048",
        "--seq",
        "8192",
        "--batch",
        "2048",
    ]
    layout = ["--tp", "8", "--pp", "16", "--chunks", "8", "--schedule", "interleaved", "--zero", "2", "--micro-batch", "1"]  # fmt: skip
    assert main([*words, *layout]) == 1
    assert "predicted  likely does not fit: " in capsys.readouterr().out


def test_options_that_a_table_does_not_read_are_named(tmp_path, capsys):
    (tmp_path / "layouts.csv").write_text("model,n_gpus,seq_len\nllama3-8b,8,2048\n")
    words = ["estimate", "--table", str(tmp_path / "layouts.csv"), "-o", str(tmp_path / "out.csv")]
    assert main([*words, "--seq", "4096", "--attention", "unfused"]) == 0
    assert (
        "no effect with --table, whose columns describe each row: --seq, --attention\n"
        in capsys.readouterr().err
    )
    assert main(words) == 0
    assert "no effect" not in capsys.readouterr().err


def test_a_table(tmp_path, capsys):
    (tmp_path / "layouts.csv").write_text(TABLE)
    assert main(["estimate", "--table", str(tmp_path / "layouts.csv"), "-o", str(tmp_path / "out.csv")]) == 0
    assert "4 rows, 2 of them with an error" in capsys.readouterr().err
    rows = list(csv.DictReader((tmp_path / "out.csv").open()))

    assert [bool(row["error"]) for row in rows] == [False, True, True, False]
    assert rows[1]["step_time_s"] == rows[1]["fits"] == rows[2]["memory_parameter_bytes"] == ""
    for row in (rows[0], rows[3]):
        assert row["fits"] in ("true", "false") and 0 < float(row["mfu"]) < 1
        times = [float(value) for name, value in row.items() if name.startswith("time_")]
        assert sum(times) == pytest.approx(float(row["step_time_s"]), rel=1e-4)
        memory = {name: float(value) for name, value in row.items() if name.startswith("memory_")}
        peak = sum(memory.values()) - memory["memory_context_bytes"]
        assert peak == pytest.approx(float(row["peak_memory_bytes"]), abs=10)
    assert "micro_batch_size" in rows[3]["note"]


@pytest.mark.parametrize(
    "words",
    [
        ["--gpus", "8xH100"],
        ["--model", "llama3-8b", "--seq", "128"],
        ["--model", "llama3-8b", "--seq", "128", "--gpus", "8xH100"],
        ["--model", "llama9", "--seq", "128", "--gpus", "8xH100", "--tp", "8"],
        ["--model", "gpt2", "--seq", "128", "--gpus", "8xH100", "--tp", "3"],
        ["--model", "gpt2", "--seq", "128", "--gpus", "8xH100", "--dp", "4"],
        ["--model", "gpt2", "--seq", "128", "--gpus", "8xH100", "--tp", "0"],
        ["--model", "gpt2", "--seq", "-1", "--gpus", "H100"],
        ["--model", "gpt2", "--seq", "128", "--gpus", "H100", "--recompute-layers", "2"],
        [
            "--model",
            "gpt2",
            "--seq",
            "128",
            "--gpus",
            "H100",
            "--recompute",
            "full",
            "--recompute-layers",
            "0",
        ],
        ["--model", "gpt2", "--seq", "128", "--gpus", "8xH100", "--dp", "8", "--batch", "12"],
        ["--model", "gpt2", "--seq", "128", "--gpus", "H100", "--precision", "int1"],
        ["--model", "gpt2", "--seq", "128", "--gpus", "H100", "--framework", "none such"],
        ["--model", "gpt2", "--seq", "128", "--gpus", "H100", "--offload-activations", "2"],
        ["--model", "gpt2", "--seq", "128", "--gpus", "H100", "-o", "x"],
        ["--model", "gpt2", "--seq", "128", "--gpus", "H100", "--quantized-base", "nf4"],
        ["--model", "gpt2", "--seq", "128", "--gpus", "H100", "--lora-rank", "8", "--lora-targets", "head"],
        ["--model", "gpt2", "--seq", "128", "--gpus", "H100", "--lora-rank", "8", "--quantized-base", "five"],
        [
            "--model",
            "gpt2",
            "--seq",
            "128",
            "--gpus",
            "H100",
            "--micro-batch",
            "1",
            "--batch",
            "2",
            "--optimizer-in-backward",
        ],
        ["--table", "missing.csv", "-o", "out.csv"],
        ["--table", "missing.csv"],
        ["--model", "gpt2", "--seq", "128", "--cluster", "missing.toml"],
    ],
)
def test_a_mistake_is_one_line(words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["estimate", *words]) == 2
    said = capsys.readouterr()

    assert said.out == "" and said.err.startswith("memadvisor estimate: ") and said.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_neither_torch_nor_pandas_is_imported():
    """A thousand rows take less than the import of either."""
    program = (
        "import sys; from memadvisor.cli.main import main;"
        f"main({LAYOUT!r}); print(sorted({{'torch', 'pandas', 'plotly', 'scipy'}} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert done.stderr.strip() == "[]"


def test_a_strange_argument_is_told_with_the_commands_own_help(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["estimate", "llama3-8b"])

    assert ended.value.code == 2
    assert "memadvisor estimate: unrecognized arguments: llama3-8b" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["estimate", "of two\nlines"])
    assert len(capsys.readouterr().err.splitlines()) == 1
