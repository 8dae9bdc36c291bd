"""Profile a training loop of your own from Python, with the context manager.

python samples/train_loop.py
"""

import argparse

import torch
from train_gpt import GPT, read_text, sample_batch

import memadvisor
from memadvisor.units import format_bytes, format_seconds


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--out", metavar="DIR", help="run directory to make (default: memadvisor-runs/...)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()

    torch.manual_seed(1337)
    model = GPT(args.layers, args.dim, heads=4, seq=128).to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    text = read_text()
    generator = torch.Generator().manual_seed(1337)

    with memadvisor.profile(args.out) as prof:
        for step in range(args.steps):
            tokens, targets = sample_batch(text, 8, 128, generator, args.device)
            loss = model(tokens, targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            print(f"step {step} loss {loss.item()!r}", flush=True)

    rank = prof.run.ranks[0]
    traced = rank.traced_step
    print(f"run: {prof.run.path}")
    print(f"steps recorded: {len(rank.steps)}, the last in {format_seconds(rank.steps[-1].duration_s)}")
    print(f"peak: {format_bytes(traced.peak_allocated_bytes if traced else None)}")


if __name__ == "__main__":
    main()
