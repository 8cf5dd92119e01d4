# SPDX-License-Identifier: Apache-2.0
"""nicps without its extras: what a command needs of them is said in one line, with the command that installs it."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from nicps.doctor import host
from nicps.errors import EnvironmentProblem
from nicps.extras import EXTRAS, TESTED_TORCH, install_command, missing_extra, require_extra
from trainer.job import Blame

ROOT = Path(__file__).resolve().parents[2]
BASE = ("numpy", "orjson", "pyroute2")
#: What a benchmark starts as processes of its own, to measure PyTorch.
GLOO = ("nicps.bench.gloo_rank", "nicps.bench.gloo_steps")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the packages that `pip install nicps` brings, and no others."""
    folder = tmp_path_factory.mktemp("site")
    for name in BASE:
        files = importlib.metadata.files(name)
        assert files is not None
        tops = {file.parts[0]: file for file in files if file.parts[0] not in ("..", "__pycache__")}
        for top, file in tops.items():
            (folder / top).symlink_to(Path(str(file.locate())).parents[len(file.parts) - 1] / top)
    return folder


def run(site: Path, code: str) -> subprocess.CompletedProcess[str]:
    """With -S -I Python sees the standard library only."""
    paths = [str(ROOT), str(site)]
    return subprocess.run(
        [sys.executable, "-S", "-I", "-c", f"import sys; sys.path[:0] = {paths}\n{code}"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def nicps(site: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return run(site, f"from nicps.cli import main; sys.exit(main({list(words)}))")


def lacks(done: subprocess.CompletedProcess[str], module: str) -> None:
    """It has ended with the one line that says so."""
    assert done.returncode == EnvironmentProblem.exit_code, done.stderr
    (line,) = done.stderr.splitlines()
    assert ": error: " in line and module in line
    assert line.endswith(install_command(EXTRAS[module]))


def test_the_folder_holds_no_extra(site: Path) -> None:
    for module in EXTRAS:
        assert f"No module named '{module}'" in run(site, f"import {module}").stderr


def test_every_module_of_nicps_is_imported_without_extras(site: Path) -> None:
    code = (
        "import importlib, pkgutil, nicps\n"
        "names = [m.name for m in pkgutil.walk_packages(nicps.__path__, 'nicps.')]\n"
        f"names = [n for n in names if n not in {GLOO} and not n.endswith(('_job', '__main__'))]\n"
        "names = [n for n in names if not n.startswith('nicps.torch')]\n"
        "for name in names: importlib.import_module(name)\n"
        "print(len(names))"
    )
    done = run(site, code)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 100


@pytest.mark.parametrize(
    "words", [("--help",), ("join", "--help"), ("submit", "--help"), ("lab", "--help")]
)
def test_commands_start(site: Path, words: tuple[str, ...]) -> None:
    done = nicps(site, *words)
    assert done.returncode == 0 and "usage: nicps" in done.stdout, done.stderr


def test_doctor_has_a_row_for_training(site: Path) -> None:
    done = nicps(site, "doctor")
    assert "ok    packages" in done.stdout and not done.stderr, done.stderr
    assert "warn  training" in done.stdout
    assert "not installed: torch, scikit-learn, xxhash, safetensors" in done.stdout
    assert install_command("train") in done.stdout


def test_doctor_knows_the_pytorch_that_is_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    assert host.check_training().state == "ok"
    versions = {"torch": "2.130.1", "scikit-learn": "1.5", "xxhash": "3.5", "safetensors": "0.5"}
    monkeypatch.setattr(importlib.metadata, "version", versions.__getitem__)
    row = host.check_training()
    assert row.state == "warn" and "torch 2.130.1" in row.found
    assert f"PyTorch {TESTED_TORCH} was tested" in row.mend


@pytest.mark.parametrize(
    ("words", "module"),
    [
        (("wire", "dump", "no-such.pcap"), "dpkt"),
        (("switch", "p4", "connect"), "thrift"),
        (("bench", "allreduce"), "torch"),
        (("bench", "silence"), "torch"),
    ],
)
def test_a_command_that_needs_an_extra(site: Path, words: tuple[str, ...], module: str) -> None:
    lacks(nicps(site, *words), module)


@pytest.mark.parametrize(
    "command", [["prepare", "--job", ".", "--out", "."], ["run", "--workdir", "."]]
)
def test_a_training_program_without_pytorch(site: Path, command: list[str]) -> None:
    code = f"from trainer.__main__ import main; sys.exit(main({command}))"
    lacks(run(site, code), "torch")


def test_a_job_that_imports_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delitem(sys.modules, "sklearn.datasets", raising=False)  # another test's
    monkeypatch.setitem(sys.modules, "sklearn", None)
    needs = pytest.raises(EnvironmentProblem, match=r"sklearn is not .* 'nicps\[train\]'")
    with needs, Blame(tmp_path, "data()"):
        from sklearn.datasets import load_digits  # noqa: F401


def test_other_modules_are_none_of_ours() -> None:
    assert missing_extra(ModuleNotFoundError(name="numpy")) is None
    assert missing_extra(ModuleNotFoundError("no name")) is None
    require_extra("torch")


# ---- the table, and the files that say what is installed


def requirements() -> dict[str, list[str]]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return {"": project["dependencies"], **project["optional-dependencies"]}


def test_each_module_is_in_its_extra_and_not_in_the_base() -> None:
    needs = requirements()
    assert [need.partition(">")[0] for need in needs[""]] == list(BASE)
    for module, extra in EXTRAS.items():
        name = {"sklearn": "scikit-learn"}.get(module, module)
        assert any(need.startswith(f"{name}>=") for need in needs[extra]), module
    assert needs["lab"] == ["nicps[train,switch,crypto]"]
    assert needs["screens"] == ["nicps[top,metrics,tensorboard]"]
    assert needs["all"] == ["nicps[lab,captures,screens,vm]"]


def test_the_pytorch_that_is_tested() -> None:
    major, minor = map(int, TESTED_TORCH.split("."))
    assert f"torch>={TESTED_TORCH},<{major}.{minor + 1}" in requirements()["train"]
    assert f"TORCH_VERSION:-{TESTED_TORCH}." in (ROOT / ".ci/setup").read_text()
    assert importlib.metadata.version("torch").startswith(f"{TESTED_TORCH}.")
