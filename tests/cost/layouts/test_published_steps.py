"""Steps that others published and that no fit ran on (benchmarks/unseen): every row has a prediction, and each table's
are off by no more, on average, than is said here. What the rows are: benchmarks/accuracy/unseen.py."""

import pytest

from benchmarks.accuracy.scores import errors
from benchmarks.accuracy.tables import score_table
from benchmarks.accuracy.unseen import UNSEEN
from benchmarks.unseen import DIRECTORY

# MAPE of step times and of peaks.
AT_MOST = {
    "llm_foundry_h100": (0.1, None),
    "nemo_h100_fp8": (0.12, None),
    "megatron_bridge": (0.15, None),
    "nemotron_nano": (0.2, None),
    "nemotron4_h100": (0.1, None),
    "automodel_h100": (0.1, None),
    "torchtitan": (0.13, 0.07),
    "kempner_h200": (0.12, 0.08),
    "fms_fsdp": (0.07, None),
    "skywork_a800": (0.18, 0.08),
    "megascale_a100": (0.05, None),
    "bloom_a100": (0.25, 0.1),
    "nanotron_1b_h100": (0.35, 0.1),
    "llama3_405b_h100": (0.1, None),
    "hf_bert_v100": (0.1, 0.08),
    "tinyllama_a100": (0.12, None),
    "internevo_a100": (0.13, 0.07),
    "dlperf_v100": (0.15, 0.25),
    "pythia_a100": (0.22, None),
    "papers_one_layout": (0.3, None),
    "rtx4090_megatron": (0.06, 0.07),
    "torchao_float8": (0.29, 0.07),
    "primus_mi355x": (0.15, 0.2),
    "flashattention2_a100": (0.15, None),
    "gpt2xl_lightning": (0.15, 0.18),
    "torchtune_offload": (0.25, 0.15),
    "vtrain_multi_a100": (0.1, None),
    "megatron_zero3_a100": (0.35, None),
    "flagperf": (0.18, 0.2),
    "paddle_llama_a100": (0.3, 0.15),
    "universal_llm_trainer": (0.55, 0.15),
    "qwen_finetuning_a100": (0.15, 0.1),
    "litgpt_lora_a100": (None, 0.07),
    "ms_swift_a100": (None, 0.3),
    "llama_factory_a100": (0.3, 0.17),
    "torchtune_lora": (0.15, 0.08),
    "fsdp_qlora": (0.22, 0.12),
    "nemo_lora_h100": (0.22, None),
    "automodel_lora_h100": (0.22, None),
    "ms_swift_megatron_a800": (0.4, 0.18),
    "unsloth_context": (None, 0.15),
    "dgxc_nemo": (0.1, None),
    "dgxc_grok1": (0.08, None),
    "dgxc_finetuning": (0.25, None),
    "jax_fsdp": (0.25, None),
    "jax_vit": (0.36, None),
    "deepspeed_llama_a800": (0.45, 0.3),
    "nemo_long_h100": (0.2, None),
    "nemo_blackwell": (0.12, None),
    "maxtext_tpu": (0.1, None),
    "tpu_recipes": (0.18, None),
    "pai_rapidformer_v100": (0.38, 0.25),
    "gaudi2_llama": (0.14, None),
    "bert_v100": (0.1, None),
    "lumen_mi325x": (0.17, 0.2),
    "swift_qwen3_l40s": (0.15, 0.08),
    "xtuner_a100": (0.17, None),
    "litgpt_a10g": (None, 0.1),
    "papers_2022_a100": (0.25, None),
    "ms_swift_examples": (0.35, 0.18),
    "nemo_long_b200": (0.08, None),
    "trainers_2026": (0.3, 0.06),
    "xorl_qwen35_h100": (0.09, 0.17),
    "xorl_qwen35_8k_h100": (0.12, 0.11),
    "paddlenlp_a100": (0.18, 0.22),
    "lambda_bert": (0.16, None),
    "timm_rtx3090": (0.09, None),
    "float8_nocompile": (0.4, 0.06),
    "halo_lora_b300": (0.27, 0.05),
    "vectorlm_a100": (0.07, None),
    "halo_b300": (0.33, 0.17),
    "trl_b300": (0.6, 0.08),
    "prime_rl": (0.3, 0.1),
    "surogate_lora": (0.25, None),
    "megatron_moe_zoo": (0.33, None),
    "nemo_launcher_a100": (0.3, None),
    "megatron_bert_a100": (0.3, 0.28),
    "qwen3_strategies_h100": (0.24, 0.25),
    "yafsdp_a100": (0.18, None),
    "olmo_core_h100": (0.15, None),
    "automodel_moe_h100": (0.22, None),
    "tprimat_h100_mi300x": (0.46, 0.05),
    "tilearn_llama3": (0.24, 0.28),
    "easycontext_a100": (0.25, None),
    "mindspeed_910b": (0.18, None),
    "vocabulary_pipelines": (0.07, 0.05),
    "qwen3_moe_h200": (0.4, 0.14),
    "mi100_pipeline": (0.55, 0.16),
    "torchtitan_async_tp": (0.17, None),
    "measured_h200": (0.3, 0.05),
    "nemotron_gh200": (0.1, 0.06),
    "together_b200": (0.18, 0.15),
    "titan_gb200": (0.2, 0.42),
    "primus_2026": (0.17, 0.05),
    "nemo_a100_2407": (0.35, None),
    "oke_titan_a100": (0.1, 0.2),
    "cs336": (0.2, 0.13),
    "gpt2_cards": (0.15, 0.08),
    "raschka_gpt2_a100": (0.35, 0.15),
    "torchao_optim": (0.1, 0.05),
    "mlperf": (0.1, None),
    "mlperf_racks": (0.13, None),
    "megatron_core_tests": (0.27, 0.05),
    "twist_hopper": (0.08, None),
    "lumi_mi250x": (0.36, None),
    "megatron_gh200": (0.12, None),
    "megatron_memory_gh200": (None, 0.07),
    "atorch_llama2_a100": (0.11, 0.42),
    "te_gpt2xl_hopper": (0.11, None),
    "lumen_mi350x": (0.2, 0.07),
    "megatron_mi355x": (0.29, 0.08),
    "enoki_h100": (0.62, 0.22),
    "megatron_32b_gh200": (0.14, None),
    "paddle_zb_3090": (0.13, 0.22),
    "scaletorch_910": (0.45, 0.27),
    "swift_h100": (0.14, 0.33),
    "fms_acceleration_a100": (0.17, 0.1),
    "fms_acceleration_moe": (0.3, None),
    "decentralized_v100": (0.24, None),
    "xtuner_megatron_h800": (0.16, None),
    "autotp_h100": (0.35, 0.15),
    "trl_1m_h100": (0.25, 0.3),
    "hf_ulysses_h100": (0.55, 0.4),
    "alpa_zero_a100": (0.23, 0.23),
    "libai_v100": (0.1, None),
    "deepspeed_autotuning_v100": (0.24, None),
    "nanotron_8b_h100": (0.26, None),
    "rtx4090_24gb": (0.14, 0.07),
    "vertex_lora_a100": (None, 0.12),
    "habana_gaudi2": (0.22, 0.24),
    "pangu_deepspeed": (0.75, 0.3),
    "mingpt_a100": (0.4, 0.25),
}


@pytest.mark.parametrize("published", UNSEEN, ids=lambda published: published.name)
def test_published_steps_are_predicted(published):
    frame = score_table(DIRECTORY, published)
    assert list(frame.error.dropna()) == []
    for unit, most in zip(("s", "bytes"), AT_MOST[published.name], strict=True):
        found = errors(frame[f"predicted_{unit}"], frame[f"measured_{unit}"])
        assert (found.num_rows > 0) == (most is not None)
        assert most is None or found.mape <= most


def test_what_ran_is_not_predicted_beyond_the_card():
    """MosaicML's micro-batches are the largest that ran on cards of 80 GB."""
    (published,) = (each for each in UNSEEN if each.name == "llm_foundry_h100")
    frame = score_table(DIRECTORY, published)

    assert frame.predicted_bytes.max() <= 80e9
    assert frame.predicted_bytes.median() >= 0.7 * 80e9
