"""Two ranks: data parallel, fully sharded, or a pipeline, as the first argument says."""

import sys

import torch
import torch.distributed as dist
from small import model_and_optimizer, step
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel


def replicas():
    model = DistributedDataParallel(model_and_optimizer()[0])
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def shards():
    model = model_and_optimizer()[0]
    for layer in (model[0], model[2], model):
        fully_shard(layer)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def pipeline(rank):
    torch.manual_seed(rank)
    part = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    stage = PipelineStage(part, rank, 2, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 2, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.SGD(part.parameters(), lr=0.1)
    for _ in range(5):
        losses = []
        if rank == 0:
            schedule.step(torch.randn(4, 4))
        else:
            schedule.step(target=torch.ones(4, 4), losses=losses)
        optimizer.step()
        optimizer.zero_grad()
        if losses:
            print([loss.item() for loss in losses], flush=True)


dist.init_process_group("gloo")
rank = dist.get_rank()
if sys.argv[1] == "pipeline":
    pipeline(rank)
else:
    model, optimizer = replicas() if sys.argv[1] == "replicas" else shards()
    torch.manual_seed(rank)
    for _ in range(5):
        loss = step(model, optimizer)
        if rank == 0:
            print(repr(loss), flush=True)
dist.destroy_process_group()
