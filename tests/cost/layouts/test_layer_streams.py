"""What norms and rotary positions move where they are written in separate operators, against torch's own operators."""

import math
from dataclasses import replace

import pytest

from memadvisor.architectures.load import load_architecture
from memadvisor.cost.layouts.layer_streams import (
    _HEAD_NORM,
    _NORM,
    _ROTARY,
    has_separate_operators,
    more_backward_bytes,
    routed_bytes,
    stream_bytes,
)
from memadvisor.layout import Layout, TrainingStep
from memadvisor.software_torch import FSDP
from memadvisor.software_traits import Software

torch = pytest.importorskip("torch")
TOKENS, WIDTH = 256, 512
_VIEWS = ("view", "_unsafe_view", "t", "transpose", "expand", "slice", "detach", "alias", "unsqueeze")


class _Moved(torch.utils._python_dispatch.TorchDispatchMode):
    """Bytes that operators read and write, views left out; what is broadcast is read once, what is filled with zeros written."""

    def __init__(self):
        super().__init__()
        self.moved = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = operator(*args, **(kwargs or {}))
        name = operator.overloadpacket.__name__
        if name in _VIEWS or name.startswith(("empty", "new_empty")):
            return result
        reads = [] if "zeros" in name else args
        found = [*torch.utils._pytree.tree_leaves(reads), *torch.utils._pytree.tree_leaves(result)]
        self.moved += sum(_size(each) for each in found if isinstance(each, torch.Tensor))
        return result


def _size(tensor):
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.element_size() * math.prod(length for length, stride in sizes if stride)


def _moved(function, *inputs):
    """Bytes of each element of the first input, forward and backward, of bf16 tensors that others want gradients of too."""
    function(*inputs).sum().backward()
    for each in inputs:
        each.grad = None
    with _Moved() as forward:
        result = function(*inputs)
    gradient = torch.ones_like(result)
    with _Moved() as backward:
        result.backward(gradient)
    return forward.moved / inputs[0].numel(), backward.moved / inputs[0].numel()


def _parameter(*shape):
    return torch.randn(*shape, dtype=torch.bfloat16).requires_grad_()


def _norm(stream, weight):
    wide = stream.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return weight * wide.to(stream.dtype)


def _rotated(columns):
    angles = torch.ones(TOKENS, 64, dtype=columns.dtype)
    first, second = columns[..., :32], columns[..., 32:]
    return columns * angles + torch.cat((-second, first), dim=-1) * angles


def test_norm_of_separate_operators_moves_what_they_read_and_write():
    """Llama's RMSNorm (transformers, modeling_llama.py). Three products read one's result and two the other's, whose gradients
    are summed before its backward: 6 B of each sum.
    """
    forward, backward = _moved(_norm, _parameter(TOKENS, WIDTH), _parameter(WIDTH))

    assert forward == pytest.approx(_NORM.forward, abs=0.5)
    assert backward + 6.0 * (2 + 1) / 2 == pytest.approx(_NORM.backward, rel=0.01)


def test_rotary_positions_move_what_their_operators_read_and_write():
    """Of a column of queries or keys; angles are the same for all heads. Behind their backward the gradient is copied, from
    heads by tokens to tokens by heads, for the product's: 4 B.
    """
    forward, backward = _moved(_rotated, _parameter(32, TOKENS, 64))

    assert forward == pytest.approx(_ROTARY.forward, abs=0.5)
    assert backward + 4.0 == pytest.approx(_ROTARY.backward, abs=0.5)


def test_norm_of_heads_is_such_a_norm_whose_result_has_one_reader():
    """The rotary positions."""
    forward, backward = _moved(_norm, _parameter(TOKENS, WIDTH), _parameter(WIDTH))

    assert forward == pytest.approx(_HEAD_NORM.forward, abs=0.5)
    assert backward == pytest.approx(_HEAD_NORM.backward, rel=0.02)


def _step(**traits):
    software = Software(reference_code=True, **traits)
    return TrainingStep(layout=Layout(micro_batch_size=1), seq_len=TOKENS, software=software)


def test_what_patches_a_class_has_its_norms_in_one_kernel_each():
    """Liger's kernels and torch.compile; a GPT-2's LayerNorm is one anyway."""
    llama, gpt = load_architecture("llama2-7b"), load_architecture("gpt2-xl")

    assert has_separate_operators(llama, _step())
    for patched in ({"patched_code": True}, {"linear_loss": True}, {"compute_dtype": "float32"}):
        assert not has_separate_operators(llama, _step(**patched))
        assert stream_bytes(llama, _step(**patched), 0, 1.0) < stream_bytes(llama, _step(), 0, 1.0)
    assert not has_separate_operators(gpt, _step())
    assert more_backward_bytes(gpt, _step(), 0, 1.0) == 0


def test_tensor_ranks_share_what_moves_as_they_share_the_stream():
    """All of it with sequence parallelism; without it norms and sums are every rank's."""
    llama = load_architecture("llama2-7b")
    plain = _step()
    both = replace(plain, layout=replace(plain.layout, tensor=2, sequence_parallel=True))
    alone = replace(both, layout=replace(both.layout, sequence_parallel=False))

    whole = stream_bytes(llama, plain, 0, TOKENS)
    assert stream_bytes(llama, both, 0, TOKENS) == pytest.approx(whole / 2)
    assert whole / 2 < stream_bytes(llama, alone, 0, TOKENS) < whole


def _routed(stream, scores, order, copies):
    """A token's way to its experts and back as torchtitan has it (models/moe/moe.py, utils.py), products left out."""
    tokens = torch.arange(TOKENS).repeat_interleave(copies)[order]
    indices = tokens[:, None].expand(-1, WIDTH)
    padded = torch.vstack((torch.gather(stream, 0, indices), stream.new_zeros(1, WIDTH)))
    places = torch.randperm(TOKENS * copies)
    permuted = padded[places]
    back = torch.empty_like(padded)
    back[places] = permuted
    weighed = (back[:-1].to(torch.float32) * scores).to(stream.dtype)
    return torch.zeros_like(stream).scatter_add(0, indices, weighed)


def test_tokens_on_their_way_to_experts_move_what_torchtitans_operators_read_and_write():
    copies = 8
    order, scores = torch.randperm(TOKENS * copies), torch.rand(TOKENS * copies, 1)
    with torch.no_grad(), _Moved() as forward:
        _routed(_parameter(TOKENS, WIDTH), scores, order, copies)

    of_an_element = forward.moved / (TOKENS * copies * WIDTH)
    step = TrainingStep(layout=Layout(micro_batch_size=1), seq_len=TOKENS, software=FSDP.software)
    assert of_an_element == pytest.approx(routed_bytes(step), rel=0.1)
    compiled = replace(step, software=replace(FSDP.software, fused_mlp=True))
    plain = replace(step, software=Software())
    assert routed_bytes(plain) < routed_bytes(compiled) < routed_bytes(step)


def test_classes_add_experts_results_up_by_one_operator_that_scatters_them():
    """With Liger's kernels too, which leave that as it is; a backward counts twice the forward, so that a third is a pass's mean."""
    liger = replace(_step(), software=Software(liger=True))

    assert routed_bytes(_step()) == routed_bytes(liger) == pytest.approx(2 * (4 + 4 + 54) / 3, rel=0.02)
