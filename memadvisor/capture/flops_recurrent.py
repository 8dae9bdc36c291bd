"""FLOPs of recurrent layers that run as one operator: oneDNN's on CPU, cuDNN's and MIOpen's on GPUs.

Each step multiplies the input by W_ih (G, I), the hidden state by W_hh (G, H) and, where the layer projects,
its output by W_hr: 2 FLOPs an element of every matrix, at each position of the sequences. The backward multiplies
as much again for the gradients of the data and of the weights. A layer that is written out in products
(torch's own way where no library takes it) counts the same, product by product; the tests compare.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from memadvisor.capture.arguments import Arguments, Arithmetic


def _num_positions(call: Arguments) -> int:
    """Steps times sequences; of packed sequences of several lengths the sum of the lengths."""
    inputs: torch.Tensor = call["input"]
    return int(inputs.numel()) // max(1, int(inputs.shape[-1]))


def _onednn(call: Arguments) -> Arithmetic:
    elements = call["weight0"].numel() + call["weight1"].numel()
    return Arithmetic.all_needed(2 * _num_positions(call) * elements, call["input"], call["weight0"])


def _onednn_backward(call: Arguments) -> Arithmetic:
    """oneDNN computes all gradients. What is needed of them the graph tells: not the input's in a first layer
    that reads data, and not the first hidden state's where that is a constant."""
    inputs, weight_input, weight_hidden = call["input"], call["weight1"], call["weight2"]
    positions = _num_positions(call)
    by_input, by_hidden = 2 * positions * weight_input.numel(), 2 * positions * weight_hidden.numel()
    needs_input, needs_hidden = _wanted_gradients(0, 5)
    needed = 2 * (by_input + by_hidden)
    if not needs_input:
        needed -= by_input
    if not needs_hidden:
        num_sequences = call["hx_"].numel() // max(1, int(call["hx_"].shape[-1]))
        needed -= 2 * num_sequences * weight_hidden.numel()
    return Arithmetic.of(2 * (by_input + by_hidden), needed, inputs, weight_input)


def _wanted_gradients(*positions: int) -> tuple[bool, ...]:
    """Whether the graph has somewhere to send these gradients of the node that is running; True if unknown."""
    node: Any = torch._C._current_autograd_node()
    edges = () if node is None else node.next_functions
    return tuple(edges[p][0] is not None if p < len(edges) else True for p in positions)


def _matrices(call: Arguments) -> list[tuple[int, ...]]:
    """Elements of (W_ih, W_hh) or (W_ih, W_hh, W_hr), a layer and direction after the other."""
    elements = [int(weight.numel()) for weight in call["weight"] if weight.dim() == 2]
    size = 3 if call.get("proj_size") else 2
    return [tuple(elements[first : first + size]) for first in range(0, len(elements), size)]


def _library(call: Arguments) -> Arithmetic:
    elements = sum(map(sum, _matrices(call)))
    return Arithmetic.all_needed(2 * _num_positions(call) * elements, call["input"], call["weight"][0])


def _library_backward(call: Arguments) -> Arithmetic:
    """The data gradients always run, for the weights' need them; `output_mask` is (input, hx, cx, weight)."""
    matrices, positions, mask = _matrices(call), _num_positions(call), call["output_mask"]
    num_sequences, num_directions = int(call["hx"].shape[1]), 1 + bool(call["bidirectional"])
    executed = 2 * positions * sum(map(sum, matrices)) * (1 + bool(mask[3]))
    needed = executed
    if not mask[0]:
        needed -= 2 * positions * sum(layer[0] for layer in matrices[:num_directions])
    if not mask[1]:
        needed -= 2 * num_sequences * sum(layer[1] for layer in matrices)
    return Arithmetic.of(executed, needed, call["input"], call["weight"][0])


RECURRENT: dict[str, Callable[[Arguments], Arithmetic]] = {
    "mkldnn_rnn_layer": _onednn,
    "mkldnn_rnn_layer_backward": _onednn_backward,
    "_cudnn_rnn": _library,
    "_cudnn_rnn_backward": _library_backward,
    "miopen_rnn": _library,
    "miopen_rnn_backward": _library_backward,
}
