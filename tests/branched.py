# SPDX-License-Identifier: Apache-2.0
"""Networks with parallel branches, and without."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


def conv(inputs: int, outputs: int, size: int) -> nn.Module:
    """A convolution, BatchNorm, and a ReLU in place."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, size, padding=size // 2),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    )


class Inception(nn.Module):
    def __init__(self, inputs: int, one: int, three: int, five: int, pool: int) -> None:
        super().__init__()
        self.one = conv(inputs, one, 1)
        self.three = nn.Sequential(conv(inputs, three // 2, 1), conv(three // 2, three, 3))
        self.five = nn.Sequential(conv(inputs, five // 2, 1), conv(five // 2, five, 5))
        self.pool = nn.Sequential(nn.MaxPool2d(3, 1, 1), conv(inputs, pool, 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.one(x), self.three(x), self.five(x), self.pool(x)], 1)


class GoogLeNet(nn.Module):
    """Nine blocks; with `heads` a classifier in the middle, as the published one has in training."""

    def __init__(self, heads: bool = False) -> None:
        super().__init__()
        self.stem = nn.Sequential(conv(1, 16, 3), conv(16, 24, 3))
        sizes = [(24, 8, 16, 4, 4), *[(32, 8, 16, 4, 4)] * 4, (32, 16, 32, 8, 8)]
        sizes += [(64, 16, 32, 8, 8)] * 3
        self.blocks = nn.ModuleList(Inception(*size) for size in sizes)
        self.drop = nn.Dropout(0.4)
        self.head = nn.Linear(64, 10)
        self.middle = nn.Linear(32, 10) if heads else None

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        x = self.stem(x)
        early = None
        for at, block in enumerate(self.blocks):
            x = block(x)
            if at == 3 and self.middle is not None:
                early = self.middle(x.mean((2, 3)))
        late = self.head(self.drop(x.mean((2, 3))))
        return late if early is None else (late, early)


class ResNeXt(nn.Module):
    """Stages of blocks of eight equal ways, which are added to each other and to what is past them."""

    def __init__(self, ways: int = 8) -> None:
        super().__init__()
        self.stem = conv(1, 16, 3)
        sizes = [(16, 32, 4), (32, 32, 4), (32, 64, 8), (64, 64, 8), (64, 64, 8)]
        self.blocks = nn.ModuleList(
            nn.ModuleList(
                nn.Sequential(
                    conv(inputs, width, 1), conv(width, width, 3), conv(width, outputs, 1)
                )
                for _ in range(ways)
            )
            for inputs, outputs, width in sizes
        )
        self.past = nn.ModuleList(
            nn.Identity() if inputs == outputs else nn.Conv2d(inputs, outputs, 1)
            for inputs, outputs, _ in sizes
        )
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for ways, past in zip(self.blocks, self.past, strict=True):
            x = functional.relu(past(x) + sum(way(x) for way in ways))
        return self.head(x.mean((2, 3)))


class InceptionResidual(nn.Module):
    """Four ways, and a fifth one past them that is empty."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.block = conv(1, 24, 3), Inception(24, 6, 6, 6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return x + self.block(x)


class Towers(nn.Module):
    """Two inputs, a tower each, in which there is a fork, too; both use `shared`."""

    def __init__(self, left: int = 32, right: int = 32) -> None:
        super().__init__()
        self.shared = nn.Linear(6, 8)
        self.left = nn.Sequential(nn.Linear(8, left), nn.ReLU(), nn.Dropout(0.2))
        self.wide, self.deep = nn.Linear(left, 12), nn.Linear(left, 12)
        self.right = nn.Sequential(nn.Linear(8, right), nn.ReLU(), nn.Linear(right, 12))
        self.join = nn.Linear(24, 3)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        a = self.left(self.shared(a))
        a = self.wide(a) + torch.tanh(self.deep(a))
        return self.join(torch.cat((a, self.right(self.shared(b))), 1))


class Encoder(nn.Module):
    """A transformer's block, written out; with `gain` a parameter of its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.drop = nn.Dropout(0.1)
        self.gain = nn.Parameter(torch.ones(width))
        self.second = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        scores = self.q(y) @ self.k(y).transpose(1, 2) / 4
        x = x + self.gain * self.drop(self.out(scores.softmax(2) @ self.v(y)))
        return x + self.drop(self.mlp(self.second(x)))


class Transformer(nn.Module):
    """Embedding and head share their weight."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, width)
        self.place = nn.Parameter(torch.randn(5, width) / 10)
        self.blocks = nn.Sequential(Encoder(width), Encoder(width))
        self.head = nn.Linear(width, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(x) + self.place))


class Residual(nn.Module):
    """ResNet's block; with `shortcut` the way past it has a convolution."""

    def __init__(self, shortcut: bool) -> None:
        super().__init__()
        self.first = nn.Conv2d(4, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.second = nn.Conv2d(4, 4, 3, padding=1)
        wide = [nn.Conv2d(4, 8, 1), nn.Conv2d(8, 4, 3, padding=1)]
        self.past = nn.Sequential(*wide) if shortcut else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(functional.relu(self.norm(self.first(x))))
        return functional.relu(y + self.past(x))


class Branching(nn.Module):
    """Cannot be traced: what it computes depends on the numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(3, 4), nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4))
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            return self.head(self.left(x) + self.right(x))
        return self.head(self.right(x) - self.left(x))
