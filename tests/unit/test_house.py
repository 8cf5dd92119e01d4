# SPDX-License-Identifier: Apache-2.0
"""What holds for every source file: a name has one meaning, and a list that a docstring promises is whole."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted(path for room in ("nicps", "trainer") for path in (ROOT / room).rglob("*.py"))


def bindings(body: list[ast.stmt]) -> Iterator[str]:
    """Names that a module assigns or defines, each time that it does."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
            continue
        for part in ("body", "orelse", "finalbody"):
            yield from bindings(getattr(node, part, []))
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                yield from (name.id for name in ast.walk(target) if isinstance(name, ast.Name))


def test_a_module_binds_a_name_once() -> None:
    """A second binding changes what the first one means, in silence."""
    twice = {
        str(path.relative_to(ROOT)): names
        for path in SOURCES
        if (names := [name for name, times in counted(path).items() if times > 1])
    }
    assert len(SOURCES) > 100 and twice == {}


def counted(path: Path) -> Counter[str]:
    return Counter(bindings(ast.parse(path.read_text()).body))
