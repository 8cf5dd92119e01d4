# SPDX-License-Identifier: Apache-2.0
"""Each check of `nicps doctor`, on hosts that are not this one."""

from __future__ import annotations

import json
import os
import pwd
import re
import subprocess
import sys
from pathlib import Path

import pytest

from nicps import doctor
from nicps.auth import write_key
from nicps.cli import main
from nicps.dataplane.interface import Interface
from nicps.doctor import access, host, interface
from nicps.doctor.check import Check, fail, ok, warn


def training_user() -> pwd.struct_passwd:
    """Somebody whose rights this test may ask for: `nobody` for root, otherwise oneself."""
    return pwd.getpwnam("nobody") if os.geteuid() == 0 else pwd.getpwuid(os.geteuid())


@pytest.mark.parametrize(
    ("release", "state"),
    [
        ("6.18.44-vm", "ok"),
        ("6.1.0-13-amd64", "ok"),
        ("5.19.0-50-generic", "warn"),
        ("5.10.0-8-amd64", "fail"),
        ("4.19.0", "fail"),
        ("strange", "fail"),
    ],
)
def test_kernel(release: str, state: str) -> None:
    assert host.check_kernel(release).state == state


def test_lockdown(tmp_path: Path) -> None:
    file = tmp_path / "lockdown"
    assert host.check_lockdown(file).state == "ok"
    file.write_text("none [integrity] confidentiality\n")
    assert host.check_lockdown(file) == ok("lockdown", "integrity")
    file.write_text("none integrity [confidentiality]\n")
    assert host.check_lockdown(file).state == "warn"


def test_jit_and_btf(tmp_path: Path) -> None:
    file = tmp_path / "bpf_jit_enable"
    file.write_text("0\n")
    assert host.check_jit(file).state == "warn"
    file.write_text("1\n")
    assert host.check_jit(file).state == "ok"
    assert host.check_btf(file).state == "ok"
    assert host.check_btf(tmp_path / "none").state == "warn"


@pytest.mark.parametrize(
    ("available_kb", "state"), [(8_000_000, "ok"), (900_000, "warn"), (200_000, "fail")]
)
def test_memory(tmp_path: Path, available_kb: int, state: str) -> None:
    file = tmp_path / "meminfo"
    file.write_text(f"MemTotal: 9 kB\nMemAvailable:   {available_kb} kB\n")
    assert host.check_memory(file).state == state


def test_privileges() -> None:
    assert host.check_privileges("CapEff:\t000001ffffffffff\n").state == "ok"
    row = host.check_privileges("CapEff:\t0000000000000000\n")
    assert row.state == "fail"
    assert "CAP_NET_ADMIN" in row.found
    assert row.mend
    unit = (Path(doctor.__file__).parents[2] / "packaging" / "nicps@.service").read_text()
    given = re.findall(r"^CapabilityBoundingSet=(.*)$", unit, re.MULTILINE)
    assert sorted(" ".join(given).split()) == sorted(host.CAPABILITIES)
    for name, bit in host.CAPABILITIES.items():
        row = host.check_privileges(f"CapEff:\t{0x1FFFFFFFFFF & ~(1 << bit):016x}\n")
        assert row.state == "fail" and row.found.endswith(f"without {name}")


def test_key(tmp_path: Path) -> None:
    """Every reason for which `nicps join` would refuse it."""
    path = tmp_path / "key"
    for text, mode, mend in (
        (None, 0o600, f"`nicps key new {path}` makes one"),
        ("", 0o644, f"`chmod 600 {path}`"),
        ("no key", 0o600, "`nicps key new`"),
    ):
        if text is not None:
            path.write_text(text)
            path.chmod(mode)
        row = doctor.check_key(path)
        assert (row.name, row.state) == ("key", "fail")
        assert row.found and mend in row.mend and mend not in row.found
    assert doctor.check_key(tmp_path).mend
    path.unlink()
    write_key(path)
    assert doctor.check_key(path) == ok("key", str(path))


def test_bcc_missing(tmp_path: Path) -> None:
    assert host.check_bcc(str(tmp_path / "no-python")).state == "fail"
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'ImportError: libbcc.so.0: not found' >&2\nexit 1\n")
    python.chmod(0o755)
    row = host.check_bcc(str(python))
    assert row.state == "fail"
    assert "libbcc.so.0" in row.found
    assert "python3-bpfcc" in row.mend


