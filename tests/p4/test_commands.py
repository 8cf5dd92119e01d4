# SPDX-License-Identifier: Apache-2.0
"""`nicps switch p4` against a real `simple_switch`: all seven commands, as a user gives them."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from nicps import wire
from nicps.bench.bmv2 import CONTROLLER, Bmv2
from nicps.switch import Program, Switch, program
from tests.netns.labs import ROOT
from tests.netns.members import NICPS
from tests.p4 import bmv2 as processes
from tests.p4.bmv2 import Wires
from tests.p4.frames import (
    HOSTS,
    mac,
    token,
)


class Runs:
    """A switch's run-time API, of which only this is asked."""

    def __init__(self, config: str) -> None:
        self._config = config

    def bm_get_config(self) -> str:
        return self._config

    def bm_dev_mgr_show_ports(self) -> list[Any]:
        return []


def test_an_older_program_is_not_ours(switch: Switch, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has our counter, and may lack anything else."""
    ours = program.compiled().read_text()
    older = ours.replace("NicpsIngress.token.token_settled", "NicpsIngress.token.token_done")
    for config, runs in (
        (ours, Program.OURS),
        (older, Program.OTHER_NICPS),
        ("{}", Program.ANOTHER),
    ):
        monkeypatch.setattr(switch, "_standard", Runs(config))
        assert switch.info().runs is runs


def command(bmv2: Bmv2, *words: str) -> str:
    """What `nicps switch p4 ...` prints beside the switch."""
    argv = ["ip", "netns", "exec", bmv2.netns, *NICPS, "switch", "p4", *words]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0 and not done.stderr, done.stderr
    return done.stdout


def as_json(bmv2: Bmv2, *words: str) -> Any:
    return json.loads(command(bmv2, *words, "--json"))


def test_every_command(made: tuple[Bmv2, Wires], tmp_path: Path) -> None:
    """As a user gives them: a switch without a controller first, which then gets one."""
    bmv2, wires = made
    assert as_json(bmv2, "connect") == {"program": "nicps"} | {
        f"port {number}": f"{iface} up" for number, iface in bmv2.ports.items()
    }
    assert command(bmv2, "connect").splitlines()[:2] == ["program  nicps", "port 1   near1 up"]
    ports = ("--ports", "1,2,3", "--controller", str(CONTROLLER))
    done = {"program": "there already", "network": "nicps", "ports": [*HOSTS], "controller": 64}
    assert as_json(bmv2, "load", *ports) == done
    assert "ports       [1, 2, 3]" in command(bmv2, "load", *ports)

    by_hand = [f"{k}={wire.mac_text(mac(k))}@{k}" for k in HOSTS]
    listed = {str(k): f"{wire.mac_text(mac(k))} at port {k}" for k in HOSTS}
    assert command(bmv2, "members") == ""
    assert as_json(bmv2, "members", *by_hand) == listed == as_json(bmv2, "members")
    assert command(bmv2, "members").splitlines()[1] == "2  02:00:00:00:00:02 at port 2"
    adds = f"{wire.mac_text(wire.SWITCH)} at port 3"
    assert as_json(bmv2, "members", f"0={wire.mac_text(wire.SWITCH)}@3", *by_hand)["0"] == adds
    assert as_json(bmv2, "members", *by_hand) == listed
    assert set(wires.exchange(1, token(1, 2, owner=2, view=40))) == {2, 3}
    registers = {"view": 40, "generation": 4, "hop": 2, "owner": 2, "round": 7}
    assert as_json(bmv2, "registers") == registers | {"listed": [], "settled": 0}
    assert "owner       2" in command(bmv2, "registers")
    assert as_json(bmv2, "counters")["token"] == 1
    assert "token      1" in command(bmv2, "counters").splitlines()

    assert wires.exchange(1, token(1, 1, owner=1, view=1)) == {}
    command(bmv2, "members", *by_hand)  # the second network, whose views begin with 1 again
    assert set(wires.exchange(1, token(1, 1, owner=1, view=1))) == {2, 3}

    assert command(bmv2, "reset") == ""
    assert as_json(bmv2, "members") == {} and as_json(bmv2, "registers")["view"] == 0
    assert not any(as_json(bmv2, "counters").values())
    command(bmv2, "members", *by_hand)
    with processes.controller(bmv2, tmp_path / "log") as running:
        assert "whom the switch serves already" in running.log.read_text()
        assert as_json(bmv2, "members") == listed
    command(bmv2, "load", "--ports", "1,2")
    with processes.controller(bmv2, tmp_path / "log") as running:
        assert running.log.read_text().endswith("recording the members of nicps\n")
        assert as_json(bmv2, "members") == {}
