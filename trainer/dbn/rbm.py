# SPDX-License-Identifier: Apache-2.0
"""A restricted Boltzmann machine (RBM), trained by contrastive divergence: pure functions over tensors.

Sources, named in the docstrings below:

    [H02]  Hinton, Training products of experts by minimizing contrastive divergence, Neural Computation 14, 2002
    [HS06] Hinton, Salakhutdinov, Reducing the dimensionality of data with neural networks, Science 313, 2006,
           and the program published with it
    [H10]  Hinton, A practical guide to training restricted Boltzmann machines, UTML TR 2010-003

Shapes: N samples, V visible units, H hidden units. All tensors are float32 unless the caller gives others. Nothing here
has a unit: pixels are between 0 and 1, or of mean 0 and variance 1 where the visible units are Gaussian.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Generator, Tensor
from torch.nn.functional import softplus

Visible = Literal["binary", "gaussian"]


class Rbm(NamedTuple):
    """Parameters of an RBM; a gradient and a velocity have the same form."""

    weights: Tensor  # V x H
    visible: Tensor  # V, the biases of the visible units
    hidden: Tensor  # H, the biases of the hidden units


class Rates(NamedTuple):
    """How a step changes the parameters ([H10] sections 7 to 10)."""

    lr: float  # a step along the gradient of a sample's log-likelihood
    momentum: float
    weight_decay: float  # of the weights alone, in units of the gradient


def start(visible: int, hidden: int, scale: float, generator: Generator) -> Rbm:
    """Weights from a normal distribution of standard deviation `scale`, and biases of 0 ([H10] section 8)."""
    weights = torch.empty(visible, hidden).normal_(0.0, scale, generator=generator)
    return Rbm(weights, torch.zeros(visible), torch.zeros(hidden))


def hidden_means(rbm: Rbm, v: Tensor) -> Tensor:
    """N x H: the probability that each hidden unit is 1, given visible units `v`, N x V ([H10] equation 7)."""
    return torch.sigmoid(torch.addmm(rbm.hidden, v, rbm.weights))


def visible_means(rbm: Rbm, h: Tensor, kind: Visible) -> Tensor:
    """N x V: the mean of each visible unit, given hidden units `h`, N x H ([H10] equation 8, section 13.2).

    Of a binary unit it is the probability of 1; a Gaussian unit has variance 1.
    """
    activation = torch.addmm(rbm.visible, h, rbm.weights.T)
    return torch.sigmoid(activation) if kind == "binary" else activation


def sample(means: Tensor, kind: Visible, generator: Generator) -> Tensor:
    """States of units with these means, of the same shape: 0 or 1, or normal with variance 1."""
    if kind == "gaussian":
        return means + torch.empty_like(means).normal_(generator=generator)
    return (torch.empty_like(means).uniform_(generator=generator) < means).to(means.dtype)


def free_energy(rbm: Rbm, v: Tensor, kind: Visible) -> Tensor:
    """N: F(v), for which p(v) is proportional to exp(-F(v)) ([H10] sections 13.2 and 16.1)."""
    hidden = softplus(torch.addmm(rbm.hidden, v, rbm.weights)).sum(1)
    if kind == "gaussian":
        return (v - rbm.visible).square().sum(1) / 2 - hidden
    return -(v @ rbm.visible) - hidden


def gradient(v0: Tensor, h0: Tensor, v1: Tensor, h1: Tensor) -> Rbm:
    """The mean over N samples of the difference of their statistics ([H02], [H10] equation 9).

    With `v1`, `h1` from the model's own distribution it is the gradient of the mean log-likelihood of `v0`. For
    Gaussian visible units the statistics are the same, as their variance is 1 ([H10] section 13.2).

    Args:
        v0, h0: data, N x V, and their hidden means, N x H.
        v1, h1: the same of the reconstructions.
    """
    count = len(v0)
    weights = torch.mm(v0.T, h0).addmm_(v1.T, h1, alpha=-1.0).div_(count)
    return Rbm(weights, (v0.sum(0) - v1.sum(0)) / count, (h0.sum(0) - h1.sum(0)) / count)


class Divergence(NamedTuple):
    """What contrastive divergence makes of a mini-batch."""

    gradient: Rbm
    error: Tensor  # a number: squared error of the reconstructions, summed over samples and visible units


def diverge(
    rbm: Rbm, v0: Tensor, steps: int, kind: Visible, generator: Generator, *, sampled: bool = False
) -> Divergence:
    """CD-k of a mini-batch ([H02]; which units are sampled: [H10] section 3, as in the program of [HS06]).

    Hidden units are sampled before each reconstruction, the last hidden means are not; reconstructions are means.

    Args:
        v0: N x V.
        steps: k.
        sampled: also sample the visible units. Then a long chain ends in the model's own distribution.
    """
    h0 = hidden_means(rbm, v0)
    h1, v1 = h0, v0
    for _ in range(steps):
        v1 = visible_means(rbm, sample(h1, "binary", generator), kind)
        if sampled:
            v1 = sample(v1, kind, generator)
        h1 = hidden_means(rbm, v1)
    return Divergence(gradient(v0, h0, v1, h1), (v0 - v1).square().sum())


def step(rbm: Rbm, velocity: Rbm, slope: Rbm, rates: Rates) -> tuple[Rbm, Rbm]:
    """One step of gradient ascent with momentum ([H10] section 9): new parameters and velocity.

    Weight decay is that of [H10] section 10: `weight_decay` times the weights, off the gradient `slope`.
    """
    moved = Rbm(
        *(
            (rates.momentum * old).add_(new, alpha=rates.lr)
            for old, new in zip(velocity, slope, strict=True)
        )
    )
    moved.weights.sub_(rbm.weights, alpha=rates.lr * rates.weight_decay)
    return Rbm(*(old + by for old, by in zip(rbm, moved, strict=True))), moved
