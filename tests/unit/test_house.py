# SPDX-License-Identifier: Apache-2.0
"""What holds for every source file: a name has one meaning, and a list that a docstring promises is whole."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from nicps import errors
from nicps.errors import NicpsError

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
                names = (name for name in ast.walk(target) if isinstance(name, ast.Name))
                yield from (name.id for name in names if isinstance(name.ctx, ast.Store))


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


# ---- the tree of errors

BRANCH = re.compile(r"^ {4}((?:│   |    )*)(?:[├└]── )?(\w+) +(?:exit code )?(\d?)")


def drawn(module: ModuleType) -> dict[str, tuple[str, int]]:
    """The tree in a module's docstring: class -> its parent ("": none is drawn), and its exit code."""
    found: dict[str, tuple[str, int]] = {}
    above: list[str] = []
    for line in str(module.__doc__).splitlines():
        if match := BRANCH.match(line):
            depth = len(match[1]) // 4 + ("── " in line)
            above = [*above[:depth], match[2]]
            parent = above[depth - 1] if depth else ""
            code = int(match[3]) if match[3] else found[parent][1]
            found[match[2]] = (parent, code)
    return found


def defined(module: ModuleType) -> dict[str, type[NicpsError]]:
    """The classes of errors that a module defines."""
    classes = inspect.getmembers(module, inspect.isclass)
    return {
        name: cls
        for name, cls in classes
        if issubclass(cls, NicpsError) and cls.__module__ == module.__name__
    }


@pytest.mark.parametrize("name", ["nicps.errors", "nicps.lab.errors"])
def test_the_tree_of_errors_is_as_drawn(name: str) -> None:
    module = importlib.import_module(name)
    tree, classes = drawn(module), defined(module)
    roots = {root for root, (parent, _) in tree.items() if not parent}
    assert roots | classes.keys() == tree.keys()
    for name, cls in classes.items():
        parent, code = tree[name]
        assert parent == ("" if cls is NicpsError else cls.__base__.__name__), name
        assert code == cls.exit_code, name


def test_the_modules_with_errors_of_their_own_are_named() -> None:
    """In the docstring of nicps.errors; a class counts by the name of its base."""
    known = set(defined(errors))
    found: set[str] = set()
    classes = [
        (node.name, {ast.unparse(base) for base in node.bases}, path)
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    ]
    for _ in range(3):  # an error's child can be in a file before it
        for name, bases, path in classes:
            if bases & known:
                known.add(name)
                found.add(".".join(path.relative_to(ROOT).with_suffix("").parts))
    text = str(errors.__doc__).partition("More leaves")[2]
    assert set(re.findall(r"\b(?:nicps|trainer)\.[\w.]*\w", text)) == found - {"nicps.errors"}


# ---- what a folder holds


def listed(package: Path) -> list[str]:
    """Files that the docstring of a folder's `__init__.py` lists, one a line."""
    text = ast.get_docstring(ast.parse((package / "__init__.py").read_text())) or ""
    return re.findall(r"^ *(\w+\.py)  ", text, re.MULTILINE)


def test_a_folder_that_lists_its_files_lists_them_all() -> None:
    packages = [path.parent for path in SOURCES if path.name == "__init__.py"]
    promising = [package for package in packages if listed(package)]
    assert len(promising) >= 2
    for package in promising:
        there = sorted(path.name for path in package.glob("*.py") if path.name != "__init__.py")
        assert sorted(listed(package)) == there, package
