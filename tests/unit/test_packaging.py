# SPDX-License-Identifier: Apache-2.0
"""The wheel, the Makefile, and the guard that makes CI fail when what must run was skipped."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import nicps

BUILT_FROM = ("pyproject.toml", "setup.py", "README.md", "LICENSE", "LICENSES")
FOLDERS = ("nicps", "trainer", "ebpf", "p4")


def run(*command: str | Path, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    kept.pop("NICPS_NO_SKIPS", None)
    kept.pop("PYTHONPATH", None)
    return subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**kept, **environment},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.fixture(scope="module")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy, so that the checkout gets no build folder."""
    copy = tmp_path_factory.mktemp("tree")
    for name in BUILT_FROM:
        source = checkout / name
        if source.is_dir():
            shutil.copytree(source, copy / name)
        else:
            shutil.copy(source, copy / name)
    for name in FOLDERS:
        shutil.copytree(checkout / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "pip", "wheel", ".", "--no-deps", "--no-build-isolation"]
    done = run(*command, "--no-index", "--wheel-dir", "out", cwd=copy)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = (copy / "out").glob("*.whl")
    return built


def test_wheel_holds_every_source(checkout: Path, wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        held = set(archive.namelist())
    wanted = {
        str(path.relative_to(checkout))
        for folder in ("nicps", "trainer")
        for path in (checkout / folder).rglob("*.py")
        if "__pycache__" not in path.parts
    }
    wanted |= {
        str("nicps/_ebpf" / path.relative_to(checkout / "ebpf"))
        for path in (checkout / "ebpf").rglob("*.[ch]")
    }
    wanted |= {
        str("nicps/_p4" / path.relative_to(checkout / "p4"))
        for path in (checkout / "p4").rglob("*")
        if path.suffix in (".p4", ".json")
    }
    assert wanted <= held
    assert not {name for name in held if name.startswith(("tests/", "ebpf/", "setup"))}
    assert any(name.endswith("entry_points.txt") for name in held)


def test_wheel_asks_for_what_nicps_alone_needs(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        metadata = archive.read(name).decode()
    needs = re.findall(r"^Requires-Dist: ([\w-]+)(.*)$", metadata, re.M)
    assert {name for name, more in needs if "extra ==" not in more} == {
        "numpy",
        "orjson",
        "pyroute2",
    }
    extras = set(re.findall(r"^Provides-Extra: (.*)$", metadata, re.M))
    parts = {"train", "trainers", "captures", "switch", "crypto", "top", "metrics", "tensorboard"}
    assert extras == parts | {"spark", "screens", "lab", "vm", "all", "dev"}


def test_wheel_works_away_from_the_checkout(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    done = run(
        *(sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--quiet"),
        *("--target", site, wheel),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    path = {"PYTHONPATH": str(site)}
    done = run(sys.executable, "-m", "nicps", "--version", cwd=tmp_path, **path)
    assert done.stdout == f"nicps {nicps.__version__}\n", done.stderr
    code = "from nicps import bpf_sources; print(bpf_sources.path('nicps.c'))"
    done = run(sys.executable, "-c", code, cwd=tmp_path, **path)
    assert done.stdout.strip() == str(site / "nicps/_ebpf/nicps.c"), done.stderr
    code = "from nicps.switch import program; print(program.compiled()); print(program.reasons())"
    done = run(sys.executable, "-c", code, cwd=tmp_path, **path)
    assert done.stdout.startswith(str(site / "nicps/_p4/nicps.json")), done.stderr
    assert "holder" in done.stdout
    code = "import trainer, nicps; print(trainer.__file__, nicps.__file__)"
    done = run(sys.executable, "-c", code, cwd=tmp_path, **path)
    assert done.stdout.count(str(site)) == 2, done.stderr


@pytest.fixture
def fake_checkout(checkout: Path, tmp_path: Path) -> Path:
    """The Makefile with a set-up that does nothing and a Python that repeats its arguments."""
    shutil.copy(checkout / "Makefile", tmp_path)
    for name, text in {
        ".ci/setup": "#!/bin/sh\necho setting up >&2\n",
        ".venv/bin/python": '#!/bin/sh\necho progress\necho "{\\"args\\": \\"$*\\"}"\n',
    }.items():
        script = tmp_path / name
        script.parent.mkdir(parents=True)
        script.write_text(text)
        script.chmod(0o755)
    return tmp_path


@pytest.mark.parametrize("arguments", [[], ["-w"]])
def test_demo_ends_with_its_result(fake_checkout: Path, arguments: list[str]) -> None:
    away = fake_checkout.parent
    done = run(
        *("make", *arguments, "-C", fake_checkout, "demo"),
        cwd=away,
        NICPS_DATA="",
        MAKEFLAGS="",
        ARGS="",
    )
    assert done.returncode == 0, done.stderr
    last = done.stdout.splitlines()[-1]
    assert last == '{"args": "-m nicps lab run trainer/jobs/digits --hosts 4 --json"}'


@pytest.mark.parametrize(
    "name",
    ["train-images-idx3-ubyte", "train-images-idx3-ubyte.gz", "mnist/train-images-idx3-ubyte"],
)
def test_demo_finds_mnist(fake_checkout: Path, tmp_path: Path, name: str) -> None:
    images = tmp_path / "data" / name
    images.parent.mkdir(parents=True)
    images.write_text("")
    make = ("make", "-C", fake_checkout, "demo", "HOSTS=3", "ARGS=--set seed=1")
    done = run(*make, f"DATA={tmp_path / 'data'}", cwd=tmp_path, NICPS_DATA="", MAKEFLAGS="")
    last = done.stdout.splitlines()[-1]
    wanted = "-m nicps lab run trainer/jobs/mnist --hosts 3 --json --set seed=1"
    assert last == f'{{"args": "{wanted}"}}', done.stderr


@pytest.mark.parametrize("how", ["DATA", "NICPS_DATA"])
def test_demo_refuses_data_that_are_not_there(
    fake_checkout: Path, tmp_path: Path, how: str
) -> None:
    given = {"NICPS_DATA": "", "MAKEFLAGS": "", how: str(tmp_path / "no data")}
    make = ["make", "-C", str(fake_checkout), "demo"]
    if how == "DATA":
        make.append(f"DATA={given.pop('DATA')}")
    done = run(*make, cwd=tmp_path, **given)
    assert done.returncode == 2 and done.stdout == ""
    (said,) = (line for line in done.stderr.splitlines() if "error:" in line)
    assert f"{tmp_path / 'no data'} is no folder" in said


def test_demo_says_that_it_has_not_found_mnist(fake_checkout: Path, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    make = ("make", "-C", fake_checkout, "demo", f"DATA={folder}")
    done = run(*make, cwd=tmp_path, NICPS_DATA="", MAKEFLAGS="")
    assert done.returncode == 0
    assert done.stderr.count(f"neither {folder} nor its mnist/ has MNIST") == 1
    assert "lab run trainer/jobs/digits" in done.stdout.splitlines()[-1]


def test_the_demo_of_the_belief_network_ends_with_its_result(
    fake_checkout: Path, tmp_path: Path
) -> None:
    make = ("make", "-C", fake_checkout, "demo-dbn", "ARGS=--seed 1")
    done = run(*make, cwd=tmp_path, NICPS_DATA=str(tmp_path), MAKEFLAGS="")
    assert done.returncode == 0, done.stderr
    wanted = "-m nicps dbn --workers 10 --epochs 3 --finetune 12 --json --seed 1"
    assert done.stdout.splitlines()[-1] == f'{{"args": "{wanted}"}}'


def test_make_n_runs_nothing(fake_checkout: Path) -> None:
    done = run("make", "-n", "-C", fake_checkout, "demo", cwd=fake_checkout, MAKEFLAGS="")
    assert done.returncode == 0
    assert "{" not in done.stdout
    assert "setting up" not in done.stderr


def test_ci_runs_what_the_readme_says(checkout: Path) -> None:
    script = (checkout / ".ci/run").read_text()
    assert re.findall(r"^(?:nice -n 19 )?(make [\w-]+)", script, re.M) == ["make lint", "make test"]
    assert "`make test`" in (checkout / "README.md").read_text()
    assert os.access(checkout / ".ci/run", os.X_OK)
    assert os.access(checkout / ".ci/setup", os.X_OK)


@pytest.mark.parametrize(
    ("failing", "code", "said"),
    [
        ((), 0, ""),
        (("lint",), 1, "the checks (make lint) failed"),
        (("test",), 0, ""),  # the second time, alone, they do not fail
        (("test", "test-failed"), 1, "the tests failed"),
        (("lint", "test", "test-failed"), 1, "the checks (make lint) and the tests failed"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else None,
)
def test_ci_fails_with_the_checks_and_with_the_tests(
    checkout: Path, tmp_path: Path, failing: tuple[str, ...], code: int, said: str
) -> None:
    """The checks run beside the tests, and their output is shown after those."""
    shutil.copytree(checkout / ".ci", tmp_path / "tree/.ci")
    (tmp_path / "tree/.ci/setup").write_text("#!/bin/sh\n")
    make = tmp_path / "bin/make"
    make.parent.mkdir()
    cases = " ".join(f"{target}) exit 2;;" for target in failing)
    make.write_text(f'#!/bin/sh\necho "$1 runs"\ncase $1 in {cases} esac\n')
    make.chmod(0o755)
    path = os.pathsep.join([str(make.parent), os.environ["PATH"]])
    done = run(tmp_path / "tree/.ci/run", cwd=tmp_path, PATH=path)
    assert done.returncode == code, done.stderr
    again = ["test-failed runs"] if "test" in failing else []
    assert done.stdout.splitlines() == ["test runs", *again, "lint runs"]
    errors = [line for line in done.stderr.splitlines() if "error:" in line]
    assert errors == ([f".ci/run: error: {said}"] if said else [])


SKIPPING = """
import pytest

def test_runs():
    pass

@pytest.mark.parametrize("n", [1])
def test_skips(n):
    pytest.skip("no reason")
"""


@pytest.mark.short(
    "alone-unit-1-1", "alone-netns-1-1", "workers-unit--0", "workers-xdp-1-1", "workers-vm-1-0"
)
@pytest.mark.parametrize(
    ("folder", "guard", "code"),
    [("unit", "", 0), ("unit", "1", 1), ("xdp", "1", 1), ("netns", "1", 1), ("vm", "1", 0)],
)
@pytest.mark.parametrize("workers", [(), ("-n", "2")], ids=["alone", "workers"])
def test_no_skips(
    checkout: Path, tmp_path: Path, folder: str, guard: str, code: int, workers: tuple[str, ...]
) -> None:
    done = guarded(checkout, tmp_path, folder, SKIPPING, *workers, NICPS_NO_SKIPS=guard)
    assert done.returncode == code, done.stdout
    assert ("NICPS_NO_SKIPS: tests/" in done.stdout) == (code == 1)


@pytest.mark.parametrize("workers", [(), ("-n", "2")], ids=["alone", "workers"])
def test_a_file_that_skips_itself(checkout: Path, tmp_path: Path, workers: tuple[str, ...]) -> None:
    text = "import pytest\npytest.importorskip('no_such_module')\n"
    done = guarded(checkout, tmp_path, "unit", text, *workers, NICPS_NO_SKIPS="1")
    assert done.returncode == 1, done.stdout
    assert "NICPS_NO_SKIPS: tests/unit/test_it.py was skipped" in done.stdout


SHORT = """
import pytest

@pytest.mark.short("b")
@pytest.mark.parametrize("name", ["a", "b", "c"])
def test_names(name):
    assert name == "b"
"""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [((), "1 passed"), (("-n", "2"), "1 passed"), (("-m", "long"), "2 failed")],
)
def test_of_parameters_some_are_short(
    checkout: Path, tmp_path: Path, arguments: tuple[str, ...], said: str
) -> None:
    done = guarded(checkout, tmp_path, "unit", SHORT, *arguments)
    assert said in done.stdout, done.stdout


def test_short_parameters_are_there(checkout: Path, tmp_path: Path) -> None:
    done = guarded(checkout, tmp_path, "unit", SHORT.replace('short("b")', 'short("b", "x")'))
    assert done.returncode != 0
    assert "mark.short names what is not there: test_names[x]" in done.stdout + done.stderr


INTERRUPTED = """
import signal, subprocess, sys

def test_what_is_started_can_be_interrupted():
    words = [sys.executable, "-c", "import signal; print(signal.getsignal(signal.SIGINT))"]
    said = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    assert "default_int_handler" in said
"""


@pytest.mark.parametrize("workers", [(), ("-n", "1")], ids=["alone", "workers"])
def test_started_with_sigint_ignored(
    checkout: Path, tmp_path: Path, workers: tuple[str, ...]
) -> None:
    """As `nohup make test &` does in a shell without job control."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        done = guarded(checkout, tmp_path, "unit", INTERRUPTED, *workers)
    finally:
        signal.signal(signal.SIGINT, before)
    assert done.returncode == 0, done.stdout


def guarded(
    checkout: Path,
    tmp_path: Path,
    folder: str,
    text: str,
    *arguments: str,
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    """A run of tests in that folder of another tree, with our conftest.py."""
    shutil.copy(checkout / "pyproject.toml", tmp_path)
    tests = tmp_path / "tests" / folder
    tests.mkdir(parents=True)
    shutil.copy(checkout / "tests/conftest.py", tmp_path / "tests")
    shutil.copytree(checkout / "vm-lab", tmp_path / "vm-lab")
    (tests / "test_it.py").write_text(text)
    pytest_here = (sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "-rs")
    return run(*pytest_here, *arguments, cwd=tmp_path, PYTHONPATH=str(checkout), **environment)


P4_PROGRAMS = ("simple_switch", "p4c-bm2-ss")
P4 = """
import pytest

@pytest.mark.p4("p4c-bm2-ss")
def test_compiler():
    pass

@pytest.mark.p4("simple_switch", "p4c-bm2-ss")
def test_both():
    pytest.skip("no reason")

def test_switch():
    pytest.skip("no reason")
"""


@pytest.mark.parametrize(
    ("programs", "passed", "code"),
    [((), 0, 0), (("p4c-bm2-ss",), 1, 0), (("simple_switch",), 0, 0), (P4_PROGRAMS, 1, 1)],
)
def test_who_needs_what_of_p4(
    checkout: Path, tmp_path: Path, programs: tuple[str, ...], passed: int, code: int
) -> None:
    """The compiler's own test needs nothing else; where both are, a skip is an error."""
    for name in programs:
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    done = guarded(checkout, tmp_path, "p4", P4, PATH=str(tmp_path), NICPS_NO_SKIPS="1")
    assert done.returncode == code, done.stdout
    counted = f"{passed} passed, " if passed else ""
    assert f"{counted}{3 - passed} skipped" in done.stdout
    both = "needs simple_switch (the p4lang project's package p4lang-bmv2, see docs/switch.md) and p4c-bm2-ss"
    assert (both in done.stdout) == (not programs)