def test_packages() -> None:
    row = host.check_packages(("numpy", "a-package-of-nobody"))
    assert row.state == "fail"
    assert "a-package-of-nobody" in row.found
    assert host.check_packages(("numpy",)).state == "ok"


def test_interface_of_that_name_is_missing() -> None:
    (row,) = interface.check_interface("no-such-if0")
    assert row.state == "fail"
    assert "no-such-if0" in row.found
    assert interface.check_interface("lo")[0].state == "fail"
    assert interface.check_interface(None)[0].state == "warn"


@pytest.mark.parametrize(
    ("mtu", "state"), [(1400, "fail"), (1499, "fail"), (1500, "ok"), (3500, "ok"), (9000, "warn")]
)
def test_mtu(mtu: int, state: str) -> None:
    link = Interface("eth1", 2, bytes(6), mtu, True)
    assert interface.check_mtu(link).state == state


def test_access_names_the_closed_folder(open_path: Path) -> None:
    closed = open_path / "closed"
    job = closed / "job"
    job.mkdir(parents=True)
    (job / "job.py").write_text("")
    user = training_user()
    assert access.closed_path([job], user) is None
    closed.chmod(0o000)
    try:
        assert access.closed_path([job], user) == f"{closed} (cannot be entered)"
    finally:
        closed.chmod(0o755)


def test_access_looks_into_folders(open_path: Path) -> None:
    (open_path / "inner").mkdir()
    secret = open_path / "inner" / "images.gz"
    secret.write_text("")
    user = training_user()
    assert access.closed_path([open_path], user) is None
    secret.chmod(0o000)
    assert access.closed_path([open_path], user) == f"{secret} (cannot be read)"


def test_access_follows_links(open_path: Path) -> None:
    closed = open_path / "closed"
    closed.mkdir()
    (closed / "data").write_text("")
    link = open_path / "data"
    link.symlink_to(closed / "data")
    closed.chmod(0o000)
    try:
        found = access.closed_path([link], training_user())
    finally:
        closed.chmod(0o755)
    assert found is not None
    assert found.startswith(str(closed))


def test_access_rows(open_path: Path) -> None:
    job = open_path / "job"
    job.mkdir()
    name = training_user().pw_name
    by_name = {row.name: row for row in access.check_access(name, job, open_path / "absent")}
    assert by_name["job"].state == "fail"
    assert "job.py" in by_name["job"].mend
    assert by_name["data"].state == "fail"
    (job / "job.py").write_text("")
    by_name = {row.name: row for row in access.check_access(name, job, open_path)}
    assert by_name["job"].state == "ok"
    assert by_name["data"].state == "ok"
    (row,) = access.check_access("no-such-user", None, None)
    assert row.state == "fail"


def test_every_bad_row_says_how_to_mend() -> None:
    none = [Path(f"/no/{name}") for name in ("job", "data", "key")]
    for row in doctor.examine("no-such-if0", "no-such-user", *none):
        assert "\n" not in row.found
        assert (row.state == "ok") == (row.mend == ""), row


def test_table_and_worst() -> None:
    rows = [ok("a", "1"), warn("longer", "2", "do this"), fail("b", "3", "do that")]
    assert doctor.table(rows).splitlines() == [
        "ok    a       1",
        "warn  longer  2",
        "              -> do this",
        "fail  b       3",
        "              -> do that",
    ]
    assert doctor.worst(rows) == "fail"
    assert doctor.worst(rows[:2]) == "warn"
    assert doctor.worst(rows[:1]) == "ok"


@pytest.mark.parametrize(("state", "code"), [("ok", 0), ("warn", 0), ("fail", 3)])
def test_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], state: str, code: int
) -> None:
    mend = "" if state == "ok" else "mend it"
    rows = [Check("kernel", state, "here", mend)]  # type: ignore[arg-type]
    monkeypatch.setattr(doctor, "examine", lambda *args: rows)
    assert main(["doctor", "--json"]) == code
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] == (state != "fail")
    assert report["checks"] == [{"name": "kernel", "state": state, "found": "here", "mend": mend}]
    assert main(["doctor"]) == code
    assert "kernel" in capsys.readouterr().out


def test_missing_packages_are_a_row_and_no_crash() -> None:
    """With -S -I Python sees the standard library only."""
    root = Path(doctor.__file__).parents[2]
    code = (
        f"import sys; sys.path.insert(0, {str(root)!r}); from nicps import doctor;"
        "print(doctor.table(doctor.examine('lo', 'no-such-user')))"
    )
    command = [sys.executable, "-S", "-I", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "not installed: numpy, orjson" in done.stdout
