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


def test_two_lines_are_changed() -> None:
    changed = [line for line in ndiff(code("mnist_gloo.py"), code("mnist.py")) if line[0] in "+-"]
    assert changed == [
        "+ import nicps.torch  # noqa: F401",
        '- dist.init_process_group("gloo")',
        '+ dist.init_process_group("nicps")',
    ]
