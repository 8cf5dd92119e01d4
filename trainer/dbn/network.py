# SPDX-License-Identifier: Apache-2.0
"""The stack of RBMs as a classifier: unrolling, dropout, and fine-tuning. Pure functions over tensors.

Sources, named in the docstrings below:

    [HOT06] Hinton, Osindero, Teh, A fast learning algorithm for deep belief nets, Neural Computation 18, 2006
    [HS06]  Hinton, Salakhutdinov, Science 313, 2006, and the program published with it
    [S14]   Srivastava et al., Dropout: a simple way to prevent neural networks from overfitting, JMLR 15, 2014
    [GB10]  Glorot, Bengio, Understanding the difficulty of training deep feedforward neural networks, AISTATS 2010

Shapes: N samples, C classes. A layer has weights of I x O (inputs, outputs) and O biases. Tensors are float32
unless the caller gives others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Generator, Tensor
from torch.nn.functional import cross_entropy

from trainer.dbn.rbm import Rbm, Visible, hidden_means, visible_means


class Layer(NamedTuple):
    """A layer's parameters; a gradient and a velocity have the same form."""

    weights: Tensor  # I x O
    biases: Tensor  # O


Network = tuple[Layer, ...]


class Descent(NamedTuple):
    """How a step of gradient descent changes the parameters."""

    lr: float
    momentum: float
    weight_decay: float  # of the weights, in units of the gradient
    max_norm: float | None = None  # of the weights that come into a unit ([S14] section 5.1)


class Drop(NamedTuple):
    """Shares of units that are left out, at random for each sample ([S14])."""

    inputs: float
    hidden: float


def up(stack: Sequence[Rbm], v: Tensor) -> Tensor:
    """The hidden means of the topmost RBM, which are the next one's input (H2, [HOT06]); N x V to N x H."""
    for rbm in stack:
        v = hidden_means(rbm, v)
    return v


def down(stack: Sequence[Rbm], h: Tensor, kind: Visible) -> Tensor:
    """What the stack makes of the topmost hidden units, layer by layer; N x H to N x V.

    Args:
        kind: of the lowest RBM's visible units.
    """
    for at, rbm in reversed(list(enumerate(stack))):
        h = visible_means(rbm, h, "binary" if at else kind)
    return h


def unroll(stack: Sequence[Rbm], classes: int, generator: Generator) -> Network:
    """The stack's weights and hidden biases, and a softmax layer over them with small random weights ([HS06])."""
    layers = [Layer(rbm.weights, rbm.hidden) for rbm in stack]
    top = torch.empty(len(layers[-1].biases), classes).normal_(0.0, 0.01, generator=generator)
    return (*layers, Layer(top, torch.zeros(classes)))


def untrained_scale(inputs: int, outputs: int) -> float:
    """The standard deviation of weights of sigmoid units that were not pre-trained ([GB10] equation 16, times 4).

    The factor is the one for the logistic function, whose slope at 0 is a quarter of that of tanh.
    """
    return 4.0 * (2.0 / (inputs + outputs)) ** 0.5


def scores(
    network: Network, v: Tensor, drop: Drop | None = None, generator: Generator | None = None
) -> Tensor:
    """N x C: the inputs of the softmax, from N x V.

    With `drop`, units are left out, and those that are left count for as much more ([S14] section 10): so weights
    from pre-training start as they are, and the same weights serve without dropout ([S14] sections 5.2 and 10).
    """
    for at, layer in enumerate(network):
        if at:
            v = torch.sigmoid(v)
        if drop is not None:
            v = _left_out(v, drop.hidden if at else drop.inputs, generator)
        v = torch.addmm(layer.biases, v, layer.weights)
    return v


def _left_out(v: Tensor, share: float, generator: Generator | None) -> Tensor:
    if share == 0.0:
        return v
    kept = torch.empty_like(v).uniform_(generator=generator) >= share
    return v * kept.to(v.dtype).div_(1.0 - share)


def slope(
    network: Network,
    v: Tensor,
    labels: Tensor,
    drop: Drop | None = None,
    generator: Generator | None = None,
    *,
    frozen: int = 0,
) -> tuple[Network, float]:
    """The gradient of the mean cross-entropy over N samples, and the mean itself in nats.

    Args:
        labels: N, int64.
        frozen: that many layers from below get a gradient of 0 (they are held fixed).
    """
    leaves = [
        Layer(*(part.detach().requires_grad_(at >= frozen) for part in layer))
        for at, layer in enumerate(network)
    ]
    loss = cross_entropy(scores(tuple(leaves), v, drop, generator), labels)
    wanted = [part for layer in leaves[frozen:] for part in layer]
    found = torch.autograd.grad(loss, wanted)
    held = [Layer(*map(torch.zeros_like, layer)) for layer in network[:frozen]]
    free = [Layer(found[at], found[at + 1]) for at in range(0, len(found), 2)]
    return (*held, *free), float(loss.detach())


def descend(
    network: Network, velocity: Network, found: Network, rates: Descent, *, frozen: int = 0
) -> tuple[Network, Network]:
    """One step of gradient descent with momentum: new parameters and velocity.

    v' = momentum v - lr (gradient + weight_decay w), w' = w + v'. Then the weights that come into a unit are scaled
    down to `max_norm`, if they are longer. The lowest `frozen` layers stay as they are.
    """
    layers, moves = list(network[:frozen]), list(velocity[:frozen])
    for layer, move, grad in zip(network[frozen:], velocity[frozen:], found[frozen:], strict=True):
        move = Layer(
            (rates.momentum * move.weights).sub_(grad.weights, alpha=rates.lr),
            (rates.momentum * move.biases).sub_(grad.biases, alpha=rates.lr),
        )
        if rates.weight_decay:
            move.weights.sub_(layer.weights, alpha=rates.lr * rates.weight_decay)
        moved = layer.weights + move.weights
        if rates.max_norm is not None:
            moved = torch.renorm(moved, 2, 1, rates.max_norm)
        layers.append(Layer(moved, layer.biases + move.biases))
        moves.append(move)
    return tuple(layers), tuple(moves)


def conjugate(
    network: Network, v: Tensor, labels: Tensor, searches: int, *, frozen: int = 0
) -> tuple[Network, float]:
    """A few line searches of conjugate gradients on one mini-batch, as [HS06] fine-tunes; new parameters, and the loss.

    SciPy's nonlinear conjugate gradients (Polak and Ribiere), in float64. There is no dropout: a line search needs the
    same function at each point.
    """
    from scipy.optimize import minimize  # half a second, for this alone

    shapes = [part.shape for layer in network[frozen:] for part in layer]

    def network_of(vector: npt.NDArray[np.float64]) -> Network:
        parts, at = [], 0
        for shape in shapes:
            size = shape.numel()
            part = torch.from_numpy(vector[at : at + size]).float()
            parts.append(part.reshape(shape))
            at += size
        free = [Layer(parts[i], parts[i + 1]) for i in range(0, len(parts), 2)]
        return (*network[:frozen], *free)

    def flat(layers: Network) -> npt.NDArray[np.float64]:
        return np.concatenate(
            [part.double().numpy().ravel() for layer in layers[frozen:] for part in layer]
        )

    def function(vector: npt.NDArray[np.float64]) -> tuple[float, npt.NDArray[np.float64]]:
        grad, loss = slope(network_of(vector), v, labels, frozen=frozen)
        return loss, flat(grad)

    first = float(cross_entropy(scores(network, v), labels))
    found = minimize(function, flat(network), jac=True, method="CG", options={"maxiter": searches})
    return network_of(found.x), first
