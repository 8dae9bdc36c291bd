"""What a layer of Hugging Face's classes keeps, by formula and as captured from the classes themselves."""

import json

import pytest
import torch

import memadvisor
from memadvisor.analyzers.activations import activations
from memadvisor.analyzers.checkpoint_frames import traced_calls
from memadvisor.architectures.config_encoders import ENCODER_READERS
from memadvisor.architectures.hugging_face import architecture_from_config
from memadvisor.architectures.load import load_architecture
from memadvisor.cost.layouts.coefficients import FITTED
from memadvisor.cost.layouts.memory import device_contents, stage_memory
from memadvisor.cost.layouts.saved import chunk_saved_bytes, layer_saved_bytes
from memadvisor.layout import Layout, TrainingStep
from memadvisor.software import DEEPSPEED
from memadvisor.software_traits import Software

BATCH, TOKENS = 2, 16
SHAPE = {"hidden_size": 64, "num_attention_heads": 4, "vocab_size": 96, "intermediate_size": 160}
SPECIAL = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0)
CONFIGS = {
    "gpt2": {"n_inner": 160, "n_positions": 32},
    "gpt2 without dropout": {"n_inner": 160, "attn_pdrop": 0.0, "resid_pdrop": 0.0},
    "gpt2 with one-kernel gelu": {"n_inner": 160, "activation_function": "gelu_pytorch_tanh"},
    "llama": {"num_key_value_heads": 2},
    "llama sdpa": {"num_key_value_heads": 2},
    "olmo2": {"num_key_value_heads": 2},
    "opt": {"ffn_dim": 160, "word_embed_proj_dim": 64, "max_position_embeddings": 32},
    "bert": {},
    "esm": {"mask_token_id": 3},
    "esm with rotary positions": {"mask_token_id": 3, "position_embedding_type": "rotary"},
    "layoutlm": {},
}


SOURCE, TARGET = 16, 8
STACKS = {"d_model": 64, "vocab_size": 96, "decoder_start_token_id": 0, "pad_token_id": 1}
WIDTHS = {
    f"{stack}_{key}": size
    for stack in ("encoder", "decoder")
    for key, size in (("attention_heads", 4), ("ffn_dim", 160))
}
T5 = {"num_heads": 4, "d_kv": 16, "d_ff": 160}
ENCODER_DECODERS = {
    "t5": T5,
    "t5 gated": {**T5, "feed_forward_proj": "gated-gelu"},
    "bart": WIDTHS,
    "blenderbot": WIDTHS,
    "bart with all dropouts": {**WIDTHS, "attention_dropout": 0.1, "activation_dropout": 0.1},
}


def eager(model, batch=BATCH, tokens=TOKENS, attention="eager", dtype="bfloat16"):
    code = Software(reference_code=True, fused_attention=attention == "sdpa", compute_dtype=dtype)
    step = TrainingStep(layout=Layout(micro_batch_size=batch), seq_len=tokens, software=code)
    return layer_saved_bytes(model, step, model.n_layers - 1)


