"""Trainers are found by any spelling of their names, and their states are those that their sources count."""

import pytest

from memadvisor.errors import UsageError
from memadvisor.software import (
    DDP,
    DEEPSPEED,
    MEGATRON_2021,
    PRESETS,
    find_preset,
    preset_named_in,
    with_optimizer,
    with_precision,
)


def state_bytes(software):
    return software.parameter_bytes + software.gradient_bytes + software.optimizer_bytes


def test_every_name_finds_its_trainer_and_each_says_what_it_means():
    for preset in PRESETS:
        assert all(find_preset(name.upper().replace("-", "_")) is preset for name in preset.names)
        assert preset.meaning and preset.source
    assert find_preset("a trainer of one's own") is None


def test_bytes_of_a_parameters_states():
    assert state_bytes(MEGATRON_2021.software) == 18
    assert state_bytes(DEEPSPEED.software) == 16  # arXiv:1910.02054, section 3.1
    assert state_bytes(DDP.software) == 16
    assert state_bytes(with_precision(DDP.software, "fp32")) == 16
    assert state_bytes(with_precision(MEGATRON_2021.software, "fp32")) == 16
    assert state_bytes(with_optimizer(MEGATRON_2021.software, "SGD")) == 10
    assert state_bytes(with_optimizer(DDP.software, "Adam 8-bit")) == 10


@pytest.mark.parametrize(
    ("word", "dtype"),
    [("bf16", "bfloat16"), ("amp_bf16", "bfloat16"), ("bf16-mixed", "bfloat16"), ("FP16", "float16"), ("fp8", "float8_e4m3fn"),
     ("32-true", "float32"), ("tf32", "tf32")],
)  # fmt: skip
def test_precisions(word, dtype):
    assert with_precision(MEGATRON_2021.software, word).compute_dtype == dtype


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
