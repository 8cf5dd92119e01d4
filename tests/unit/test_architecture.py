# SPDX-License-Identifier: Apache-2.0
"""The floors of docs/architecture.md: which room may import which; and how large and how tangled classes may be."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OURS = ("nicps", "trainer", "tests")


@dataclass(frozen=True)
class Import:
    """One imported module or name: `nicps.protocol.phase` and `Timings`."""

    where: str  # file and line
    module: str
    name: str | None
    alias: str  # what the file calls it

    @property
    def top(self) -> str:
        return self.module.partition(".")[0]

    @property
    def third_party(self) -> bool:
        return self.top not in OURS and self.top not in sys.stdlib_module_names

    def within(self, *packages: str) -> bool:
        return any(self.module == p or self.module.startswith(p + ".") for p in packages)


def is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


@cache
def nodes_of(path: Path) -> tuple[ast.Import | ast.ImportFrom | ast.ClassDef, ...]:
    """Imports and classes, wherever they are in the file."""
    kinds = ast.Import, ast.ImportFrom, ast.ClassDef
    return tuple(node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, kinds))


def imports_of(path: Path) -> Iterator[Import]:
    """All imports of a file: at its top, inside functions, and for the type checker only."""
    for node in nodes_of(path):
        where = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(where, alias.name, None, alias.asname or alias.name)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{where}: imports are absolute"
            for alias in node.names:
                whole, called = f"{node.module}.{alias.name}", alias.asname or alias.name
                split = (whole, None) if is_module(whole) else (str(node.module), alias.name)
                yield Import(where, *split, called)


@cache
def imports_in(path: Path) -> tuple[Import, ...]:
    return tuple(imports_of(path))


def imports(*places: str) -> list[Import]:
    """Of the files and folders (below the root) named."""
    found: list[Import] = []
    for place in places:
        path = ROOT / place
        files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
        assert files and all(file.is_file() for file in files), place
        for file in files:
            found += imports_in(file)
    return found


def wrong(found: list[Import], *allowed: str) -> list[Import]:
    """Imports of our own that are not in the packages allowed; `nicps` itself holds only the version."""
    ours = [i for i in found if i.top in OURS and i.module != "nicps"]
    return [i for i in ours if not i.within(*allowed)]


ERRORS, WIRE, PROTOCOL, JOB, DATAPLANE, SESSION = (
    "nicps.errors",
    "nicps.wire",
    "nicps.protocol",
    "nicps.job",
    "nicps.dataplane",
    "nicps.session",
)
LAYOUT, SOURCES = "nicps.layout", "nicps.bpf_sources"
BARRIER, EXCHANGE = "nicps.barrier", "nicps.exchange"
#: Of the session, what is said and nothing that is touched.
MESSAGES = (
    *("nicps.session.fields", "nicps.session.messages", "nicps.session.events"),
    *("nicps.session.shared_form", "nicps.session.served_form", "nicps.session.store_form"),
)
EXTRAS, PROGRAMS, SHUTDOWN = "nicps.extras", "nicps.programs", "nicps.shutdown"
RATES = "nicps.rates"
STARTUP, USAGE = "nicps.startup", "nicps.usage"

#: A room, and which of ours it may import. Rooms that are not here are bound by the tests below only.
ROOMS = {
    "nicps/errors.py": (),
    "nicps/wire": (ERRORS, WIRE),
    "nicps/auth.py": (ERRORS, WIRE),
    "nicps/switchauth.py": (ERRORS, WIRE, EXTRAS, "nicps.auth"),
    "nicps/barrier.py": (),
    "nicps/bpf_sources.py": (ERRORS,),
    "nicps/exchange.py": (WIRE,),
    "nicps/extras.py": (ERRORS,),
    "nicps/programs.py": (ERRORS,),
    "nicps/rates.py": (ERRORS,),
    "nicps/shutdown.py": (),
    "nicps/startup.py": (),
    "nicps/usage.py": (ERRORS,),
    "nicps/layout.py": (SOURCES,),
    "nicps/wiretable.py": (ERRORS, WIRE),
    "nicps/messagetable.py": (ERRORS, SESSION),
    "nicps/wiregen.py": (ERRORS, WIRE, "nicps.wiretable", "nicps.messagetable"),
    "nicps/wiredump.py": (ERRORS, WIRE, "nicps.wiretable"),
    "nicps/protocol": (ERRORS, WIRE, EXCHANGE, PROTOCOL),
    "nicps/job": (ERRORS, WIRE, EXCHANGE, PROTOCOL, JOB, *MESSAGES),
    "nicps/store": (ERRORS, WIRE, "nicps.store", *MESSAGES),
    "nicps/dataplane": (ERRORS, WIRE, BARRIER, LAYOUT, SOURCES, DATAPLANE),
    "nicps/compiled": ("nicps.compiled",),
    "nicps/session": (ERRORS, WIRE, BARRIER, EXCHANGE, LAYOUT, SESSION, "nicps.compiled"),
    "nicps/gradient_json.py": (ERRORS,),
    "nicps/client.py": (ERRORS, EXCHANGE, SESSION),
    "nicps/collective": (ERRORS, WIRE, BARRIER, SESSION, "nicps.collective"),
    "nicps/need_first.py": (),
    "nicps/measuring.py": ("nicps.need_first",),
    "nicps/torch": (
        *(ERRORS, WIRE, "nicps.collective", "nicps.torch"),
        *("nicps.session.absolute", "nicps.session.lanes", "nicps.session.sized"),
        *("nicps.measuring", "nicps.need_first", "nicps.compiled.factors"),
    ),
    "nicps/flows.py": (ERRORS, SESSION, "nicps.client", "nicps.collective", "nicps.steps"),
    "nicps/steps.py": (ERRORS, WIRE, SESSION, "nicps.client", "nicps.collective"),
    "nicps/gateway.py": (ERRORS, SESSION, "nicps.client", "nicps.gradient_json"),
    "nicps/agent": (
        *(ERRORS, WIRE, BARRIER, EXCHANGE, DATAPLANE, SESSION, PROTOCOL, JOB),
        *(SHUTDOWN, "nicps.auth", "nicps.switchauth", "nicps.store", "nicps.agent"),
    ),
    "nicps/doctor": (
        *(ERRORS, WIRE, SOURCES, DATAPLANE, EXTRAS, RATES),
        *("nicps.auth", "nicps.doctor"),
    ),
    "nicps/lab": (
        *(ERRORS, WIRE, DATAPLANE, SESSION, PROGRAMS, SHUTDOWN, RATES),
        *("nicps.auth", "nicps.lab"),
    ),
    "nicps/switch": (
        *(ERRORS, WIRE, EXTRAS, PROGRAMS, LAYOUT, DATAPLANE, "nicps.auth", "nicps.switchauth"),
        *("nicps.protocol.phase", "nicps.protocol.view", "nicps.switch"),
    ),
    "trainer": (
        *("nicps.client", "nicps.collective", "nicps.steps", "nicps.torch.factors"),
        *("nicps.torch.guarded", "nicps.torch.parts", "nicps.torch.pending"),
        *("nicps.torch.need", "nicps.flows", "nicps.measuring", "nicps.need_first"),
        *(ERRORS, EXTRAS, PROGRAMS, SHUTDOWN, STARTUP, USAGE),
        *("nicps.gradient_json", "trainer"),
    ),
}


@pytest.mark.parametrize("room", ROOMS)
def test_rooms(room: str) -> None:
    assert wrong(imports(room), *ROOMS[room]) == []


def test_wire_keys_and_state_machines_need_the_standard_library_only() -> None:
    found = imports("nicps/wire", "nicps/auth.py", "nicps/errors.py", "nicps/exchange.py")
    found += imports("nicps/protocol", "nicps/job")
    found += imports(*(f"{module.replace('.', '/')}.py" for module in MESSAGES))
    assert [i for i in found if i.third_party] == []


@pytest.mark.parametrize("room", ["nicps/protocol", "nicps/job", "nicps/store"])
def test_a_state_machine_knows_no_clock_and_no_socket(room: str) -> None:
    """Events in, actions out: that is what lets a simulator run it."""
    found = imports(room)
    forbidden = (
        "asyncio",
        "ctypes",
        "mmap",
        "os",
        "pathlib",
        "random",
        "secrets",
        "select",
        "selectors",
    )
    forbidden += ("signal", "socket", "subprocess", "threading", "time")
    assert [i for i in found if i.within(*forbidden)] == []


def test_nicps_runs_without_the_trainer_and_without_what_only_tests_use() -> None:
    """scapy is GPL-2.0; torch is the trainer's, the backend's, and the benchmark's that measures Gloo."""
    found = imports("nicps")
    assert [i for i in found if i.within("trainer", "tests", "scapy", "sklearn")] == []
    torch = [i for i in found if i.within("torch")]
    assert [i for i in torch if not i.where.startswith(("nicps/bench/", "nicps/torch/"))] == []
    assert [
        i for i in found if i.within("nicps.torch") and not i.where.startswith("nicps/torch/")
    ] == []


