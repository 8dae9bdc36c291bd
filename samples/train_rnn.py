"""Train an LSTM language model on the standard library's sources, with truncated backpropagation in time.

The text is cut into `--batch` long strips that are read side by side, `--window` bytes a step; the LSTM's
state is carried from one window to the next, its gradient is not.

    python samples/train_rnn.py
    python samples/train_rnn.py --dim 1024 --layers 3 --device cuda
"""

import argparse

import torch
from torch import nn
from torch.nn import functional as F
from train_gpt import VOCABULARY, read_text


class LSTMLanguageModel(nn.Module):
    def __init__(self, layers, dim, dropout):
        super().__init__()
        self.tok_emb = nn.Embedding(VOCABULARY, dim)
        self.drop = nn.Dropout(dropout)
        self.lstm = nn.LSTM(dim, dim, layers, batch_first=True, dropout=dropout if layers > 1 else 0.0)
        self.head = nn.Linear(dim, VOCABULARY)

    def forward(self, tokens, state):
        y, state = self.lstm(self.drop(self.tok_emb(tokens)), state)
        return self.head(self.drop(y)), state


def windows(text, batch, window):
    """Consecutive (tokens, targets) windows of `batch` strips of the text, starting over at the end."""
    length = (len(text) - 1) // batch
    tokens = text[: batch * length].view(batch, length)
    targets = text[1 : batch * length + 1].view(batch, length)
    while True:
        for start in range(0, length - window + 1, window):
            stop = start + window
            yield start == 0, tokens[:, start:stop].long(), targets[:, start:stop].long()


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--window", type=int, default=64)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=1337)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    model = LSTMLanguageModel(args.layers, args.dim, args.dropout).to(args.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    batches = windows(read_text(), args.batch, args.window)
    state = None
    for step in range(args.steps):
        starts_over, tokens, targets = next(batches)
        state = None if starts_over or state is None else tuple(part.detach() for part in state)
        logits, state = model(tokens.to(args.device), state)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.to(args.device).flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        print(f"step {step} loss {loss.item()!r}", flush=True)


if __name__ == "__main__":
    main()
