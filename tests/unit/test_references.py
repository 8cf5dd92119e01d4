# SPDX-License-Identifier: Apache-2.0
"""What sums are compared with is independent: references and makers of vectors import nothing of the product."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = {"nicps", "trainer"}
#: A module's docstring that says so.
CLAIM = "Imports nothing of the product"
REFERENCES = (
    "tests.reference",
    "tests.served_reference",
    "tests.striped_reference",
    "tests.striped_rounds",
)
#: Files below the root; `tests.vectors.make` imports all that makes vectors.
INDEPENDENT = (*REFERENCES, "tests.vectors.make", "docs.examples.mlp.numpy_trainer")

#: Imports modules where the product is not there.
BLOCKED = """
import importlib, sys
for name in {product!r}:
    sys.modules[name] = None
for name in sys.argv[1:]:
    importlib.import_module(name)
"""


def file_of(module: str, root: Path) -> Path | None:
    """A module's file below that root, if it is there."""
    path = root.joinpath(*module.split("."))
    files = (path.with_suffix(".py"), path / "__init__.py")
    return next((file for file in files if file.is_file()), None)


def imports_of(file: Path, module: str) -> Iterator[str]:
    """Modules that a file imports, and names that may be modules: at its top, in functions, for the type checker."""
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: 1 - node.level or None] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def chains(module: str, root: Path = ROOT) -> list[str]:
    """How a module comes to import the product: each a chain of modules. It follows what lies below the root."""
    found: list[str] = []
    seen: set[str] = set()
    left = [(module, "")]
    while left:
        name, before = left.pop()
        # With a module its packages are imported.
        for known in (name[:at] for at, sign in enumerate(name + ".") if sign == "."):
            file = file_of(known, root)
            if file is None or known in seen:
                continue
            seen.add(known)
            chain = f"{before}{known} > "
            for imported in imports_of(file, known):
                if imported.partition(".")[0] in PRODUCT:
                    found.append(chain + imported)
                else:
                    left.append((imported, chain))
    return found


def test_references_are_those_that_say_so() -> None:
    """A new one is added here; one that gives its claim up is none any more."""
    files = [path for path in (ROOT / "tests").glob("*.py") if CLAIM in path.read_text("utf-8")]
    assert sorted(f"tests.{path.stem}" for path in files) == sorted(REFERENCES)


@pytest.mark.parametrize("module", INDEPENDENT)
def test_nothing_of_the_product_is_imported(module: str) -> None:
    """Neither by the module nor by another one that it imports."""
    assert file_of(module, ROOT) is not None
    assert chains(module) == []


def test_they_run_where_the_product_is_not_there() -> None:
    """Also an import by a name that only the running program knows would fail."""
    code = BLOCKED.format(product=sorted(PRODUCT))
    modules = [module for module in INDEPENDENT if module.startswith("tests.")]
    run = [sys.executable, "-c", code, *modules]
    result = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("imported", "chain"),
    [
        ("import nicps", "tests.one > nicps"),
        ("def f() -> None:\n    from trainer.loop import Loop", "tests.one > trainer.loop"),
        ("from tests import other", "tests.one > tests.other > nicps.wire"),
        ("from . import other", "tests.one > tests.other > nicps.wire"),
        ("from .other import lanes", "tests.one > tests.other > nicps.wire"),
        ("import tests.room.inner", "tests.one > tests.room > nicps.wire"),
    ],
)
def test_chains_are_found(imported: str, chain: str, tmp_path: Path) -> None:
    (tmp_path / "tests" / "room").mkdir(parents=True)
    (tmp_path / "tests" / "one.py").write_text(imported)
    (tmp_path / "tests" / "other.py").write_text("from nicps import wire")
    (tmp_path / "tests" / "room" / "__init__.py").write_text("from nicps import wire")
    (tmp_path / "tests" / "room" / "inner.py").write_text("")
    assert chain in chains("tests.one", tmp_path)
