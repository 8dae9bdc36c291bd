"""What training code holds beside what a layout asks for: an old graph, state that can move away, gradients that are let go."""

import weakref
from dataclasses import replace

import pytest
import torch

from memadvisor.architecture import Architecture
from memadvisor.architectures.load import load_architecture
from memadvisor.cost.layouts.coefficients import FITTED
from memadvisor.cost.layouts.estimate import estimate_step
from memadvisor.cost.layouts.holding_code import held_graph_bytes
from memadvisor.cost.layouts.memory import StageContents, autocast_copies_bytes, stage_memory
from memadvisor.hardware.clusters import parse_cluster
from memadvisor.layout import Layout, TrainingStep
from memadvisor.lora import Lora
from memadvisor.software import find_preset
from memadvisor.software_dtypes import with_lora, with_optimizer
from memadvisor.software_torch import DDP, HUGGING_FACE, LITGPT, TORCHTUNE
from memadvisor.software_traits import Software

LLAMA = Architecture(
    name="llama", n_layers=2, hidden=1024, n_heads=8, n_kv_heads=8, head_dim=128, ffn=2816, vocab=32000,
    tied_embeddings=False, gated_mlp=True,
)  # fmt: skip
WHOLE = StageContents(layers=(0, 1), embeddings=1, heads=1)
ENDS = 2 * 32000 * 1024
OLD = Lora(rank=8, base="nf4", keeps_inputs=True)


def step(software, **layout):
    return TrainingStep(layout=Layout(**layout), seq_len=512, software=software)


def held(software, **layout):
    return stage_memory(LLAMA, step(software, **layout), WHOLE, 0.0, FITTED)


class Product(torch.autograd.Function):
    """With a frozen matrix; it keeps its input as bitsandbytes' did, or not at all."""

    @staticmethod
    def forward(ctx, tokens, matrix, keeps):
        ctx.save_for_backward(matrix)
        ctx.tensors = tokens if keeps else None
        return tokens @ matrix

    @staticmethod
    def backward(ctx, gradient):
        return gradient @ ctx.saved_tensors[0].t(), None, None


@pytest.mark.parametrize("keeps", [False, True])
def test_what_a_context_keeps_goes_with_the_loss_and_not_with_the_backward(keeps):
    leaf, matrix = torch.randn(4, 8, requires_grad=True), torch.randn(8, 8)
    tokens = leaf * 2
    alive = weakref.ref(tokens)
    loss = Product.apply(tokens, matrix, keeps).sum()
    del tokens
    loss.backward()
    assert (alive() is not None) is keeps
    del loss
    assert alive() is None


def test_a_held_loss_holds_the_inputs_of_old_products_once_more():
    """Both norms' results, attention's and the activation's, of two bytes, of two layers; full recomputation drops its graphs."""
    software = with_lora(LITGPT.software, OLD)
    expected = 2 * 2 * 512 * (3 * 1024 + 2816)
    assert held_graph_bytes(LLAMA, step(software), (0, 1)) == expected
    assert held(software).buffer_bytes - held(replace(software, holds_loss=False)).buffer_bytes == expected
    assert held_graph_bytes(LLAMA, step(software, recompute="full"), (0, 1)) == 0
    today = with_lora(LITGPT.software, replace(OLD, keeps_inputs=False))
    assert held_graph_bytes(LLAMA, step(today), (0, 1)) == 0


def test_paged_state_needs_no_room_on_the_device():
    plain, paged = (with_optimizer(HUGGING_FACE.software, name) for name in ("adam8bit", "paged_adamw_8bit"))
    assert (plain.optimizer_bytes, paged.optimizer_bytes, paged.paged_bytes) == (2, 2, 2)
    assert held(plain).optimizer_bytes > 0 == held(paged).optimizer_bytes
    assert held(plain).parameter_bytes == held(paged).parameter_bytes
    # A master copy stays.
    assert held(with_optimizer(Software(), "paged_adamw_32bit")).optimizer_bytes == pytest.approx(
        held(Software()).optimizer_bytes * 4 / 12
    )


def test_an_update_in_the_backward_lets_layers_gradients_go():
    software = replace(TORCHTUNE.software, updates_in_backward=True)
    assert held(software).gradient_bytes == 2 * ENDS
    assert held(software, num_microbatches=2).gradient_bytes == held(TORCHTUNE.software).gradient_bytes


def test_llama_65b_fits_a_card_of_48_gb_as_the_qlora_paper_says():
    """arXiv:2305.14314, abstract and figure 6: batch 1 of 512 tokens, rank 64 beside all matrices."""
    lora = Lora(rank=64, base="nf4-dq", dropout=True)
    paper, usual = (
        estimate_step(
            load_architecture("llama-65b"),
            step(with_lora(find_preset(name).software, lora), recompute="full"),
            parse_cluster("1xA6000"),
        )
        for name in ("qlora", "huggingface")
    )
    assert paper.fits and paper.peak_memory_bytes < 42e9
    assert not usual.fits


GRADIENTS = 4 * (LLAMA.num_parameters() - LLAMA.hidden)  # without the last norm, which no stage counts


def test_where_the_backward_begins_there_are_no_gradients():
    """They come as activations go (samples/train_gpt.py on an H200: 44 MB of 3.1 GB, docs/gpu.md)."""
    kept = 50e9
    late = stage_memory(LLAMA, step(DDP.software), WHOLE, kept, FITTED)
    stays = replace(DDP.software, lets_gradients_go=False)
    there = stage_memory(LLAMA, step(stays), WHOLE, kept, FITTED)

    assert there.allocated_bytes - late.allocated_bytes == pytest.approx(GRADIENTS)


def test_where_it_ends_there_are_no_activations():
    """The update holds as much as the gradients besides; copies in 16 bits are counted with it."""
    found = stage_memory(LLAMA, step(DDP.software), WHOLE, 0.0, FITTED)
    copies = autocast_copies_bytes(LLAMA, step(DDP.software), WHOLE)

    assert found.allocated_bytes - found.parameter_bytes - found.optimizer_bytes == pytest.approx(
        2 * GRADIENTS + copies
    )


def test_gradients_of_a_microbatch_before_are_there():
    several = step(DDP.software, num_microbatches=2)
    stays = step(replace(DDP.software, lets_gradients_go=False), num_microbatches=2)

    assert stage_memory(LLAMA, several, WHOLE, 1e9, FITTED) == stage_memory(LLAMA, stays, WHOLE, 1e9, FITTED)


def test_torch_sets_gradients_to_none():
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    weight.sum().backward()
    optimizer.zero_grad()

    assert weight.grad is None
