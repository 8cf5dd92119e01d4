# SPDX-License-Identifier: Apache-2.0
"""docs/examples/ddp: a script for Gloo, and what its owner changes."""

from __future__ import annotations

from difflib import ndiff
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit
EXAMPLES = Path(__file__).parents[2] / "docs/examples/ddp"


def code(name: str) -> list[str]:
    """Its lines below the docstring, without empty ones."""
    text = (EXAMPLES / name).read_text().split('"""', 2)[2]
    return [line.strip() for line in text.splitlines() if line.strip()]


def changed(before: str, after: str) -> list[str]:
    return [line for line in ndiff(code(before), code(after)) if line[0] in "+-"]


def test_two_lines_are_changed() -> None:
    assert changed("mnist_gloo.py", "mnist.py") == [
        "+ import nicps.torch  # noqa: F401",
        '- dist.init_process_group("gloo")',
        '+ dist.init_process_group("nicps")',
    ]


def test_one_line_more_lets_gradients_overlap() -> None:
    assert changed("mnist.py", "overlap.py") == [
        "- import nicps.torch  # noqa: F401",
        "+ import nicps.torch",
        "+ nicps.torch.overlap(model, optimizer)",
    ]