def captured_bytes(model, inputs, directory):
    """Of all storages that autograd keeps; statistics of norms, of one number a token, are left out."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with memadvisor.profile(directory, trace_step=1) as prof:
        for _ in range(2):
            model(**inputs).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    found = activations(traced_calls(prof.run.ranks[0]))
    return sum(life.size_bytes for life in found.lifetimes if life.size_bytes > 4 * BATCH * TOKENS)


def model_of(config):
    transformers = pytest.importorskip("transformers")
    is_masked = config.model_type in ENCODER_READERS
    auto = transformers.AutoModelForMaskedLM if is_masked else transformers.AutoModelForCausalLM
    return auto.from_config(config)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_layer_keeps_what_the_class_of_it_is_seen_to_keep(name, dtype, tmp_path, monkeypatch):
    """In every byte: three layers' less two layers'. Dropouts keep masks of bytes, as on an accelerator."""
    transformers = pytest.importorskip("transformers")
    monkeypatch.setattr(torch.nn.functional, "dropout", masks_of_bytes)
    kind, attention = name.split()[0], "sdpa" if name.endswith("sdpa") else "eager"
    fields = {**SHAPE, **SPECIAL, **CONFIGS[name], "attn_implementation": attention}
    totals = []
    for layers in (2, 3):
        config = transformers.AutoConfig.for_model(kind, num_hidden_layers=layers, **fields)
        model = model_of(config).to(getattr(torch, dtype)).train()
        ids = torch.full((BATCH, TOKENS), 5)  # no padding
        totals.append(captured_bytes(model, {"input_ids": ids, "labels": ids}, tmp_path / f"{layers}"))
    described = architecture_from_config(json.loads(config.to_json_string()), kind)

    assert eager(described, attention=attention, dtype=dtype) == totals[1] - totals[0]


def masks_of_bytes(x, p=0.5, training=True, inplace=False):
    return torch.native_dropout(x, p, training)[0] if p else x


@pytest.mark.parametrize("gated", [False, True])
def test_a_layer_that_scales_its_parts_keeps_their_results(gated, tmp_path):
    """DINOv2's, in every byte; statistics of its norms are as many as numbers of a sequence's tokens, and left out."""
    transformers = pytest.importorskip("transformers")
    fields = {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "image_size": 30,
        "patch_size": 8,
        "use_swiglu_ffn": gated,
    }
    totals = []
    for layers in (2, 3):
        config = transformers.Dinov2Config(num_hidden_layers=layers, **fields, attn_implementation="eager")
        model = transformers.Dinov2ForImageClassification(config).to(torch.bfloat16).train()
        inputs = {
            "pixel_values": torch.zeros(BATCH, 3, 30, 30, dtype=torch.bfloat16),
            "labels": torch.zeros(BATCH, dtype=torch.long),
        }
        totals.append(captured_bytes(model, inputs, tmp_path / f"{layers}"))
    described = architecture_from_config(json.loads(config.to_json_string()), "dinov2")

    assert eager(described, tokens=10) == totals[1] - totals[0]


@pytest.mark.parametrize("name", ENCODER_DECODERS)
def test_an_encoder_and_a_decoder_layer_keep_what_their_classes_are_seen_to_keep(name, tmp_path, monkeypatch):
    """In every byte, a source of 16 tokens and a target of 8; and the encoder's result once for all layers."""
    transformers = pytest.importorskip("transformers")
    monkeypatch.setattr(torch.nn.functional, "dropout", masks_of_bytes)
    kind = name.split()[0]
    names = ("num_layers", "num_decoder_layers") if kind == "t5" else ("encoder_layers", "decoder_layers")

    def kept(encoder, decoder):
        fields = {**STACKS, **ENCODER_DECODERS[name], "attn_implementation": "eager"}
        layers = dict(zip(names, (encoder, decoder), strict=True))
        config = transformers.AutoConfig.for_model(kind, **fields, **layers)
        model = transformers.AutoModelForSeq2SeqLM.from_config(config).to(torch.bfloat16).train()
        inputs = {
            "input_ids": torch.full((BATCH, SOURCE), 2),
            "labels": torch.full((BATCH, TARGET), 2),
        }
        described = architecture_from_config(json.loads(config.to_json_string()), kind)
        return described, captured_bytes(model, inputs, tmp_path / f"{encoder}-{decoder}")

    (model, least), (_, encoder), (_, decoder) = kept(2, 2), kept(3, 2), kept(2, 3)
    code = Software(reference_code=True, fused_attention=False)
    step = TrainingStep(
        layout=Layout(micro_batch_size=BATCH), seq_len=SOURCE, target_len=TARGET, software=code
    )

    assert layer_saved_bytes(model, step, 0) == encoder - least
    assert layer_saved_bytes(model, step, 2) == decoder - least
    layers = 2 * (encoder - least) + 2 * (decoder - least)
    result = 2 * BATCH * SOURCE * model.hidden
    last_norm = (model.reference_code.norm_bytes - 2) * result / 2 + result / 2 if model.final_norm else 0
    assert chunk_saved_bytes(model, step, (0, 1, 2, 3)) == layers + 2 * result + last_norm


def test_gpt2_keeps_58_sbh_and_5_a_s_s_b():
    """Korthikanti's 34 and 5 (arXiv:2205.05198, equation 2), and three tensors of the inner width that gelu_new keeps more."""
    model = load_architecture("gpt2-xl")
    tokens = 128
    assert eager(model, 1, tokens) == tokens * (58 * model.hidden + 5 * model.n_heads * tokens)


def test_deepspeed_holds_its_bucket_and_parameters_that_come_up_again_soon_and_sends_gradients_to_the_host():
    model = load_architecture("gpt2-xl")

    def held(**layout):
        step = TrainingStep(layout=Layout(**layout), seq_len=128, software=DEEPSPEED.software)
        contents = device_contents((0,), (model.n_layers,))
        return stage_memory(model, step, contents, 0.0, FITTED)

    plain = held(zero_stage=0)
    moved = held(zero_stage=3, offload_optimizer=True, offload_parameters=True)
    assert plain.gradient_bytes == 2 * (model.num_parameters() - model.norm_parameters())
    assert moved.gradient_bytes == moved.parameter_bytes == moved.optimizer_bytes == 0
    # 5e8 elements of the bucket, 5e8 parameters behind which no backward is farther than 1e9, one layer's gradients.
    extra = moved.buffer_bytes - plain.buffer_bytes
    assert extra == 2 * 5e8 + 2 * 5e8 + 2 * model.layer_parameters(0)
