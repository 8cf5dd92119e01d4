# SPDX-License-Identifier: Apache-2.0
"""PyTorch without its compiler, until a job asks for it; each in an interpreter of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

IMPORT = """
import sys
from trainer import startup
startup.import_torch()
import torch
"""
STEPS = """
model = torch.nn.Linear(4, 2)
for kind in (torch.optim.SGD, torch.optim.Adam, torch.optim.LBFGS):
    optimizer = kind(model.parameters(), lr=0.1)
    before = model.weight.detach().clone()
    def loss():
        optimizer.zero_grad()
        value = model(torch.ones(3, 4)).square().sum()
        value.backward()
        return value
    optimizer.step(loss)
    optimizer.load_state_dict(optimizer.state_dict())
    assert not torch.equal(before, model.weight)
"""
LOADED = 'print("torch._dynamo.eval_frame" in sys.modules)\n'
COMPILED = """
twice = torch.compile(lambda x: x * 2, backend="eager")
print(twice(torch.ones(2)).tolist())
"""


def said(checkout: Path, program: str) -> tuple[int, list[str]]:
    """Exit code, and what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=checkout, capture_output=True, text=True, timeout=120
    )
    return done.returncode, done.stdout.splitlines()


def test_optimizers_work_without_the_compiler(checkout: Path) -> None:
    assert said(checkout, IMPORT + STEPS + LOADED) == (0, ["False"])


@pytest.mark.parametrize("before", [pytest.param("", marks=pytest.mark.long), STEPS])
def test_a_job_that_compiles_gets_it(checkout: Path, before: str) -> None:
    assert said(checkout, IMPORT + before + COMPILED + LOADED) == (0, ["[2.0, 2.0]", "True"])


def test_a_job_that_compares_tensors_needs_no_compiler(checkout: Path) -> None:
    """`torch.testing` imports modules that look for a frame's module among all that are there."""
    compares = "torch.testing.assert_close(torch.ones(2), torch.ones(2))\n"
    assert said(checkout, IMPORT + compares + LOADED) == (0, ["False"])
