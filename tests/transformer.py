# SPDX-License-Identifier: Apache-2.0
"""A small transformer as a job: its buffers are what most transformers have, and BatchNorm's."""

from __future__ import annotations

#: Attention behind a float mask with -inf in it, BatchNorm, and a cache that no state_dict holds.
JOB = """\
import math
import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from trainer import Settings

settings = Settings(batch=24, rounds=6, test_every=100, quorum=1.0, checkpoint_s=0)
LENGTH, WIDTH, KINDS = 6, 8, 5

def data(path):
    rng = np.random.default_rng(7)
    x = rng.integers(0, KINDS, (120, LENGTH)).astype(np.uint8)
    y = np.roll(x, 1, axis=1)
    return {"x": x[:90], "y": y[:90]}, {"x": x[90:], "y": y[90:]}

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        mask = torch.full((LENGTH, LENGTH), -math.inf).triu(1)
        self.register_buffer("mask", mask)
        self.register_buffer("scale", torch.tensor(WIDTH**-0.5), persistent=False)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return (q @ k.mT * self.scale + self.mask).softmax(-1) @ v

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(KINDS, WIDTH)
        self.attention = Attention()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.out = nn.Linear(WIDTH, KINDS)

    def forward(self, x):
        x = self.embed(x.long())
        x = x + self.attention(x)
        return self.out(self.norm(x.mT).mT)

def model():
    return Model()

def loss(model, batch):
    return cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].long().flatten())

def success(model, batch):
    return model(batch["x"])[:, -1].argmax(1) == batch["y"][:, -1]

def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
"""