def test_bcc_stays_in_the_compiling_child() -> None:
    bcc = {i.where.partition(":")[0] for i in imports("nicps") if i.within("bcc")}
    assert bcc <= {"nicps/dataplane/compile.py"}


def test_nothing_of_the_product_knows_the_lab() -> None:
    allowed = ("nicps/lab/", "nicps/bench/", "nicps/cli/lab.py", "nicps/cli/labshape.py")
    lab = [i for i in imports("nicps", "trainer") if i.within("nicps.lab")]
    assert lab and [i for i in lab if not i.where.startswith(allowed)] == []


def test_only_the_commands_import_the_commands() -> None:
    cli = [i for i in imports("nicps") if i.within("nicps.cli")]
    allowed = ("nicps/cli/", "nicps/__main__.py")
    assert [i for i in cli if not i.where.startswith(allowed)] == []


# ---- parts hold one another in one direction, and none holds too much

_MOST_ATTRIBUTES = 25


def attributes(cls: ast.ClassDef) -> set[str]:
    """What an object of that class holds: what is annotated in the class, and what its methods assign to `self`."""
    found = {
        node.target.id
        for node in cls.body
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Name)
        and not ast.unparse(node.annotation).startswith("ClassVar")
    }
    for node in ast.walk(cls):
        stores = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        if stores and isinstance(node.value, ast.Name) and node.value.id == "self":
            found.add(node.attr)
    return found


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@cache
def classes_in(path: Path) -> dict[str, ast.ClassDef]:
    """The classes that a file defines, by their names."""
    return {node.name: node for node in nodes_of(path) if isinstance(node, ast.ClassDef)}


