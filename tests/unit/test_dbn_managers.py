# SPDX-License-Identifier: Apache-2.0
"""YARN's ResourceManager is found by its configuration, and refused in one line if it does not answer."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from nicps.errors import EnvironmentProblem, NetworkProblem
from trainer.dbn.managers import FOLDERS, YARN_SITE, check_master, resource_managers

RM = "yarn.resourcemanager"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of YARN's configuration."""
    for name in FOLDERS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("YARN_CONF_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def listening() -> Iterator[int]:
    """The port of somebody who takes connections."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield taken.getsockname()[1]


@pytest.fixture
def closed() -> Iterator[int]:
    """A port at which nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


def write(folder: Path, **properties: str) -> None:
    rows = "".join(
        f"<property><name>{RM}.{name}</name><value>{value}</value></property>"
        for name, value in properties.items()
    )
    (folder / YARN_SITE).write_text(f"<configuration>{rows}</configuration>")


@pytest.mark.parametrize(
    ("properties", "places"),
    [
        ({}, [("0.0.0.0", 8032)]),
        ({"hostname": "rm"}, [("rm", 8032)]),
        ({"hostname": "rm", "address": f"${{{RM}.hostname}}:9032"}, [("rm", 9032)]),
        ({"address": "rm"}, [("rm", 8032)]),
        (
            {"ha.rm-ids": "a, b", "hostname.a": "one", "address.b": "two:9032"},
            [("one", 8032), ("two", 9032)],
        ),
    ],
)
def test_where_it_is(
    folder: Path, properties: dict[str, str], places: list[tuple[str, int]]
) -> None:
    write(folder, **properties)
    assert resource_managers(folder) == places


def test_the_own_address_is_that_on_its_network(folder: Path, listening: int, closed: int) -> None:
    """Of several the first that answers."""
    properties = {
        "ha.rm-ids": "a,b",
        "address.a": f"127.0.0.1:{closed}",
        "address.b": f"127.0.0.1:{listening}",
    }
    write(folder, **properties)
    assert check_master("yarn") == "127.0.0.1"


def test_nobody_answers(folder: Path, closed: int) -> None:
    write(folder, address=f"127.0.0.1:{closed}")
    said = f"no YARN ResourceManager answers at 127.0.0.1:{closed} (Connection refused): "
    with pytest.raises(NetworkProblem) as raised:
        check_master("yarn")
    assert str(raised.value) == f"{said}start it, or mend {folder / YARN_SITE}"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "cannot read YARN's configuration: {file}: No such file or directory"),
        ("<configuration>", "{file} is no XML: no element found: line 1, column 15"),
        (
            f"<a><property><name>{RM}.address</name><value>rm:x</value></property></a>",
            f"{{file}}: {RM}.address must be HOST:PORT, not 'rm:x'",
        ),
    ],
)
def test_a_configuration_that_cannot_be_read(folder: Path, text: str | None, said: str) -> None:
    if text is not None:
        (folder / YARN_SITE).write_text(text)
    with pytest.raises(EnvironmentProblem) as raised:
        check_master("yarn")
    assert str(raised.value) == said.format(file=folder / YARN_SITE)


def test_the_folder_that_has_the_file_is_read(
    folder: Path, listening: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """HADOOP_CONF_DIR may hold Hadoop's own configuration only."""
    monkeypatch.setenv("HADOOP_CONF_DIR", str(folder / "elsewhere"))
    write(folder, address=f"127.0.0.1:{listening}")
    assert check_master("yarn") == "127.0.0.1"
