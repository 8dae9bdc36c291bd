"""Small all-reduces go in one message, and come out as they would by themselves."""

import torch
import torch.distributed as dist

from tests.engines.equality import merged
from tests.engines.ranks import run_ranks
from tests.engines.trainings import Training, applied, build, make_optimizer, make_plan, micro_batch_loss


def messages_and_weights(rank, stage):
    """Numbers of elements that were summed in the second step, and the weights after it; without merging, and with it."""
    found = []
    for algorithms in ((), merged(10**6)):
        with applied(make_plan(2, stage, algorithms=algorithms)):
            ddp = build(Training(), rank)
            optimizer = make_optimizer("adamw", ddp)
            data = torch.Generator().manual_seed(rank)
            original, sizes = dist.all_reduce, []

            def all_reduce(tensor, *args, original=original, sizes=sizes, **options):
                sizes.append(tensor.numel())
                return original(tensor, *args, **options)

            for step in range(2):
                optimizer.zero_grad()
                dist.all_reduce = all_reduce if step else original
                try:
                    micro_batch_loss(Training(), ddp, data, use_extra=False)
                finally:
                    dist.all_reduce = original
                optimizer.step()
            found.append((sizes, [value.detach().clone() for value in ddp.module.parameters()]))
    return found


def test_units_of_stages_0_and_1_share_a_message_and_sums_stay_equal_in_every_bit():
    for stage in (0, 1):
        for apart, together in run_ranks(messages_and_weights, 2, stage, timeout_s=40):
            assert len(apart[0]) > 2 and len(together[0]) == 1
            assert sum(apart[0]) == sum(together[0])
            assert all(torch.equal(a, b) for a, b in zip(apart[1], together[1], strict=True))
