"""The models of the recomputation benchmark: a deep chain, a residual network, recurrent layers, and long skips; and
those of the samples."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from samples import train_cnn, train_gpt
from tests.analyzers.checkpointed import Gpt


class Bottleneck(nn.Module):
    def __init__(self, channels, width, stride) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv2d(channels, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)),
            *(
                nn.Conv2d(width, width, 3, stride, 1, bias=False),
                nn.BatchNorm2d(width),
                nn.ReLU(inplace=True),
            ),
            *(nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width)),
        )
        self.down = None
        if stride > 1 or channels != 4 * width:
            self.down = nn.Sequential(
                nn.Conv2d(channels, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width)
            )

    def forward(self, x):
        return torch.relu(self.body(x) + (x if self.down is None else self.down(x)))


class ResNet(nn.Module):
    """ResNet-50's 3, 4, 6 and 3 bottlenecks, narrow, on small images."""

    def __init__(self, width=8) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 4 * width, 3, padding=1, bias=False), nn.BatchNorm2d(4 * width)
        )
        blocks, channels = [], 4 * width
        for stage, count in enumerate((3, 4, 6, 3)):
            for number in range(count):
                blocks.append(Bottleneck(channels, width << stage, 2 if stage and not number else 1))
                channels = 4 * width << stage
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(channels, 10)

    def forward(self, x):
        x = torch.relu(self.stem(x))
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


class Layer(nn.Module):
    def __init__(self, dim) -> None:
        super().__init__()
        self.lstm = nn.LSTM(dim, dim, batch_first=True)

    def forward(self, x):
        return F.dropout(self.lstm(x)[0], 0.1, self.training)


class Recurrent(nn.Module):
    def __init__(self, dim=96, layers=6) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, dim)
        self.layers = nn.ModuleList(Layer(dim) for _ in range(layers))
        self.head = nn.Linear(dim, 256)

    def forward(self, tokens):
        x = self.tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Convolutions(nn.Sequential):
    def __init__(self, channels, out) -> None:
        super().__init__(
            *(nn.Conv2d(channels, out, 3, padding=1), nn.GroupNorm(4, out), nn.SiLU()),
            *(nn.Conv2d(out, out, 3, padding=1), nn.GroupNorm(4, out), nn.SiLU()),
        )


class UNet(nn.Module):
    """Halves the image four times and doubles it again, each time with what it had at that size."""

    def __init__(self, width=12) -> None:
        super().__init__()
        widths = [width << level for level in range(4)]
        self.down = nn.ModuleList(Convolutions(a, b) for a, b in zip([3, *widths], widths, strict=False))
        self.middle = Convolutions(widths[-1], widths[-1])
        self.up = nn.ModuleList(
            Convolutions(a + b, b) for a, b in zip([widths[-1], *widths[:0:-1]], widths[::-1], strict=True)
        )
        self.head = nn.Conv2d(width, 10, 1)

    def forward(self, x):
        kept = []
        for block in self.down:
            kept.append(block(x))
            x = F.max_pool2d(kept[-1], 2)
        x = self.middle(x)
        for block in self.up:
            x = block(torch.cat((F.interpolate(x, scale_factor=2), kept.pop()), 1))
        return self.head(x).mean((2, 3))


TEXT = train_gpt.read_text(1_000_000)
DIGITS = train_cnn.load_data("cpu")[0]
MODELS = {
    "gpt": lambda: Gpt(dim=64, layers=24),
    "resnet": ResNet,
    "lstm": Recurrent,
    "unet": UNet,
    "sample-gpt": lambda: train_gpt.GPT(layers=12, dim=128, heads=8, seq=256, dropout=0.1),
    "sample-cnn": lambda: train_cnn.ResNet(24),
}
_IMAGES = {ResNet: (16, 3, 32, 32), UNet: (4, 3, 64, 64)}


def batch(model, step):
    """What a step of the model is trained on: inputs and classes. Of the samples' models, real text and real digits."""
    if isinstance(model, train_gpt.GPT):
        generator = torch.Generator().manual_seed(step)
        return train_gpt.sample_batch(TEXT, 4, 256, generator, torch.device("cpu"))
    if isinstance(model, train_cnn.ResNet):
        images, labels = DIGITS
        chosen = slice(128 * step, 128 * (step + 1))
        return images[chosen], labels[chosen]
    if type(model) in _IMAGES:
        shape = _IMAGES[type(model)]
        return torch.randn(shape), torch.randint(0, 10, shape[:1])
    return torch.randint(0, 256, (4, 128)), torch.randint(0, 256, (4, 128))