def large_classes(place: str) -> list[str]:
    """Classes of that folder with too many attributes, those of their bases in the folder counted."""
    files = {module_of(file): file for file in sorted((ROOT / place).rglob("*.py"))}
    classes = {module: classes_in(file) for module, file in files.items()}
    names = {
        module: {found.alias: found for found in imports_in(file)} for module, file in files.items()
    }

    def whole(module: str, name: str) -> set[str]:
        """Attributes of what a file knows by that name; a package's `__init__` passes names on."""
        if name in classes.get(module, {}):
            cls = classes[module][name]
            return attributes(cls).union(*(of_base(module, base) for base in cls.bases))
        found = names.get(module, {}).get(name)
        return whole(found.module, found.name) if found is not None and found.name else set()

    def of_base(module: str, base: ast.expr) -> set[str]:
        """`Base`, `module.Base`, or one of them with parameters in brackets."""
        base = base.value if isinstance(base, ast.Subscript) else base
        if isinstance(base, ast.Attribute):
            found = names[module].get(ast.unparse(base.value))
            return whole(found.module, base.attr) if found is not None else set()
        return whole(module, base.id) if isinstance(base, ast.Name) else set()

    sizes = {(m, name): len(whole(m, name)) for m, found in classes.items() for name in found}
    return [f"{m}.{name}: {size}" for (m, name), size in sizes.items() if size > _MOST_ATTRIBUTES]


def circles(place: str) -> list[str]:
    """Files of that folder that import one another, also for the type checker only, the long way round too."""
    names = {module_of(file): file for file in sorted((ROOT / place).rglob("*.py"))}
    edges = {
        name: {found.module for found in imports_in(file) if found.module in names} - {name}
        for name, file in names.items()
    }
    left = dict(edges)
    while ends := [name for name, others in left.items() if not others & left.keys()]:
        for name in ends:
            del left[name]
    return sorted(left)


def test_no_class_holds_too_much() -> None:
    assert large_classes("nicps") == []


def test_bases_count_wherever_they_are_defined(monkeypatch: pytest.MonkeyPatch) -> None:
    """`StripesExchanger` has more from `Exchanger`, which another file defines."""
    place = ROOT / "nicps/protocol/exchange"
    own = attributes(classes_in(place / "stripes.py")["StripesExchanger"])
    whole = own | attributes(classes_in(place / "base.py")["Exchanger"])
    assert len(whole) > len(own)
    monkeypatch.setattr(sys.modules[__name__], "_MOST_ATTRIBUTES", len(whole) - 1)
    name = "nicps.protocol.exchange.stripes.StripesExchanger"
    assert f"{name}: {len(whole)}" in large_classes("nicps")


@pytest.mark.parametrize(
    ("imported", "base"),
    [
        ("from nicps.base import Base as Other", "Other[int]"),
        ("from nicps import base as other", "other.Base"),
        ("import nicps.base", "nicps.base.Base[int]"),
    ],
)
def test_bases_count_however_they_are_named(
    imported: str, base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nicps").mkdir()
    (tmp_path / "nicps/base.py").write_text("class Base(Generic[T]):\n    a: int\n    b: int\n")
    derived = f"{imported}\nclass Derived({base}):\n    c: int\n"
    (tmp_path / "nicps/derived.py").write_text(derived)
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    monkeypatch.setattr(sys.modules[__name__], "_MOST_ATTRIBUTES", 2)
    assert large_classes("nicps") == ["nicps.derived.Derived: 3"]


def test_no_circle_among_files() -> None:
    """A package's `__init__` shows what it offers; the files inside do not import it."""
    assert circles("nicps") == []
