# SPDX-License-Identifier: Apache-2.0
"""Who manages a cluster of Spark: whether it can be reached, before Spark tries for minutes."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from xml.etree import ElementTree

from nicps.errors import EnvironmentProblem, NetworkProblem, UsageProblem, explain

ANSWER_S = 5.0  # for a manager to take a connection
LOCAL = re.compile(r"local\[(\*|[1-9]\d*)(,\s*\d+)?\]")
FORMS = "local (without Spark), local[N], local[*], spark://HOST:PORT or yarn"
FOLDERS = ("HADOOP_CONF_DIR", "YARN_CONF_DIR")
YARN_SITE = "yarn-site.xml"
#: YARN's own defaults of what is read here (yarn-default.xml).
_HOST = "yarn.resourcemanager.hostname"
_ADDRESS = "yarn.resourcemanager.address"
_IDS = "yarn.resourcemanager.ha.rm-ids"
_PORT = 8032

Place = tuple[str, int]


def check_master(master: str) -> str | None:
    """Refuse a master that cannot be reached.

    Returns:
        This host's address on the network of a standalone master or of YARN's ResourceManager, where executors reach
        the driver.

    Raises:
        UsageProblem: the master's name has another form.
        EnvironmentProblem: YARN's configuration is missing, or cannot be read.
        NetworkProblem: nobody answers.
    """
    if LOCAL.fullmatch(master):
        return None
    if master == "yarn":
        folder = _folder()
        return _reach(
            resource_managers(folder),
            "YARN ResourceManager",
            f"start it, or mend {folder / YARN_SITE}",
        )
    found = re.findall(r"(?:^spark://|,)(\[[^\]]+\]|[^:,/\[\]]+):(\d{1,5})(?=,|$)", master)
    if not found or master != "spark://" + ",".join(f"{host}:{port}" for host, port in found):
        raise UsageProblem(f"--master must be {FORMS}, not {master!r}")
    places = [(host, int(port)) for host, port in found]
    return _reach(places, "Spark master", "start it, or name another with --master")


def resource_managers(folder: Path) -> list[Place]:
    """Where clients reach YARN's ResourceManager, or each of several, by the configuration in that folder.

    Raises:
        EnvironmentProblem: there is none, or it cannot be read.
    """
    properties = _properties(folder / YARN_SITE)
    ids = re.findall(r"[^,\s]+", properties.get(_IDS, ""))
    places = []
    for end in [f".{name}" for name in ids] or [""]:
        host = properties.get(_HOST + end, "0.0.0.0")
        address = properties.get(_ADDRESS + end, f"{host}:{_PORT}")
        name, _, port = address.rpartition(":")
        if not name:
            name, port = address, str(_PORT)
        if not port.isdecimal():
            raise EnvironmentProblem(
                f"{folder / YARN_SITE}: {_ADDRESS}{end} must be HOST:PORT, not {address!r}"
            )
        places.append((name, int(port)))
    return places


def _folder() -> Path:
    """The first folder with YARN's configuration that the environment names."""
    named = [Path(os.environ[name]) for name in FOLDERS if os.environ.get(name)]
    if not named:
        raise EnvironmentProblem(
            f"--master yarn needs YARN's configuration: name its folder in {' or '.join(FOLDERS)}"
        )
    return next((folder for folder in named if (folder / YARN_SITE).is_file()), named[0])


def _properties(file: Path) -> dict[str, str]:
    """The properties in a file of Hadoop's configuration; `${name}` in a value stands for another one's."""
    try:
        root = ElementTree.parse(file).getroot()
    except OSError as error:
        raise EnvironmentProblem(explain("read YARN's configuration", error)) from None
    except ElementTree.ParseError as error:
        raise EnvironmentProblem(f"{file} is no XML: {error}") from None
    found = {
        str(row.findtext("name", "")).strip(): str(row.findtext("value", "")).strip()
        for row in root.iter("property")
    }
    return {name: _expand(value, found) for name, value in found.items()}


def _expand(value: str, properties: Mapping[str, str]) -> str:
    """The value, with what `${name}` stands for; once, as values of these files refer to plain ones."""
    return re.sub(r"\$\{([^}]+)\}", lambda match: properties.get(match[1], match[0]), value)


def _reach(places: Sequence[Place], what: str, advice: str) -> str:
    """This host's address on the way to the first of them that answers.

    Raises:
        NetworkProblem: none does.
    """
    reasons = []
    for host, port in places:
        try:
            with socket.create_connection((host.strip("[]"), port), ANSWER_S) as connection:
                return str(connection.getsockname()[0])
        except (OSError, OverflowError, UnicodeError) as error:  # of a port, and of a name
            reasons.append(f"{host}:{port} ({getattr(error, 'strerror', None) or error})")
    raise NetworkProblem(f"no {what} answers at {', '.join(reasons)}: {advice}")
