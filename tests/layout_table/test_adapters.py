"""Columns of low-rank adapters, and the words that say as much."""

import pytest

from memadvisor.layout_table.read import read_rows
from memadvisor.lora import LINEAR, Lora


def read(header, *row):
    (found,) = read_rows([["model", "seq_len", *header], ["llama2-7b", "512", *map(str, row)]], "a table")
    return found


def lora_of(header, *row):
    found = read(header, *row)
    assert found.error is None, found.error
    return found.case.step.software.lora


def test_a_rank_is_enough():
    assert lora_of(["lora_r"], 16) == Lora(rank=16, targets=("query", "value"))
    assert "no lora_targets: query, value are taken" in read(["lora_r"], 16).notes


def test_a_quantised_base_has_adapters_everywhere():
    found = lora_of(["method"], "QLoRA")
    assert (found.rank, found.base, found.targets) == (8, "nf4-dq", LINEAR)


def test_words_of_a_method_beside_a_stage():
    found = read(["method", "n_gpus"], "LoRA + DeepSpeed Zero3", 4)
    assert found.case.step.software.lora is not None
    assert found.case.step.layout.zero_stage == 3


@pytest.mark.parametrize("word", ["Full-parameter", "full", "full fine-tuning"])
def test_all_parameters(word):
    assert lora_of(["method"], word) is None


def test_no_rank_is_no_adapter():
    assert lora_of(["lora_rank"], 0) is None
    assert lora_of(["lora_rank"], "none") is None


@pytest.mark.parametrize("word", ["IA3", "prefix tuning", "prompt_tuning", "BitFit", "GaLore"])
def test_other_adapters_are_refused(word):
    assert "lora, qlora and full are known" in read(["peft"], word).error


@pytest.mark.parametrize("word", ["DoRA", "QDoRA", "rsLoRA", "AdaLoRA", "LoRA+ (loraplus)"])
def test_other_kinds_of_lora_are_taken_for_it(word):
    found = read(["peft"], word)
    assert found.case.step.software.lora is not None
    assert any("is taken for lora" in note for note in found.notes)


def test_words_that_say_nothing_of_adapters_train_all():
    found = read(["train_type"], "dpo")
    assert found.case.step.software.lora is None
    assert any("peft 'dpo' is not understood" in note for note in found.notes)


def test_peft_widens_what_it_does_not_quantise():
    """Under autocast the base in 16 bits leaves nothing to cast; what is widened is as wide as the residual stream."""
    for framework, base, widened in (
        ("TRL", "nf4", True),
        ("TRL", "gptq", False),
        ("LLaMA-Factory", "nf4", False),
        ("Unsloth", "nf4", False),
        ("fms-acceleration (Hugging Face Trainer)", "nf4", False),
    ):
        software = read(["framework", "lora_rank", "quantization"], framework, 8, base).case.step.software
        assert software.lora.widened == software.autocast == widened


def test_unsloth_keeps_recomputed_layers_inputs_on_the_host():
    for recompute, share in (("full", 1.0), ("none", 0.0)):
        found = read(["framework", "lora_rank", "recompute"], "Unsloth", 8, recompute)
        assert found.case.step.layout.offload_activations == share
        assert not found.case.step.software.reference_code


@pytest.mark.parametrize(
    ("said", "once"), [("DeepEP", True), ("HybridEP", True), ("alltoall", False), ("", False)]
)
def test_some_dispatchers_send_a_token_to_each_rank_once(said, once):
    assert read(["dispatcher"], said).case.step.software.sends_once == once


def test_a_balanced_gate_gives_experts_in_turn():
    assert read(["fake_balanced_gate"], "true").case.step.software.experts_in_turn
    assert not read(["experts_in_turn"], "").case.step.software.experts_in_turn


def test_tokens_go_to_their_experts_in_eight_bits():
    assert read(["dispatch_dtype"], "fp8").case.step.software.dispatch_bytes == 1.0


@pytest.mark.parametrize(
    ("version", "keeps"),
    [("0.41.1", True), ("0.43.1", True), ("<0.43.2", True), ("0.43.2", False), ("0.44", False), ("", False)],
)
def test_products_of_old_releases_of_bitsandbytes_keep_their_inputs(version, keeps):
    """https://github.com/bitsandbytes-foundation/bitsandbytes/pull/1270, of July 2024."""
    assert lora_of(["lora_rank", "bnb", "bitsandbytes_version"], 8, "nf4", version).keeps_inputs is keeps


