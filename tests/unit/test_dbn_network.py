# SPDX-License-Identifier: Apache-2.0
"""The stack unrolled into a classifier, and its fine-tuning."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from trainer.dbn import network, rbm
from trainer.dbn.network import Descent, Drop, Layer, Network


def random(seed: int = 1) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def stack() -> list[rbm.Rbm]:
    return [rbm.start(6, 5, 0.8, random(2)), rbm.start(5, 4, 0.8, random(3))]


def example() -> tuple[Network, torch.Tensor, torch.Tensor]:
    v = torch.rand(12, 6, generator=random(4))
    return network.unroll(stack(), 3, random(5)), v, torch.arange(12) % 3


def test_the_classifier_begins_as_the_stack() -> None:
    model, v, _ = example()
    top = model[-1]
    wanted = network.up(stack(), v) @ top.weights + top.biases
    torch.testing.assert_close(network.scores(model, v), wanted)
    x = v.numpy()
    for machine in stack():
        x = 1 / (1 + np.exp(-(x @ machine.weights.numpy() + machine.hidden.numpy())))
    np.testing.assert_allclose(network.up(stack(), v).numpy(), x, atol=1e-6)


def test_what_goes_up_comes_down() -> None:
    """Each layer by the transposed weights; the lowest one by its own kind of units."""
    h = torch.rand(3, 4, generator=random())
    low, high = stack()
    middle = torch.sigmoid(h @ high.weights.T + high.visible)
    bottom = middle @ low.weights.T + low.visible
    torch.testing.assert_close(network.down(stack(), h, "gaussian"), bottom)
    torch.testing.assert_close(network.down(stack(), h, "binary"), torch.sigmoid(bottom))


def test_dropout_keeps_the_mean() -> None:
    """Of a layer's input: units are left out, and the others count for more."""
    model = (Layer(torch.eye(4), torch.zeros(4)),)
    v = torch.ones(20_000, 4)
    found = network.scores(model, v, Drop(inputs=0.25, hidden=0.9), random())
    assert set(found.unique().tolist()) == {0.0, float(torch.tensor(1.0) / 0.75)}
    torch.testing.assert_close(found.mean(0), torch.ones(4), atol=0.02, rtol=0.0)


def test_descent_has_momentum_decay_and_a_longest_norm() -> None:
    model, v, labels = example()
    velocity = tuple(Layer(*(torch.full_like(part, 0.01) for part in layer)) for layer in model)
    found, loss = network.slope(model, v, labels)
    assert loss == pytest.approx(
        float(torch.nn.functional.cross_entropy(network.scores(model, v), labels))
    )
    moved, moving = network.descend(model, velocity, found, Descent(0.5, 0.9, 0.1))
    for old, new, grad, speed in zip(model, moved, found, moving, strict=True):
        wanted = 0.009 - 0.5 * (grad.weights + 0.1 * old.weights)
        torch.testing.assert_close(speed.weights, wanted)
        torch.testing.assert_close(speed.biases, 0.009 - 0.5 * grad.biases)
        torch.testing.assert_close(new.weights, old.weights + wanted)
    short, _ = network.descend(model, velocity, found, Descent(0.5, 0.9, 0.1, max_norm=0.3))
    assert max(float(layer.weights.norm(dim=0).max()) for layer in short) <= 0.3 + 1e-6
    assert max(float(layer.weights.norm(dim=0).max()) for layer in moved) > 0.3


def test_the_slope_is_that_of_the_loss() -> None:
    model, v, labels = example()
    found, _ = network.slope(model, v, labels)
    step = 1e-2
    for at in range(len(model)):
        losses = []
        for sign in (1, -1):
            changed = model[at].weights.clone()
            changed[1, 2] += sign * step
            other = (*model[:at], Layer(changed, model[at].biases), *model[at + 1 :])
            losses.append(network.slope(other, v, labels)[1])
        assert float(found[at].weights[1, 2]) == pytest.approx(
            (losses[0] - losses[1]) / (2 * step), abs=1e-4
        )


def test_frozen_layers_stay() -> None:
    model, v, labels = example()
    found, _ = network.slope(model, v, labels, frozen=2)
    moved, _ = network.descend(model, found, found, Descent(0.5, 0.9, 0.1), frozen=2)
    searched, _ = network.conjugate(model, v, labels, 2, frozen=2)
    for after in (moved, searched):
        assert all(
            torch.equal(a.weights, b.weights) for a, b in zip(after[:2], model, strict=False)
        )
        assert not torch.equal(after[2].weights, model[2].weights)


def test_conjugate_gradients_go_down() -> None:
    model, v, labels = example()
    found, before = network.conjugate(model, v, labels, 3)
    assert network.slope(found, v, labels)[1] < before - 0.005
