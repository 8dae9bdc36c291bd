"""Train the small GPT of train_gpt.py as a pipeline: each rank holds one stage of it, or several (--schedule interleaved).

torchrun --nproc-per-node 2 samples/train_pipeline.py
torchrun --nproc-per-node 4 samples/train_pipeline.py --layers 16 --schedule gpipe
torchrun --nproc-per-node 4 samples/train_pipeline.py --replicas 2   # two such pipelines, which average gradients
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from train_gpt import GPT, read_text, sample_batch

SCHEDULES = {
    "1f1b": pipelining.Schedule1F1B,
    "gpipe": pipelining.ScheduleGPipe,
    "interleaved": pipelining.ScheduleInterleaved1F1B,
}


class Stage(nn.Module):
    """Some blocks of the model, with its embeddings before the first of them and its head behind the last."""

    def __init__(self, whole, index, num_stages):
        super().__init__()
        share = len(whole.blocks) // num_stages
        is_first, is_last = index == 0, index == num_stages - 1
        self.tok_emb = whole.tok_emb if is_first else None
        self.pos_emb = whole.pos_emb if is_first else None
        self.blocks = nn.ModuleList(whole.blocks[index * share : (index + 1) * share])
        self.ln_f = whole.ln_f if is_last else None
        self.head = whole.head if is_last else None

    def forward(self, x):
        if self.tok_emb is not None:
            x = self.tok_emb(x) + self.pos_emb(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            x = block(x)
        return x if self.head is None else self.head(self.ln_f(x))


def replicated(part, mesh, wrap):
    """The stage, averaging its gradients with those of other pipelines."""
    if wrap == "ddp":
        return DistributedDataParallel(part, process_group=mesh.get_group())
    for block in part.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(part, mesh=mesh)


def loss_of(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--schedule", choices=SCHEDULES, default="1f1b")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--micro-batch", type=int, default=4, help="sequences of a micro-batch")
    parser.add_argument("--micro-batches", type=int, default=8, help="micro-batches of a step")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--replicas", type=int, default=1, help="pipelines beside each other")
    parser.add_argument("--wrap", choices=("ddp", "fsdp2"), default="ddp", help="how these average gradients")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--seed", type=int, default=1337)
    return parser.parse_args()


def main():
    args = parse_args()
    dist.init_process_group("gloo")
    mesh = init_device_mesh(
        "cpu",
        (args.replicas, dist.get_world_size() // args.replicas),
        mesh_dim_names=("replica", "stage"),
    )
    rank, num_ranks = mesh["stage"].get_local_rank(), mesh["stage"].size()
    own = [rank, rank + num_ranks] if args.schedule == "interleaved" else [rank]
    num_stages = len(own) * num_ranks
    torch.manual_seed(args.seed)  # the same whole model on every rank, of which it keeps its stages
    whole = GPT(args.layers, args.dim, args.heads, args.seq, args.dropout)
    parts = [Stage(whole, index, num_stages) for index in own]
    del whole
    if args.replicas > 1:
        parts = [replicated(part, mesh["replica"], args.wrap) for part in parts]
    group = mesh["stage"].get_group()
    stages = [
        pipelining.PipelineStage(part, index, num_stages, torch.device("cpu"), group=group)
        for part, index in zip(parts, own, strict=True)
    ]
    schedule = SCHEDULES[args.schedule](
        stages if args.schedule == "interleaved" else stages[0], args.micro_batches, loss_fn=loss_of
    )
    parameters = [parameter for part in parts for parameter in part.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=5e-4)
    text = read_text()
    generator = torch.Generator().manual_seed(args.seed + mesh["replica"].get_local_rank())
    torch.manual_seed(args.seed + dist.get_rank())
    for step in range(args.steps):
        batch = args.micro_batch * args.micro_batches
        tokens, targets = sample_batch(text, batch, args.seq, generator, "cpu")
        losses = []
        inputs = (tokens,) if 0 in own else ()
        outputs = {"target": targets, "losses": losses} if num_stages - 1 in own else {}
        schedule.step(*inputs, **outputs, return_outputs=False)
        optimizer.step()
        optimizer.zero_grad()
        if losses and dist.get_rank() == dist.get_world_size() - 1:
            print(f"step {step}  loss {sum(loss.item() for loss in losses) / len(losses)!r}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
