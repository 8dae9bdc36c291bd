"""Networks for pictures and sequences: convolutions, recurrent layers, torch's own encoder."""

import torch
import torch.nn.functional as F
from language import next_token_loss
from torch import nn
from training import train


class Bottleneck(nn.Module):
    def __init__(self, inside: int, width: int, stride: int) -> None:
        super().__init__()
        outside = 4 * width
        self.reduce = nn.Conv2d(inside, width, 1, bias=False)
        self.first = nn.BatchNorm2d(width)
        self.spatial = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.second = nn.BatchNorm2d(width)
        self.expand = nn.Conv2d(width, outside, 1, bias=False)
        self.third = nn.BatchNorm2d(outside)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = nn.Identity()
        if inside != outside or stride != 1:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inside, outside, 1, stride=stride, bias=False), nn.BatchNorm2d(outside)
            )

    def forward(self, x):
        out = self.relu(self.first(self.reduce(x)))
        out = self.relu(self.second(self.spatial(out)))
        out = self.third(self.expand(out))
        out += self.shortcut(x)
        return self.relu(out)


class ResNet(nn.Module):
    """The bottleneck ResNet (arXiv:1512.03385), small: two stages of two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 16, 7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
        )
        self.stages = nn.Sequential(
            Bottleneck(16, 8, 1), Bottleneck(32, 8, 1), Bottleneck(32, 16, 2), Bottleneck(64, 16, 1)
        )
        self.head = nn.Linear(64, 10)

    def forward(self, x):
        return self.head(self.stages(self.stem(x)).mean((2, 3)))


def picture_loss(model):
    return F.cross_entropy(model(torch.randn(4, 3, 32, 32)), torch.randint(0, 10, (4,)))


def momentum(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def resnet():
    model = ResNet()
    train(model, picture_loss, momentum(model))


def channels_last():
    model = ResNet().to(memory_format=torch.channels_last)

    def loss_of(model):
        pictures = torch.randn(4, 3, 32, 32).to(memory_format=torch.channels_last)
        return F.cross_entropy(model(pictures), torch.randint(0, 10, (4,)))

    train(model, loss_of, momentum(model))


def convolutions():
    """Of one dimension, of each channel alone, dilated, and transposed."""
    model = nn.Sequential(
        nn.Conv1d(4, 16, 5, padding=2),
        nn.GELU(),
        nn.Unflatten(2, (8, 8)),
        nn.Conv2d(16, 16, 3, padding=1, groups=16),
        nn.Conv2d(16, 8, 3, padding=2, dilation=2),
        nn.ConvTranspose2d(8, 3, 4, stride=2, padding=1),
        nn.Tanh(),
    )

    def loss_of(model):
        return model(torch.randn(8, 4, 64)).pow(2).mean()

    train(model, loss_of, momentum(model))


def lstm():
    class Language(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens = nn.Embedding(256, 64)
            self.lstm = nn.LSTM(64, 96, num_layers=2, batch_first=True)
            self.head = nn.Linear(96, 256)

        def forward(self, tokens):
            return self.head(self.lstm(self.tokens(tokens))[0])

    train(Language(), next_token_loss)


def gru_packed():
    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens = nn.Embedding(256, 32)
            self.gru = nn.GRU(32, 48, bidirectional=True, batch_first=True)
            self.head = nn.Linear(96, 8)

        def forward(self, tokens, lengths):
            packed = nn.utils.rnn.pack_padded_sequence(
                self.tokens(tokens), lengths, batch_first=True, enforce_sorted=False
            )
            padded, _ = nn.utils.rnn.pad_packed_sequence(self.gru(packed)[0], batch_first=True)
            return self.head(padded)

    def loss_of(model):
        return model(torch.randint(0, 256, (6, 20)), torch.randint(5, 21, (6,))).logsumexp(-1).mean()

    train(Tagger(), loss_of)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(256, 64)
        layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(64, 256)

    def forward(self, tokens):
        return self.head(self.layers(self.tokens(tokens)))


def encoder():
    train(Encoder(), next_token_loss)


def encoder_evaluated():
    """In evaluation the encoder takes one fused operator a layer; it runs before the step's own forward."""
    model = Encoder()

    def loss_of(model):
        model.eval()
        with torch.inference_mode():
            for _ in range(2):
                scores = model(torch.randint(0, 256, (16, 64)))
            print(repr(scores.sum().item()))
        model.train()
        return next_token_loss(model)

    train(model, loss_of)


def nested():
    """Sequences of different lengths in one jagged tensor."""

    class Pooler(nn.Module):
        def __init__(self):
            super().__init__()
            self.inside = nn.Linear(32, 64)
            self.norm = nn.LayerNorm(64)
            self.outside = nn.Linear(64, 32)

        def forward(self, x):
            return self.outside(F.gelu(self.norm(self.inside(x))))

    def loss_of(model):
        lengths = torch.randint(4, 40, (6,)).tolist()
        rows = torch.nested.nested_tensor([torch.randn(n, 32) for n in lengths], layout=torch.jagged)
        return model(rows).values().pow(2).mean()

    train(Pooler(), loss_of)


KINDS = [
    resnet, channels_last, convolutions, lstm, gru_packed, encoder, encoder_evaluated, nested,
]  # fmt: skip
