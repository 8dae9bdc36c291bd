"""What a layer keeps under torch.autocast, by formula and as captured from Hugging Face's classes."""

import json
from dataclasses import replace

import pytest
import torch

from memadvisor.architectures.hugging_face import architecture_from_config
from memadvisor.cost.layouts.coefficients import FITTED
from memadvisor.cost.layouts.memory import autocast_copies_bytes, device_contents, stage_memory
from memadvisor.cost.layouts.saved import chunk_saved_bytes, layer_saved_bytes
from memadvisor.cost.layouts.saved_autocast import only_matrices
from memadvisor.layout import Layout, TrainingStep
from memadvisor.software_torch import HUGGING_FACE
from tests.cost.layouts.test_saved_reference import (
    BATCH,
    CONFIGS,
    ENCODER_DECODERS,
    SHAPE,
    SOURCE,
    SPECIAL,
    STACKS,
    TARGET,
    TOKENS,
    captured_bytes,
    masks_of_bytes,
    model_of,
)

GPT = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_inner": 160, "vocab_size": 96, "n_positions": 32}
SOFTMAX, POW = torch.nn.functional.softmax, torch.pow


@pytest.fixture
def as_on_an_accelerator(monkeypatch):
    """Masks of bytes, and in fp32 what autocast's list for CUDA has and that for CPUs has not."""

    def softmax(scores, dim=None, dtype=None, **_):
        return SOFTMAX(scores.float(), dim=dim)

    def power(base, exponent):
        return POW(base.float() if isinstance(base, torch.Tensor) else base, exponent)

    monkeypatch.setattr(torch.nn.functional, "dropout", masks_of_bytes)
    monkeypatch.setattr(torch.nn.functional, "softmax", softmax)
    monkeypatch.setattr(torch, "pow", power)


def captured(model, inputs, directory):
    model.train().forward = torch.autocast("cpu", dtype=torch.bfloat16)(model.forward)
    return captured_bytes(model, inputs, directory)


def posed(attention="eager", **lengths):
    code = replace(HUGGING_FACE.software, fused_attention=attention == "sdpa")
    return TrainingStep(layout=Layout(micro_batch_size=BATCH), software=code, **lengths)


def kept_with_copies(model, step, layer):
    return layer_saved_bytes(model, step, layer) + 2 * only_matrices(model).layer_parameters(layer)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_layer_keeps_what_it_is_seen_to_keep_and_16_bit_copies_of_its_matrices(
    name, tmp_path, as_on_an_accelerator
):
    """In every byte: three layers' less two layers'."""
    transformers = pytest.importorskip("transformers")
    kind, attention = name.split()[0], "sdpa" if name.endswith("sdpa") else "eager"
    fields = {**SHAPE, **SPECIAL, **CONFIGS[name], "attn_implementation": attention}
    totals = []
    for layers in (2, 3):
        config = transformers.AutoConfig.for_model(kind, num_hidden_layers=layers, **fields)
        ids = torch.full((BATCH, TOKENS), 5)  # no padding
        model = model_of(config)
        totals.append(captured(model, {"input_ids": ids, "labels": ids}, tmp_path / f"{layers}"))
    described = architecture_from_config(json.loads(config.to_json_string()), kind)

    assert kept_with_copies(described, posed(attention, seq_len=TOKENS), 2) == totals[1] - totals[0]


@pytest.mark.parametrize("name", ENCODER_DECODERS)
def test_layers_of_encoder_and_decoder_keep_what_they_are_seen_to_keep(name, tmp_path, as_on_an_accelerator):
    """In every byte; each decoder layer copies the encoder's result for its keys and for its values."""
    transformers = pytest.importorskip("transformers")
    kind = name.split()[0]
    names = ("num_layers", "num_decoder_layers") if kind == "t5" else ("encoder_layers", "decoder_layers")

    def kept(*stacks):
        fields = {**STACKS, **ENCODER_DECODERS[name], **dict(zip(names, stacks, strict=True))}
        config = transformers.AutoConfig.for_model(kind, attn_implementation="eager", **fields)
        inputs = {"input_ids": torch.full((BATCH, SOURCE), 2), "labels": torch.full((BATCH, TARGET), 2)}
        described = architecture_from_config(json.loads(config.to_json_string()), kind)
        model = transformers.AutoModelForSeq2SeqLM.from_config(config)
        return described, captured(model, inputs, tmp_path / "-".join(map(str, stacks)))

    (model, least), (_, encoder), (_, decoder) = kept(2, 2), kept(3, 2), kept(2, 3)
    step = posed(seq_len=SOURCE, target_len=TARGET)
    assert kept_with_copies(model, step, 0) == encoder - least
    assert kept_with_copies(model, step, 2) == decoder - least
    layers = sum(layer_saved_bytes(model, step, layer) for layer in range(4))
    gradient = last_norm = (
        4 * BATCH * SOURCE * model.hidden
    )  # of the encoder's result; what the norm behind it keeps
    mask = last_norm / 4 * model.reference_code.residual_dropout
    norm = (last_norm * (2 if kind == "t5" else 1) + mask) * model.final_norm
    assert chunk_saved_bytes(model, step, (0, 1, 2, 3)) == layers + gradient + norm


def test_data_parallelism_holds_a_copy_of_each_matrix_and_its_buckets():
    """By hand, of a decoder of two layers: q, k, v, o and two of the feed-forward block, and the tied head; no table."""
    model = architecture_from_config({**GPT, "model_type": "gpt2"}, "small")
    contents = device_contents((0,), (2,))
    matrices = 2 * (4 * 64 * 64 + 2 * 64 * 160) + 96 * 64

    def buffers(data, **changed):
        step = TrainingStep(
            layout=Layout(data=data), seq_len=16, software=replace(HUGGING_FACE.software, **changed)
        )
        assert autocast_copies_bytes(model, step, contents) == 2 * matrices * step.software.autocast
        return stage_memory(model, step, contents, 0.0, FITTED).buffer_bytes

    parameters = model.num_parameters() - 2 * 64  # the last norm is counted with nothing
    assert buffers(2) - buffers(1) == 4 * parameters
    assert buffers(2, bucket_copy_bytes=0) == buffers(1)
    assert buffers(1) > buffers(1, autocast=False)
