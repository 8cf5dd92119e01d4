# SPDX-License-Identifier: Apache-2.0
"""What documents point at is there.

Code as `path:name` or `Class.member`, a test that is to be run as `path::name[parameter]`, files, frames.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

from nicps import wire
from nicps.wiretable import ENUMS

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    *sorted((ROOT / "docs").glob("*.md")),
    *(
        ROOT / name
        for name in ("README.md", "CONTRIBUTING.md", "benchmarks/README.md", "vm-lab/README.md")
    ),
]


@cache
def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text()


def pointers() -> list[tuple[str, str]]:
    found: set[tuple[str, str]] = set()
    for name in ("rules.md", "protocol.md", "architecture.md", "faults.md"):
        found |= set(re.findall(r"`([\w./-]+\.(?:py|c|h)):([\w.]+)`", page(name)))
    return sorted(found)


def named_tests() -> list[tuple[str, str, str]]:
    """Path, function and parameter, if there is one."""
    form = re.compile(r"`([\w./-]+\.py)::(\w+)(?:\[([^]]+)\])?`")
    return sorted(set(form.findall(page("faults.md"))))


def has(path: Path, name: str) -> bool:
    """Whether the file defines that: `Class.method`, a function, or a name that is assigned."""
    if path.suffix != ".py":
        return re.search(rf"\b{name}\b", path.read_text()) is not None
    return find(path, name) is not None


def find(path: Path, name: str) -> ast.stmt | None:
    """Where the Python file defines that."""
    body: list[ast.stmt] = ast.parse(path.read_text()).body
    node: ast.stmt | None = None
    for part in name.split("."):
        node = next((n for n in body if part in _defines(n)), None)
        if node is None:
            return None
        body = getattr(node, "body", [])
    return node


def _defines(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return {node.target.id}
    if isinstance(node, ast.Assign):
        return {target.id for target in node.targets if isinstance(target, ast.Name)}
    return set()


def takes(test: ast.stmt, parameter: str) -> bool:
    """Whether a test is parametrized with that text."""
    decorators = getattr(test, "decorator_list", [])
    inside = [node for decorator in decorators for node in ast.walk(decorator)]
    return any(isinstance(node, ast.Constant) and node.value == parameter for node in inside)


def test_what_the_documents_point_at_is_there() -> None:
    found = pointers()
    assert len(found) > 50
    missing = [(p, n) for p, n in found if not (ROOT / p).is_file() or not has(ROOT / p, n)]
    assert missing == []


#: Words in capitals in the documents below that are not the wire's.
OTHER_CAPITALS = {"BPF", "JSON", "LAN", "MAC", "MTU", "SHA", "SPDX", "TCP", "VLAN", "XDP", "XDP_TX"}


def test_the_frames_that_documents_name_are_on_the_wire() -> None:
    """So are flags, marks, steps and phases: all that is in capitals."""
    known = {name for values in ENUMS for name in values.enum.__members__}
    for name in ("rules.md", "protocol.md"):
        found = set(re.findall(r"\b[A-Z][A-Z_]{2,}\b", page(name)))
        assert found & set(wire.FrameType.__members__)
        assert sorted(found - known - OTHER_CAPITALS) == [], name


def test_the_files_that_documents_name_are_there() -> None:
    form = re.compile(
        r"\b(?:nicps|trainer|tests|benchmarks|ebpf|p4|vm-lab)/[\w/-]+\.(?:py|c|h|p4)\b"
    )
    found = {path for page in PAGES for path in form.findall(page.read_text())}
    assert len(found) > 200
    assert [path for path in sorted(found) if not (ROOT / path).is_file()] == []


@cache
def classes() -> dict[str, list[ast.ClassDef]]:
    """All classes of ours, by name."""
    found: dict[str, list[ast.ClassDef]] = {}
    for room in ("nicps", "trainer"):
        for path in (ROOT / room).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef):
                    found.setdefault(node.name, []).append(node)
    return found


def has_member(cls: ast.ClassDef, name: str) -> bool:
    """A class, or one of its bases, defines that: a method, a field, or what a method assigns to `self`."""
    if any(name in _defines(node) for node in cls.body):
        return True
    stores = (node for node in ast.walk(cls) if isinstance(node, ast.Attribute))
    if any(node.attr == name and isinstance(node.ctx, ast.Store) for node in stores):
        return True
    bases = (ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in cls.bases)
    return any(has_member(other, name) for base in bases for other in classes().get(base, ()))


def test_the_members_that_documents_name_are_there() -> None:
    form = re.compile(r"`(?:[\w./-]+:)?([A-Z]\w+)\.(\w+)")
    named = {found for page in PAGES for found in form.findall(page.read_text())}
    found = {(cls, member) for cls, member in named if cls in classes()}
    assert len(found) > 50
    missing = [
        f"{cls}.{member}"
        for cls, member in sorted(found)
        if not any(has_member(node, member) for node in classes()[cls])
    ]
    assert missing == []


def test_the_tests_that_the_faults_name_are_there() -> None:
    found = named_tests()
    assert len(found) > 30
    for path, name, parameter in found:
        assert (ROOT / path).is_file(), path
        test = find(ROOT / path, name)
        assert test is not None, f"{path}::{name}"
        assert not parameter or takes(test, parameter), f"{path}::{name}[{parameter}]"


def test_every_test_among_the_faults_is_named_as_pytest_wants_it() -> None:
    """By its path from the root on, so that it can be run as it stands there."""
    spans = re.findall(r"`([^`\n]*\btest_\w[^`\n]*)`", page("faults.md"))
    assert len(spans) > 30
    form = re.compile(r"tests/\w+/test_\w+\.py(::test_\w+(\[[^]]+\])?)?")
    assert [span for span in spans if not form.fullmatch(span)] == []


def test_every_row_of_faults_names_its_test() -> None:
    """Where a table has a column for it."""
    for table in re.findall(r"(?:^\|.*\n)+", page("faults.md"), re.MULTILINE):
        head, _, *rows = table.splitlines()
        if head.endswith("| test |"):
            assert [row for row in rows if "::test_" not in row.split("|")[-2]] == []
