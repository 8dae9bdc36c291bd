"""A forward that is compiled with its loss: what its backward is given of the logits' size, by torch's own graphs."""

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

TOKENS, WIDTH, VOCABULARY = 6, 4, 16


def given_to_the_backward(forward):
    """How many tensors of the logits' size the backward of a compiled forward takes."""
    found = []

    def backward(graph, _):
        values = [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]
        found.append(sum(value.numel() == TOKENS * VOCABULARY for value in values))
        return make_boxed_func(graph)

    def whole(graph, _):
        return make_boxed_func(graph)

    torch._dynamo.reset()
    weight = torch.zeros(VOCABULARY, WIDTH, requires_grad=True)
    compiled = torch.compile(forward, backend=aot_autograd(fw_compiler=whole, bw_compiler=backward))
    outputs = compiled(torch.ones(TOKENS, WIDTH), weight, torch.zeros(TOKENS, dtype=torch.long))
    (outputs[-1] if isinstance(outputs, tuple) else outputs).backward()
    torch._dynamo.reset()
    (count,) = found
    return count


@pytest.mark.parametrize(("returns_logits", "more"), [(False, 0), (True, 1)])
def test_logits_that_are_returned_beside_the_loss_get_a_gradient_of_zeros(returns_logits, more):
    def forward(stream, weight, targets):
        logits = stream @ weight.T
        loss = torch.nn.functional.cross_entropy(logits, targets)
        return (logits, loss) if returns_logits else loss

    def loss_alone(stream, weight, targets):
        return torch.nn.functional.cross_entropy(stream @ weight.T, targets)

    assert given_to_the_backward(forward) == given_to_the_backward(loss_alone) + more
