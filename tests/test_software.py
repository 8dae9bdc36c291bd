"""Trainers are found by any spelling of their names, and their states are those that their sources count."""

import pytest

from memadvisor.errors import UsageError
from memadvisor.software import DEEPSPEED, MEGATRON_2021, MODERN, PRESETS, find_preset, preset_named_in
from memadvisor.software_dtypes import with_optimizer, with_plain_loss, with_precision
from memadvisor.software_torch import DDP, FSDP, HUGGING_FACE, QLORA, TORCHTUNE


def state_bytes(software):
    return software.parameter_bytes + software.gradient_bytes + software.optimizer_bytes


def test_every_name_finds_its_trainer_and_each_says_what_it_means():
    for preset in PRESETS:
        assert all(find_preset(name.upper().replace("-", "_")) is preset for name in preset.names)
        assert preset.meaning and preset.source
    assert find_preset("a trainer of one's own") is None


def test_an_update_in_one_kernel_goes_over_its_bytes_once_and_has_no_lists():
    usual = with_optimizer(HUGGING_FACE.software, "adamw_torch")
    assert (usual.update_passes, usual.updates_lists) == (80 / 28, True)
    for name in ("adamw_torch_fused", "adamw_bnb_8bit", "FusedAdam"):
        fused = with_optimizer(HUGGING_FACE.software, name)
        assert (fused.update_passes, fused.updates_lists) == (1.0, False)


def test_bytes_of_a_parameters_states():
    assert state_bytes(MEGATRON_2021.software) == 16
    assert state_bytes(with_precision(MEGATRON_2021.software, "bf16")) == 18
    assert state_bytes(DEEPSPEED.software) == 16  # arXiv:1910.02054, section 3.1
    assert state_bytes(DDP.software) == 16
    assert state_bytes(with_precision(DDP.software, "fp32")) == 16
    assert state_bytes(with_precision(MEGATRON_2021.software, "fp32")) == 16
    assert state_bytes(with_optimizer(MEGATRON_2021.software, "SGD")) == 8
    assert state_bytes(with_optimizer(DDP.software, "Adam 8-bit")) == 10
    assert state_bytes(with_precision(FSDP.software, "bf16-true")) == 8 == state_bytes(TORCHTUNE.software)
    assert state_bytes(with_optimizer(TORCHTUNE.software, "fused AdamW")) == 8
    assert state_bytes(with_optimizer(TORCHTUNE.software, "AdamW 8bit")) == 6
    # bitsandbytes' state is in fp32, or in the bits that it names.
    assert state_bytes(with_optimizer(TORCHTUNE.software, "adamw_bnb_32bit")) == 12
    assert state_bytes(with_optimizer(TORCHTUNE.software, "bitsandbytes.optim.PagedAdamW8bit")) == 6
    assert state_bytes(with_optimizer(TORCHTUNE.software, "paged_lion_8bit")) == 5
    assert state_bytes(with_optimizer(QLORA.software, "paged_adamw_8bit")) == 6
    assert state_bytes(QLORA.software) == 12


@pytest.mark.parametrize(
    ("word", "dtype"),
    [("bf16", "bfloat16"), ("amp_bf16", "bfloat16"), ("bf16-mixed", "bfloat16"), ("FP16", "float16"), ("fp8", "float8_e4m3fn"),
     ("32-true", "float32"), ("tf32", "tf32")],
)  # fmt: skip
def test_precisions(word, dtype):
    assert with_precision(MEGATRON_2021.software, word).compute_dtype == dtype


def test_autocast_is_over_parameters_in_fp32_and_only_where_no_trainer_casts_them():
    for word in ("amp-fp16", "amp_bf16", "autocast bf16"):
        asked = with_precision(MODERN.software, word)
        assert asked.autocast and state_bytes(asked) == 16
        assert not with_precision(FSDP.software, word).autocast
    assert not with_precision(MODERN.software, "bf16").autocast
    assert with_precision(DDP.software, "fp16").autocast and not with_precision(DDP.software, "fp32").autocast


def test_names_of_whole_projects_say_less_than_a_trainer_beside_them():
    assert find_preset("Hugging Face Trainer") is HUGGING_FACE
    assert find_preset("HuggingFace Accelerate + DeepSpeed") is DEEPSPEED
    assert preset_named_in("https://huggingface.co/blog/some-model") is None


def test_a_methods_name_is_a_trainers_where_it_stands_alone():
    assert find_preset("QLoRA") is QLORA
    assert find_preset("TRL QLoRA") is HUGGING_FACE
    assert find_preset("torchtune, QLoRA") is TORCHTUNE


@pytest.mark.parametrize(
    ("name", "optimizer_bytes"),
    [
        ("AdamW (fused)", 8), ("adamw_torch_fused", 8), ("AdamW, ZeRO-1", 8), ("DeepSpeed CPU Adam", 8), ("adam_fp32", 8),
        ("schedule_free_adamw", 8), ("Adan", 12), ("Adam-mini", 4), ("RMSprop", 4), ("LOMO", 0),
        ("bnb AdamW8bit", 2), ("AdamWFp8", 2), ("ao 8-bit", 2), ("Adam 4-bit", 1), ("AdamW4bit", 1),
        ("SGD", 0), ("SGD (momentum=0.9)", 4), ("Muon + AdamW", 4),
    ],
)  # fmt: skip
def test_optimizers_are_known_in_any_words(name, optimizer_bytes):
    """Of fp32 parameters; of several the first, which has the matrices."""
    assert with_optimizer(DDP.software, name).optimizer_bytes == optimizer_bytes


def test_updates_in_few_bits_are_one_kernel_as_fused_ones_are():
    """bitsandbytes', and torchao's, which are compiled (torchao/optim/README.md)."""
    for name in ("AdamW (fused)", "AdamW 8-bit", "AdamW4bit", "AdamWFp8"):
        assert with_optimizer(DDP.software, name).update_passes == 1.0


def test_a_plain_loop_of_a_model_in_16_bits_casts_no_logits():
    """F.cross_entropy takes them as they are; classes of Hugging Face's cast them, and autocast does."""
    pure = with_precision(DDP.software, "pure bf16")
    assert with_plain_loss(pure).loss_bytes == 2
    assert with_plain_loss(DDP.software).loss_bytes == 4
    assert with_plain_loss(with_precision(HUGGING_FACE.software, "pure bf16")).loss_bytes == 4


@pytest.mark.parametrize("name", ["GaLore AdamW", "Shampoo", "magic"])
def test_optimizers_whose_state_is_of_another_kind_are_not_taken_for_adam(name):
    with pytest.raises(UsageError, match="is no known optimizer"):
        with_optimizer(DDP.software, name)


def test_words_that_are_no_precision_or_optimizer():
    with pytest.raises(UsageError):
        with_precision(DDP.software, "int2")
    with pytest.raises(UsageError):
        with_optimizer(DDP.software, "magic")


def test_a_source_names_the_trainer_that_ran():
    named = preset_named_in("huggingface.co/spaces/nanotron/ultrascale-playbook fragments/benchmarks.html")
    assert named is not None and named.software.name == "nanotron"
    assert preset_named_in("arXiv:2104.04473 table 1") is None
    deepspeed = preset_named_in("https://github.com/microsoft/Megatron-DeepSpeed")
    assert (
        deepspeed is not None and deepspeed.software.name == "megatron-deepspeed"
    )  # the longest name counts
