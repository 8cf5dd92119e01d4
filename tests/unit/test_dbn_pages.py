# SPDX-License-Identifier: Apache-2.0
"""What `nicps dbn` shows while it runs and after it: the time that is left, and the pictures of its report."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.unit.test_dbn_reduce import DATA, SMALL
from trainer.dbn import master, report
from trainer.dbn.checkpoint import State
from trainer.dbn.pictures import Grey
from trainer.dbn.progress import costs
from trainer.svg import Series, chart


def test_a_large_weight_leaves_the_other_filters_their_contrast(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = replace(SMALL, layers=(60,), finetune=0)
    form = master.form_of(settings, DATA)
    first = np.where(np.arange(form.size(0)) % 2, 1.0, -1.0).astype(np.float32)
    first[0] = 50.0
    state = State(settings, "", done=[first])
    drawn: list[Grey] = []

    def image(picture: Grey, label: str) -> str:
        drawn.append(picture)
        return label

    monkeypatch.setattr(report, "image", image)
    report._filters(state, DATA, np.zeros(form.size(1), np.float32))
    assert set(np.unique(drawn[0])) == {0, 96, 255}  # black, the lines, white


@pytest.mark.parametrize(("optimizer", "times"), [("sgd", 1), ("cg", 6)])
def test_an_epoch_of_line_searches_is_known_to_take_longer(optimizer: Any, times: int) -> None:
    form = master.form_of(SMALL, DATA)
    (*layers, (_, plain)) = costs(SMALL, form)
    (*same, (_, found)) = costs(replace(SMALL, optimizer=optimizer), form)
    assert same == layers and found == times * plain


def test_a_curve_of_one_epoch_is_a_dot() -> None:
    one = [(1.0, 0.5)]
    assert chart([Series(one, "loss")], "epoch", "loss").count("<circle") == 1
    assert "<circle" not in chart([Series([*one, (2.0, 0.4)], "loss")], "epoch", "loss")


@pytest.mark.parametrize(
    ("last", "shown"), [(1, ["1", "2"]), (2, ["1", "2"]), (3, ["1", "2", "3"])]
)
def test_epochs_are_whole_numbers(last: int, shown: list[str]) -> None:
    points = [(float(epoch), 1.0 / epoch) for epoch in range(1, last + 1)]
    drawn = chart([Series(points, "loss")], "epoch", "loss")
    assert re.findall(r'text-anchor="middle">([^<]*)<', drawn) == shown


def test_seconds_are_not() -> None:
    drawn = chart([Series([(0.0, 1.0), (0.5, 2.0)], "loss")], "s", "version", x_range=(0.0, 1.0))
    assert re.findall(r'text-anchor="middle">([^<]*)<', drawn)[:3] == ["0", "0.2", "0.4"]
