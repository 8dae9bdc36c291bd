"""Loops and optimizers: several of them, evaluation in between, data from elsewhere."""

import array

import numpy as np
import torch
import torch.nn.functional as F
from language import Gpt, next_token_loss
from operators import mlp
from torch import nn
from training import STEPS, train


def gan():
    generator = mlp(16, 128, 64)
    judge = mlp(64, 128, 1)
    first = torch.optim.Adam(judge.parameters())
    second = torch.optim.Adam(generator.parameters())
    for step in range(STEPS):
        first.zero_grad()
        fake = generator(torch.randn(64, 16))
        loss = judge(fake.detach()).mean() - judge(torch.randn(64, 64)).mean()
        loss.backward()
        first.step()
        second.zero_grad()
        (-judge(fake).mean()).backward()
        second.step()
        print(step, repr(loss.item()))


def actor_critic():
    """Two models, two optimizers, and a target network that follows slowly."""
    actor, critic, target = mlp(8, 64, 4), mlp(12, 64, 1), mlp(12, 64, 1)
    target.load_state_dict(critic.state_dict())
    optimizers = [torch.optim.Adam(model.parameters()) for model in (critic, actor)]
    for step in range(STEPS):
        state, after = torch.randn(128, 8), torch.randn(128, 8)
        with torch.no_grad():
            goal = 0.9 * target(torch.cat([after, actor(after)], 1))
        action = actor(state)
        critic_loss = F.mse_loss(critic(torch.cat([state, action.detach()], 1)), goal)
        optimizers[0].zero_grad()
        critic_loss.backward()
        optimizers[0].step()
        optimizers[1].zero_grad()
        (-critic(torch.cat([state, action], 1)).mean()).backward()
        optimizers[1].step()
        with torch.no_grad():
            for slow, fast in zip(target.parameters(), critic.parameters(), strict=True):
                slow.lerp_(fast, 0.1)
        print(step, repr(critic_loss.item()))


def evaluation():
    model = Gpt(layers=2)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    for step in range(STEPS):
        loss = next_token_loss(model)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        model.eval()
        with torch.no_grad():
            print(step, repr(next_token_loss(model).item()))
        model.train()


def closure():
    model = mlp(32, 64, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    x = torch.randn(128, 32)

    def evaluate():
        optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        return loss

    for step in range(STEPS):
        print(step, repr(optimizer.step(evaluate).item()))


def squares(model):
    return model(torch.randn(64, 64)).pow(2).mean()


def adamw_foreach():
    model = mlp(64, 128, 64)
    train(model, squares, torch.optim.AdamW(model.parameters(), foreach=True))


def adamw_fused():
    model = mlp(64, 128, 64)
    train(model, squares, torch.optim.AdamW(model.parameters(), fused=True))


def adamw_loop():
    model = mlp(64, 128, 64)
    train(model, squares, torch.optim.AdamW(model.parameters(), foreach=False, amsgrad=True))


def sgd_momentum():
    model = mlp(64, 128, 64)
    train(model, squares, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=True))


def adafactor():
    model = mlp(64, 128, 64)
    train(model, squares, torch.optim.Adafactor(model.parameters()))


def muon():
    model = nn.Sequential(nn.Linear(64, 128, bias=False), nn.Tanh(), nn.Linear(128, 64, bias=False))
    train(model, squares, torch.optim.Muon(model.parameters()))


def clipped():
    model = mlp(64, 128, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(STEPS):
        loss = squares(model)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        print(step, repr(loss.item()))


def loader():
    data = torch.utils.data.TensorDataset(torch.randint(0, 256, (40, 65)))
    batches = iter(torch.utils.data.DataLoader(data, batch_size=8, num_workers=1))

    def loss_of(model):
        (tokens,) = next(batches)
        return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    train(Gpt(layers=1), loss_of)


def exported():
    """Parameters that numpy looks into, and data that is numpy's."""
    model = Gpt(layers=1)
    seen = [parameter.detach().numpy() for parameter in model.parameters()]
    data = torch.from_numpy(np.arange(40 * 65) % 256).view(40, 65)

    def loss_of(model):
        tokens = data[torch.randint(0, 40, (8,))]
        return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    train(model, loss_of)
    print(len(seen))


def foreign_memory():
    """Storages that are not the allocator's: a buffer's, numpy's made in the step, and shared memory."""
    buffer = torch.frombuffer(array.array("f", [0.5] * 4096), dtype=torch.float32).view(64, 64)
    shared = torch.randn(64, 64).share_memory_()
    model = mlp(64, 128, 64)

    def loss_of(model):
        fresh = torch.from_numpy(np.ones((64, 64), dtype=np.float32))
        return (model(fresh + buffer) - shared).pow(2).mean()

    train(model, loss_of)


KINDS = [
    gan, actor_critic, evaluation, closure, adamw_foreach, adamw_fused, adamw_loop, sgd_momentum, adafactor,
    muon, clipped, loader, exported, foreign_memory,
]  # fmt: skip
