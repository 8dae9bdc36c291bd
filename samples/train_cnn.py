"""Train a small ResNet on the handwritten digits that come with scikit-learn, and test it after each epoch.

python samples/train_cnn.py
python samples/train_cnn.py --width 64 --epochs 5 --device cuda
"""

import argparse
import sys

import torch
from torch import nn
from torch.nn import functional as F

try:
    from sklearn.datasets import load_digits
except ImportError:
    print("train_cnn.py: the digits come with scikit-learn: pip install scikit-learn", file=sys.stderr)
    sys.exit(2)


class ResidualBlock(nn.Module):
    def __init__(self, channels_in, channels_out, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels_out)
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels_out)
        self.shortcut = nn.Identity()
        if stride != 1 or channels_in != channels_out:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels_out, 1, stride, bias=False), nn.BatchNorm2d(channels_out)
            )

    def forward(self, x):
        y = F.relu(self.bn1(self.conv1(x)), inplace=True)
        y = self.bn2(self.conv2(y)) + self.shortcut(x)
        return F.relu(y, inplace=True)


class ResNet(nn.Module):
    def __init__(self, width, classes=10):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)
        )
        widths = [width, width, 2 * width, 2 * width, 4 * width, 4 * width]
        strides = [1, 1, 2, 1, 2, 1]
        inputs = [width, *widths[:-1]]
        self.blocks = nn.Sequential(*map(ResidualBlock, inputs, widths, strides))
        self.fc = nn.Linear(4 * width, classes)

    def forward(self, x):
        return self.fc(self.blocks(self.stem(x)).mean(dim=(2, 3)))


def load_data(device):
    """1797 images of 8 x 8 pixels; every fifth is kept for testing."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32, device=device).unsqueeze(1) / 16
    labels = torch.tensor(digits.target, dtype=torch.int64, device=device)
    is_test = torch.arange(len(labels), device=device) % 5 == 0
    return (images[~is_test], labels[~is_test]), (images[is_test], labels[is_test])


def train_epoch(model, optimizer, images, labels, batch_size, first_step):
    model.train()
    order = torch.randperm(len(labels)).to(labels.device)
    for step, chosen in enumerate(order.split(batch_size), start=first_step):
        loss = F.cross_entropy(model(images[chosen]), labels[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step} loss {loss.item()!r}", flush=True)
    return step + 1


@torch.no_grad()
def accuracy(model, images, labels):
    model.eval()
    right = sum(
        (model(some).argmax(dim=1) == truth).sum().item()
        for some, truth in zip(images.split(256), labels.split(256), strict=True)
    )
    return right / len(labels)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--width", type=int, default=24, help="channels of the first stage")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=1337)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    train_set, test_set = load_data(args.device)
    model = ResNet(args.width).to(args.device)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=args.lr, momentum=0.9, weight_decay=5e-4, nesterov=True
    )
    step = 0
    for epoch in range(args.epochs):
        step = train_epoch(model, optimizer, *train_set, args.batch, step)
        print(f"epoch {epoch} accuracy {accuracy(model, *test_set)!r}", flush=True)


if __name__ == "__main__":
    main()
