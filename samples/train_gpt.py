"""Train a small GPT on the bytes of Python's own standard library: real text, found on every machine.

python samples/train_gpt.py
python samples/train_gpt.py --layers 12 --dim 768 --heads 12 --bf16 --device cuda
torchrun --nproc-per-node 2 samples/train_gpt.py --accum 2
"""

import argparse
import contextlib
import math
import os
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

VOCABULARY = 256  # the model reads and writes bytes


class Attention(nn.Module):
    def __init__(self, dim, heads, dropout):
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        batch, seq, dim = x.shape
        heads = (batch, seq, self.heads, dim // self.heads)
        q, k, v = (part.view(heads).transpose(1, 2) for part in self.qkv(x).split(dim, dim=2))
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(batch, seq, dim))


class MLP(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.fc = nn.Linear(dim, 4 * dim)
        self.act = nn.GELU()
        self.proj = nn.Linear(4 * dim, dim)

    def forward(self, x):
        return self.proj(self.act(self.fc(x)))


class Block(nn.Module):
    def __init__(self, dim, heads, dropout):
        super().__init__()
        self.ln_1 = nn.LayerNorm(dim)
        self.attn = Attention(dim, heads, dropout)
        self.ln_2 = nn.LayerNorm(dim)
        self.mlp = MLP(dim)
        self.drop = nn.Dropout(dropout)

    def forward(self, x):
        x = x + self.drop(self.attn(self.ln_1(x)))
        return x + self.drop(self.mlp(self.ln_2(x)))


class GPT(nn.Module):
    def __init__(self, layers, dim, heads, seq, dropout=0.0, tied=False):
        super().__init__()
        self.tok_emb = nn.Embedding(VOCABULARY, dim)
        self.pos_emb = nn.Embedding(seq, dim)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(dim, heads, dropout) for _ in range(layers))
        self.ln_f = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, VOCABULARY, bias=False)
        self.apply(self._init)
        # GPT-2: residual projections start smaller, by the number of additions to the residual stream.
        for name, parameter in self.named_parameters():
            if name.endswith("proj.weight"):
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers))
        if tied:
            self.head.weight = self.tok_emb.weight

    @staticmethod
    def _init(module):
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, tokens, targets):
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.drop(self.tok_emb(tokens) + self.pos_emb(positions))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.ln_f(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def read_text(max_bytes=8_000_000):
    """The standard library's sources, one after another, as a tensor of bytes."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= max_bytes:
            break
    return torch.frombuffer(text, dtype=torch.uint8)


def sample_batch(text, batch, seq, generator, device):
    starts = torch.randint(len(text) - seq - 1, (batch,), generator=generator).tolist()
    windows = torch.stack([text[start : start + seq + 1] for start in starts]).long().to(device)
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def learning_rate(step, args):
    if not args.cosine:
        return args.lr
    warmup = max(1, args.steps // 10)
    if step < warmup:
        return args.lr * (step + 1) / warmup
    progress = (step - warmup) / max(1, args.steps - warmup)
    return args.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--seq", type=int, default=256)
    parser.add_argument("--micro-batch", type=int, default=8, help="sequences per rank and forward pass")
    parser.add_argument("--accum", type=int, default=1, help="forward passes per optimizer step")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--bf16", action="store_true", help="autocast to bfloat16")
    parser.add_argument("--bf16-weights", action="store_true", help="keep weights and gradients in bfloat16")
    parser.add_argument("--clip", type=float, default=0.0, help="largest gradient norm; 0 does not clip")
    parser.add_argument("--cosine", action="store_true", help="warm up, then follow a cosine down to a tenth")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--tied", action="store_true", help="share the embedding with the head")
    parser.add_argument("--seed", type=int, default=1337)
    parser.add_argument("--save", metavar="FILE", help="write the trained weights")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


def train(args, device, rank, world_size):
    torch.manual_seed(args.seed)
    model = GPT(args.layers, args.dim, args.heads, args.seq, args.dropout, args.tied).to(device)
    if args.bf16_weights:
        model.to(torch.bfloat16)
    raw_model = model
    if world_size > 1:
        device_ids = [device.index] if device.type == "cuda" else None
        model = DistributedDataParallel(model, device_ids=device_ids)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)

    text = read_text()
    share = len(text) // world_size
    text = text[rank * share : (rank + 1) * share]
    generator = torch.Generator().manual_seed(args.seed + rank)
    torch.manual_seed(args.seed + rank)  # dropout differs between ranks

    for step in range(args.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args)
        total = 0.0
        for micro_step in range(args.accum):
            tokens, targets = sample_batch(text, args.micro_batch, args.seq, generator, device)
            is_last = micro_step == args.accum - 1
            synchronise = contextlib.nullcontext() if is_last or world_size == 1 else model.no_sync()
            with synchronise:
                with torch.autocast(device.type, dtype=torch.bfloat16, enabled=args.bf16):
                    loss = model(tokens, targets) / args.accum
                loss.backward()
            total += loss.item()
        if args.clip > 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if rank == 0:
            print(f"step {step} loss {total!r}", flush=True)

    if args.save and rank == 0:
        torch.save(raw_model.state_dict(), args.save)


def main():
    args = parse_args()
    rank = int(os.environ.get("RANK", 0))
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    device = torch.device(args.device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if world_size > 1:
        # NCCL refuses ranks that share a GPU.
        num_local = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
        has_own = device.type == "cuda" and num_local <= torch.cuda.device_count()
        dist.init_process_group("nccl" if has_own else "gloo")
    train(args, device, rank, world_size)
    if world_size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
