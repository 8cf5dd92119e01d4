# SPDX-License-Identifier: Apache-2.0
"""RBMs against arithmetic that is done otherwise: all states counted out, and contrastive divergence in NumPy."""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt
import pytest
import torch

from trainer.dbn import rbm
from trainer.dbn.rbm import Rates, Rbm, Visible

Array = npt.NDArray[np.float64]
KINDS: tuple[Visible, ...] = ("binary", "gaussian")


def machine(visible: int, hidden: int, scale: float) -> Rbm:
    random = torch.Generator().manual_seed(5)
    made = [
        torch.empty(shape).normal_(0.0, scale, generator=random)
        for shape in ((visible, hidden), (visible,), (hidden,))
    ]
    return Rbm(*made)


def arrays(of: Rbm) -> tuple[Array, Array, Array]:
    weights, visible, hidden = (part.double().numpy() for part in of)
    return weights, visible, hidden


def states(units: int) -> Array:
    return np.array(list(itertools.product((0.0, 1.0), repeat=units)))


def model_statistics(of: Rbm, kind: Visible) -> tuple[Array, Array, Array]:
    """The means of v h, v and h in the model's own distribution, over all states of the hidden units."""
    weights, visible, hidden = arrays(of)
    every = states(len(hidden))
    if kind == "binary":
        seen = states(len(visible))
        energy = seen @ weights @ every.T + (seen @ visible)[:, None] + every @ hidden
        joint = np.exp(energy) / np.exp(energy).sum()
        return seen.T @ joint @ every, joint.sum(1) @ seen, joint.sum(0) @ every
    # Given h, v is normal around this; what integrating v out leaves is the weight of h.
    means = visible + every @ weights.T
    weight = np.exp(every @ hidden + (means**2 - visible**2).sum(1) / 2)
    chance = weight / weight.sum()
    return (chance[:, None] * means).T @ every, chance @ means, chance @ every


@pytest.mark.parametrize("kind", KINDS)
def test_a_long_chain_gives_the_gradient_of_the_likelihood(kind: Visible) -> None:
    of = machine(4, 3, 0.8)
    data = torch.tensor([[1.0, 0.0, 1.0, 1.0], [0.0, 0.0, 1.0, 0.0]]).repeat(20_000, 1)
    found = rbm.diverge(of, data, 40, kind, torch.Generator().manual_seed(1), sampled=True)
    weights, _, hidden = arrays(of)
    v = data[:2].double().numpy()
    h = 1 / (1 + np.exp(-(v @ weights + hidden)))
    of_data = (v.T @ h / 2, v.mean(0), h.mean(0))
    exact = [a - b for a, b in zip(of_data, model_statistics(of, kind), strict=True)]
    assert all(np.abs(part).max() > 0.1 for part in exact)
    for part, wanted in zip(found.gradient, exact, strict=True):
        np.testing.assert_allclose(part.numpy(), wanted, atol=0.03)


@pytest.mark.parametrize("kind", KINDS)
def test_the_free_energy_has_that_gradient(kind: Visible) -> None:
    """-dF/dw of the data is the half of the gradient that the data make."""
    of = Rbm(*(part.double().requires_grad_() for part in machine(5, 4, 0.5)))
    v = torch.rand(7, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    slopes = torch.autograd.grad(-rbm.free_energy(of, v, kind).mean(), list(of))
    h = torch.sigmoid(v @ of.weights + of.hidden)
    torch.testing.assert_close(slopes[0], v.T @ h / 7)
    torch.testing.assert_close(slopes[2], h.mean(0))
    shift = of.visible if kind == "gaussian" else torch.zeros(5)
    torch.testing.assert_close(slopes[1], (v - shift).mean(0))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("steps", [1, 3])
def test_contrastive_divergence_as_numpy_does_it(kind: Visible, steps: int) -> None:
    of = machine(6, 4, 0.3)
    data = torch.rand(9, 6, generator=torch.Generator().manual_seed(3))
    found = rbm.diverge(of, data, steps, kind, torch.Generator().manual_seed(4))

    random = torch.Generator().manual_seed(4)
    weights, visible, hidden = arrays(of)
    v0 = data.double().numpy()

    def logistic(x: Array) -> Array:
        return 1 / (1 + np.exp(-x))

    h0 = logistic(v0 @ weights + hidden)
    h1, v1 = h0, v0
    for _ in range(steps):
        ones = torch.empty(h1.shape).uniform_(generator=random).numpy() < h1
        v1 = ones @ weights.T + visible
        v1 = logistic(v1) if kind == "binary" else v1
        h1 = logistic(v1 @ weights + hidden)
    wanted = ((v0.T @ h0 - v1.T @ h1) / 9, (v0 - v1).mean(0), (h0 - h1).mean(0))
    for part, exact in zip(found.gradient, wanted, strict=True):
        np.testing.assert_allclose(part.numpy(), exact, atol=1e-6)
    assert float(found.error) == pytest.approx(((v0 - v1) ** 2).sum(), rel=1e-5)


def test_a_step_has_momentum_and_weight_decay() -> None:
    of, velocity, slope = machine(3, 2, 1.0), machine(3, 2, 0.5), machine(3, 2, 0.2)
    moved, moving = rbm.step(of, velocity, slope, Rates(lr=0.1, momentum=0.9, weight_decay=0.01))
    for at, (new, speed) in enumerate(zip(moved, moving, strict=True)):
        decay = 0.01 * of.weights if at == 0 else 0.0
        torch.testing.assert_close(speed, 0.9 * velocity[at] + 0.1 * (slope[at] - decay))
        torch.testing.assert_close(new, of[at] + speed)


def test_samples_have_the_means_asked_for() -> None:
    means = torch.tensor([0.1, 0.5, 0.9]).repeat(20_000, 1)
    for kind in KINDS:
        found = rbm.sample(means, kind, torch.Generator().manual_seed(6))
        torch.testing.assert_close(found.mean(0), means[0], atol=0.03, rtol=0.0)
    assert float(found.var()) == pytest.approx(1.1, abs=0.05)  # of the noise, and of the means