def test_what_is_no_release_is_named():
    assert "bitsandbytes_version is 'new'" in read(["lora_rank", "bnb", "bnb_version"], 8, "nf4", "new").error


def test_the_papers_own_script_casts_what_it_does_not_quantise_to_16_bits():
    found = read(["framework", "lora_rank"], "QLoRA", 64).case.step.software
    assert (found.name, found.lora.base, found.lora.widened) == ("qlora", "nf4-dq", False)
    assert (found.parameter_bytes, found.paged_bytes, found.autocast) == (2, 8, False)


@pytest.mark.parametrize(
    ("words", "rank", "base"),
    [
        ("4-bit QLoRA", 8, "nf4-dq"),
        ("QLoRA (4bit)", 8, "nf4-dq"),
        ("QLoRA nf4 r=64", 64, "nf4"),
        ("8-bit LoRA", 8, "int8"),
        ("LoRA int8, rank 16", 16, "int8"),
        ("LoRA 16-bit", 8, "16bit"),
        ("LoRA r16 alpha32", 16, "16bit"),
        ("LoRA SFT (r=64)", 64, "16bit"),
    ],
)
def test_a_method_tells_the_bits_of_its_base_and_its_rank(words, rank, base):
    found = read(["method"], words)
    lora = found.case.step.software.lora
    assert (lora.rank, lora.base) == (rank, base)
    assert not any("not understood" in note for note in found.notes)


def test_the_bits_of_a_base_are_no_rank_in_a_column_of_adapters():
    lora = lora_of(["peft"], "LoRA 8-bit")
    assert (lora.rank, lora.base) == (8, "int8")


def test_what_is_said_beside_adapters_is_read():
    found = read(["method"], "LoRA r=64 + gradient checkpointing with FlashAttention 2")
    assert found.case.step.software.lora.rank == 64
    assert found.case.step.layout.recompute == "full"
    assert not any("not understood" in note for note in found.notes)


def test_a_dtype_beside_all_parameters():
    found = read(["method"], "Full fine-tuning (fp32)")
    assert found.case.step.software.lora is None
    assert found.case.step.software.compute_dtype == "float32"


@pytest.mark.parametrize(
    ("framework", "method", "recompute"),
    [
        ("", "QLoRA", "full"),
        ("Hugging Face", "8-bit LoRA", "full"),
        ("Unsloth", "LoRA", "full"),
        ("Hugging Face", "LoRA", "none"),
        ("torchtune", "QLoRA", "none"),
        ("litgpt", "QLoRA", "none"),
    ],
)
def test_peft_recomputes_layers_of_a_quantised_base_unasked(framework, method, recompute):
    found = read(["framework", "method"], framework, method)
    assert found.case.step.layout.recompute == recompute
    assert any("no recompute: full is taken" in note for note in found.notes) == (recompute == "full")


def test_what_is_said_of_recomputation_counts_for_a_quantised_base():
    assert read(["method", "recompute"], "QLoRA", "none").case.step.layout.recompute == "none"


def test_a_name_in_four_bits_is_a_base_in_four_bits():
    (found,) = read_rows([["model", "seq_len", "method"], ["unsloth/Meta-Llama-3.1-8B-bnb-4bit", "512", "LoRA (all linear, rank 64)"]], "a table")  # fmt: skip
    lora = found.case.step.software.lora
    assert (lora.rank, lora.base, lora.targets) == (64, "nf4-dq", LINEAR)
    assert found.case.architecture.name == "llama3-8b"


def test_an_optimizer_among_the_words_of_a_method():
    found = read(["method", "gpus"], "Full FT + 8bit Adam", 1)
    assert found.case.step.software.optimizer_bytes == read(["optimizer", "gpus"], "adam8bit", 1).case.step.software.optimizer_bytes  # fmt: skip
    assert found.case.step.software.lora is None and "not understood" not in "".join(found.notes)
    assert lora_of(["method"], "8-bit LoRA").base == "int8"
