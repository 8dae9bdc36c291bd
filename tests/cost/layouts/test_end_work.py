"""The head: what its loss moves of a logit."""

from dataclasses import replace

import pytest

from memadvisor.architectures.load import load_architecture
from memadvisor.cost.layouts.coefficients import FITTED
from memadvisor.cost.layouts.end_work import head_work
from memadvisor.cost.layouts.kernels import device_of, matmul_seconds, stream_seconds
from memadvisor.cost.layouts.layer_work import layer_groups
from memadvisor.cost.layouts.links import group_of
from memadvisor.layout import Layout, TrainingStep
from memadvisor.software import GPT_NEOX, MEGATRON_2021, MEGATRON_DEEPSPEED, MODERN
from tests.cost.layouts.nodes import make_cluster

MODEL = load_architecture("pythia-70m")
CLUSTER = make_cluster(ranks=8)
DEVICE = device_of(CLUSTER.accelerator, "bfloat16", FITTED)


def head(software, model=MODEL):
    step = TrainingStep(layout=Layout(micro_batch_size=4), seq_len=2048, software=software)
    groups = layer_groups(step.layout, lambda size, stride: group_of(CLUSTER, size, stride, FITTED), False)
    return head_work(model, step, DEVICE, groups)


def logits_of_bytes(each):
    return stream_seconds(DEVICE, each * 4 * 2048 * MODEL.vocab)


@pytest.mark.parametrize(
    "preset", [MEGATRON_2021, MEGATRON_DEEPSPEED, GPT_NEOX], ids=lambda each: each.software.name
)
def test_megatrons_cross_entropy_reads_and_writes_fp32_logits_for_each_of_its_parts(preset):
    """A softmax in one kernel does with 14 bytes forward and 14 backward; operators of their own take 24 more, forward."""
    own, one = head(preset.software), head(replace(preset.software, split_loss=False))

    assert own.forward_s - one.forward_s == pytest.approx(logits_of_bytes(24))
    assert own.backward_s == pytest.approx(one.backward_s)
    assert own.stream_s - one.stream_s == pytest.approx(logits_of_bytes(24))


def test_in_16_bits_nothing_is_cast():
    narrow = replace(GPT_NEOX.software, loss_bytes=2)
    own, one = head(narrow), head(replace(narrow, split_loss=False))

    assert own.forward_s - one.forward_s == pytest.approx(logits_of_bytes(12))
    assert own.backward_s - one.backward_s == pytest.approx(logits_of_bytes(-4))


def test_a_fused_loss_has_no_parts():
    fused = replace(GPT_NEOX.software, fused_loss=True)

    assert head(fused) == head(replace(fused, split_loss=False))
    assert not MODERN.software.split_loss


def test_a_fused_loss_of_fp32_logits_casts_them_there_and_back():
    """6 bytes to cast, 12 of the kernel, 6 of its gradient, where one over 16 bits moves 6 in all."""
    fused = replace(MODERN.software, fused_loss=True)
    wide = head(replace(fused, wide_fused_loss=True))

    assert wide.stream_s - head(fused).stream_s == pytest.approx(logits_of_bytes(18))


def test_a_layer_before_the_output_projection_is_one_more_product():
    """Forward, and twice backward; as wide as the stream (BERT's head)."""
    own, plain = head(MODERN.software, replace(MODEL, head_layer=True)), head(MODERN.software)
    product = matmul_seconds(DEVICE, 4 * 2048, MODEL.hidden, MODEL.hidden)

    assert own.forward_s - plain.forward_s == pytest.approx(product)
    assert own.backward_s - plain.backward_s == pytest.approx(2 * product)
