"""FLOPs of single operators: by hand, against torch's counter where that one is right, and against the same
layer written out in matrix products."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from memadvisor.capture.flops import operator_flops


class Counting(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.executed = self.needed = 0
        self.shapes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        executed, needed, shapes = operator_flops(func, args, kwargs or {}, out)
        self.executed += executed
        self.needed += needed
        self.shapes += [shapes] if shapes else []
        return out


def counted(work):
    with Counting() as counting, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        work()
    return counting


def of(func, *args, out=None, **kwargs):
    return operator_flops(func, args, kwargs, out)


def zeros(*shape, **kwargs):
    return torch.zeros(*shape, **kwargs)


@pytest.mark.parametrize(
    "work, by_hand",
    [
        (lambda: zeros(3, 4) @ zeros(4, 5), 2 * 3 * 4 * 5),
        (lambda: torch.addmm(zeros(5), zeros(3, 4), zeros(4, 5)), 2 * 3 * 4 * 5),
        (lambda: torch.bmm(zeros(2, 3, 4), zeros(2, 4, 5)), 2 * 2 * 3 * 4 * 5),
        (lambda: torch.baddbmm(zeros(2, 3, 5), zeros(2, 3, 4), zeros(2, 4, 5)), 2 * 2 * 3 * 4 * 5),
        (lambda: torch.addbmm(zeros(3, 5), zeros(2, 3, 4), zeros(2, 4, 5)), 2 * 2 * 3 * 4 * 5),
        (lambda: F.linear(zeros(2, 3, 4), zeros(5, 4), zeros(5)), 2 * 6 * 4 * 5),
        (lambda: torch.einsum("bij,bkj->bik", zeros(2, 3, 4), zeros(2, 5, 4)), 2 * 2 * 3 * 4 * 5),
        (lambda: torch.mm(zeros(3, 4), zeros(4, 5), out=zeros(3, 5)), 2 * 3 * 4 * 5),
        (lambda: torch.mv(zeros(3, 4), zeros(4)), 2 * 12),
        (lambda: torch.addmv(zeros(3), zeros(3, 4), zeros(4)), 2 * 12),
        (lambda: torch.dot(zeros(4), zeros(4)), 2 * 4),
        (lambda: torch.addr(zeros(3, 5), zeros(3), zeros(5)), 2 * 15),
        (lambda: torch._int_mm(zeros(32, 16, dtype=torch.int8), zeros(16, 8, dtype=torch.int8)), 2 * 32 * 16 * 8),
        (lambda: nn.Bilinear(3, 4, 5, bias=False)(zeros(2, 3), zeros(2, 4)), 2 * 2 * 3 * 4 * 5),
        (lambda: torch.sparse.mm(torch.eye(4).to_sparse(), zeros(4, 3)), 2 * 4 * 3),
        (lambda: torch.eye(4).to_sparse_csr() @ zeros(4, 3), 2 * 4 * 3),
        (lambda: torch.softmax(zeros(8, 8), 0) + torch.relu(zeros(8, 8)), 0),
        (lambda: torch.optim.SGD([nn.Parameter(zeros(8, 8))], lr=0.1).step(), 0),
    ],
)  # fmt: skip
def test_a_product_takes_two_flops_a_multiply_add(work, by_hand):
    counting = counted(work)

    assert counting.executed == counting.needed == by_hand


def test_a_distance_by_products_runs_two_columns_more_than_it_needs():
    counting = counted(lambda: torch.cdist(zeros(40, 3), zeros(50, 3)))

    assert counting.needed == 2 * 40 * 50 * 3
    assert counting.executed == 2 * 40 * 50 * 5


def test_grouped_products_count_every_row_once_whichever_side_is_grouped():
    def grouped(left, right, out):
        return of(torch.ops.aten._grouped_mm.default, left, right, out=out).executed_flops

    rows, inner, outer, groups = 12, 16, 8, 3
    product = 2 * rows * inner * outer
    assert grouped(zeros(rows, inner), zeros(groups, inner, outer), zeros(rows, outer)) == product
    assert grouped(zeros(inner, rows), zeros(rows, outer), zeros(groups, inner, outer)) == product
    assert grouped(zeros(groups, 4, inner), zeros(groups, inner, outer), zeros(groups, 4, outer)) == product
    assert grouped(zeros(groups, outer, inner), zeros(inner, rows), zeros(outer, rows)) == product


def test_half_precision_and_packed_weights_count_by_their_results():
    packed = of(
        torch.ops.aten._weight_int4pack_mm.default, zeros(6, 32), zeros(1, 1, 32, 4), 32, zeros(1), out=zeros(6, 8)
    )  # fmt: skip
    scaled = of(
        torch.ops.aten._scaled_mm.default, zeros(6, 32), zeros(32, 8), zeros(1), zeros(1), out=zeros(6, 8)
    )

    assert packed.executed_flops == scaled.executed_flops == 2 * 6 * 32 * 8


def test_a_jagged_batch_counts_its_rows_without_padding():
    batch = torch.nested.nested_tensor([zeros(3, 4), zeros(5, 4)], layout=torch.jagged)

    assert counted(lambda: F.linear(batch, zeros(6, 4))).executed == 2 * 8 * 4 * 6


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("wants_input", [False, True])
def test_a_convolution_and_each_gradient_that_is_asked_for_cost_the_same(groups, transposed, wants_input):
    """4 channels: 4 groups are a depthwise convolution. Each position meets a filter of 4 / groups channels."""
    kind = nn.ConvTranspose2d if transposed else nn.Conv2d
    layer = kind(4, 8, 3, stride=2, padding=1, groups=groups)
    images = torch.randn(2, 4, 9, 9, requires_grad=wants_input)
    positions = 9 * 9 if transposed else 5 * 5
    one = 2 * 2 * positions * (4 * 8 // groups) * 9

    counting = counted(lambda: layer(images).sum().backward())

    assert counting.executed == counting.needed == one * (3 if wants_input else 2)


@pytest.mark.parametrize("shape", [(2, 4, 9), (2, 4, 7, 9), (2, 4, 3, 5, 7)])
def test_convolutions_of_all_dimensions_agree_with_torchs_counter(shape):
    layer = {3: nn.Conv1d, 4: nn.Conv2d, 5: nn.Conv3d}[len(shape)](4, 6, 3, padding=1, dilation=1)
    images = torch.randn(*shape, requires_grad=True)
    with FlopCounterMode(display=False) as theirs:
        layer(images).sum().backward()

    assert counted(lambda: layer(images).sum().backward()).executed == theirs.get_total_flops()


def attention(kind, num_queries=6, num_keys=6, heads=4, key_heads=4, width=8, value_width=8, **options):
    q = torch.randn(2, heads, num_queries, width, requires_grad=True)
    k = torch.randn(2, key_heads, num_keys, width, requires_grad=True)
    v = torch.randn(2, key_heads, num_keys, value_width, requires_grad=True)
    with sdpa_kernel(kind):
        return counted(lambda: F.scaled_dot_product_attention(q, k, v, **options).sum().backward())


@pytest.mark.parametrize(
    "options, pairs",
    [
        ({}, 36),
        ({"is_causal": True}, 21),
        ({"num_keys": 10}, 60),
        ({"key_heads": 2, "enable_gqa": True}, 36),
        ({"key_heads": 1, "enable_gqa": True, "is_causal": True}, 21),
        ({"attn_mask": torch.ones(6, 6, dtype=torch.bool).tril()}, 36),  # a tensor's content is not looked at
    ],
)
def test_fused_attention_needs_two_products_forward_and_four_backward_of_its_pairs(options, pairs):
    counting = attention(SDPBackend.FLASH_ATTENTION, **options)

    product = 2 * (2 * 4) * pairs * 8
    assert counting.needed == 6 * product
    assert counting.executed == 7 * product
    key_heads = options.get("key_heads", 4)
    num_keys = options.get("num_keys", 6)
    keys = f"[2, {key_heads}, {num_keys}, 8]"
    assert counting.shapes == [f"[[2, 4, 6, 8], {keys}, {keys}]"] * 2


def test_plain_attention_multiplies_the_whole_square_six_times():
    product = 2 * (2 * 4) * 36 * 8
    counting = attention(SDPBackend.MATH, is_causal=True)

    assert counting.executed == counting.needed == 6 * product


def test_values_may_be_wider_than_keys():
    q, v = zeros(2, 4, 6, 8), zeros(2, 4, 6, 16)
    forward = of(torch.ops.aten._scaled_dot_product_efficient_attention.default, q, q, v, None, True, out=v)
    backward = of(
        torch.ops.aten._scaled_dot_product_efficient_attention_backward.default,
        *(v, q, q, v, None, v, v, v, v, 0.0, [True, True, True, False], True),
        out=(q, q, v),
    )

    pairs = 2 * 4 * 36
    assert forward.executed_flops == 2 * pairs * (8 + 16)
    causal = 2 * 4 * 21
    assert backward.needed_flops == 2 * causal * (2 * 8 + 2 * 16)
    assert backward.executed_flops == 2 * causal * (3 * 8 + 2 * 16)


@pytest.mark.parametrize("kind", ["flash", "cudnn"])
def test_attention_on_gpus_counts_as_on_cpus(kind):
    """Called by shapes alone: these operators run on GPUs only."""
    q = zeros(2, 4, 6, 8)
    given = (None, True) if kind == "cudnn" else ()
    forward = getattr(torch.ops.aten, f"_scaled_dot_product_{kind}_attention").default

    assert of(forward, q, q, q, *given, 0.0, True, out=q).executed_flops == 2 * (2 * 4 * 21) * 16


def test_a_packed_batch_counts_the_pairs_within_its_sequences():
    q = zeros(3 + 5, 4, 8)
    ends = torch.tensor([0, 3, 8], dtype=torch.int32)
    forward = torch.ops.aten._flash_attention_forward.default

    causal = of(forward, q, q, q, ends, ends, 5, 5, 0.0, True, False, out=q)
    full = of(forward, q, q, q, ends, ends, 5, 5, 0.0, False, False, out=q)
    windowed = of(forward, q, q, q, ends, ends, 5, 5, 0.0, True, False, window_size_left=1, out=q)

    assert causal.executed_flops == 4 * (6 + 15) * 4 * 8
    assert full.executed_flops == 4 * (9 + 25) * 4 * 8
    assert windowed.executed_flops == 4 * ((1 + 2 + 2) + (1 + 2 + 2 + 2 + 2)) * 4 * 8


def test_bottom_aligned_causal_attention_sees_all_earlier_keys():
    """A decoder with a cache: 2 new queries, 6 keys, of which they see 5 and 6."""
    q, k = zeros(1, 2, 4, 8), zeros(1, 6, 4, 8)
    forward = torch.ops.aten._flash_attention_forward.default

    assert of(forward, q, k, k, None, None, 2, 6, 0.0, True, False, out=q).executed_flops == 4 * 11 * 4 * 8


@pytest.mark.parametrize("wants_input", [False, True])
@pytest.mark.parametrize("options", [{}, {"bidirectional": True, "num_layers": 2}])
def test_an_lstm_of_onednn_needs_what_the_written_out_one_multiplies(wants_input, options):
    layer = nn.LSTM(6, 8, batch_first=True, **options)
    inputs = torch.randn(3, 5, 6, requires_grad=wants_input)

    def train():
        layer(inputs)[0].sum().backward()

    fused = counted(train)
    with torch.backends.mkldnn.flags(enabled=False):
        written_out = counted(train)

    assert fused.needed == written_out.executed == written_out.needed
    assert fused.executed >= fused.needed > 0


@pytest.mark.parametrize("kind", [nn.GRU, nn.RNN])
def test_a_recurrent_layer_takes_three_times_its_forward_less_what_nobody_asks_for(kind):
    gates = 3 if kind is nn.GRU else 1
    counting = counted(lambda: kind(6, 8)(torch.randn(5, 3, 6))[0].sum().backward())

    by_input, by_hidden = 2 * 5 * 3 * gates * 8 * 6, 2 * 5 * 3 * gates * 8 * 8
    first_hidden = by_hidden // 5
    assert counting.needed == 2 * by_input + 3 * by_hidden - first_hidden


def test_a_recurrent_layer_of_cudnn_counts_like_the_written_out_one():
    """By shapes alone: cuDNN is not here. 2 layers, both directions, projections, packed sequences."""
    layer = nn.LSTM(6, 8, num_layers=2, bidirectional=True, proj_size=4)
    inputs = torch.randn(5, 3, 6)
    hidden = zeros(4, 3, 4)
    weights = [p.detach() for p in layer.parameters()]
    options = (2, 8, 4, 2, False, 0.0, True, True, [], None)
    forward = of(
        torch.ops.aten._cudnn_rnn.default, inputs, weights, 5, None, hidden, hidden, *options, out=inputs
    )
    backward = of(
        torch.ops.aten._cudnn_rnn_backward.default,
        *(inputs, weights, 5, inputs, hidden, hidden, inputs, None, None, None),
        *options,
        *(inputs, [False, False, False, True]),
        out=inputs,
    )
    written_out = counted(lambda: layer(inputs)[0].sum().backward())

    assert forward.executed_flops + backward.needed_flops == written_out.needed
    assert backward.executed_flops == 2 * forward.executed_flops


def test_a_fused_encoder_layer_counts_like_its_parts():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    inputs = torch.randn(2, 6, 8)
    parts = counted(lambda: layer(inputs))
    layer.eval()
    with torch.no_grad():
        fused = counted(lambda: layer(inputs))
        attention = counted(lambda: layer.self_attn(inputs, inputs, inputs, need_weights=False))

    assert parts.executed == fused.executed == 2 * 12 * (4 * 64 + 2 * 128) + 2 * 2 * 2 * 36 * 8
    assert attention.executed == 2 * 12 * 4 * 64 + 2 * 2 * 2 * 36 * 8


def test_a_matrix_product_that_a_compiled_graph_calls_is_counted():
    left, right = zeros(6, 4), zeros(5, 4)
    linear = torch.ops.mkldnn._linear_pointwise.default

    assert of(linear, left, right, None, "none", [], "", out=zeros(6, 5)).executed_flops == 2 * 6 * 4 * 5


def test_torchs_counter_and_ours_agree_on_products():
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
    with FlopCounterMode(display=False) as theirs:
        model(torch.randn(5, 6)).sum().backward()

    assert counted(lambda: model(torch.randn(5, 6)).sum().backward()).executed == theirs.get_total_flops()
