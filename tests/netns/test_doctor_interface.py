# SPDX-License-Identifier: Apache-2.0
"""`nicps doctor --iface` on interfaces of a namespace that ends with its process.

+---- unshare -n ----+
|  a0 ------- b0     |   a veth pair
+--------------------+
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SET_UP = "ip link add a0 type veth peer name b0; ip link set b0 up"
DOCTOR = f"{sys.executable} -m nicps doctor --iface a0 --json"


def rows(checkout: Path, *commands: str) -> dict[str, dict[str, str]]:
    """Doctor's rows by name, after `commands` in a new namespace with a0 and b0."""
    script = "; ".join(["set -e", SET_UP, *commands])
    done = subprocess.run(
        ["unshare", "--net", "sh", "-c", script],
        cwd=checkout,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode in (0, 3), done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["ok"] == (done.returncode == 0)
    return {row["name"]: row for row in report["checks"]}


def test_down(checkout: Path) -> None:
    found = rows(checkout, DOCTOR)
    assert found["interface"]["state"] == "fail"
    assert found["interface"]["mend"] == "ip link set a0 up"
    assert "XDP" not in found


def test_native(checkout: Path) -> None:
    found = rows(checkout, "ip link set a0 up", DOCTOR)
    assert found["interface"] == {
        "name": "interface",
        "state": "ok",
        "found": "a0, driver veth, up",
        "mend": "",
    }
    assert found["MTU"]["state"] == "ok"
    assert found["XDP"] == {"name": "XDP", "state": "ok", "found": "native", "mend": ""}


def test_nothing_stays_attached(checkout: Path) -> None:
    script = f"ip link set a0 up; {DOCTOR} >/dev/null || true; ip -d link show a0 | grep -c xdp >&2 || true"
    done = subprocess.run(
        ["unshare", "--net", "sh", "-c", f"{SET_UP}; {script}"],
        cwd=checkout,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stderr.strip() == "0"


@pytest.mark.parametrize(("mtu", "state"), [(1400, "fail"), (9000, "warn")])
def test_mtu(checkout: Path, mtu: int, state: str) -> None:
    found = rows(checkout, f"ip link set a0 mtu {mtu}", "ip link set a0 up", DOCTOR)
    assert found["MTU"]["state"] == state
    assert found["MTU"]["mend"] == "ip link set a0 mtu 1500"


@pytest.mark.parametrize(("name", "state"), [("nicps_xdp", "ok"), ("somebody", "fail")])
def test_program_attached(checkout: Path, name: str, state: str) -> None:
    attached = f"""{sys.executable} -c '
import socket, subprocess, sys
from nicps.dataplane import bpf
from nicps.doctor.interface import load_pass_program
link = bpf.xdp_link(load_pass_program("{name}"), socket.if_nametoindex("a0"), bpf.XDP_FLAGS_DRV_MODE)
sys.exit(subprocess.run("{DOCTOR}", shell=True).returncode)
'"""
    found = rows(checkout, "ip link set a0 up", attached)
    assert found["XDP"]["state"] == state
    if name == "somebody":
        assert "somebody" in found["XDP"]["found"]
        assert found["XDP"]["mend"].endswith("ip link set a0 xdp off")


def test_what_an_older_run_left_is_taken_away(checkout: Path) -> None:
    left = f"""{sys.executable} -c '
import socket
from pyroute2 import IPRoute
from nicps.dataplane import bpf
from nicps.doctor.interface import load_pass_program
program = load_pass_program("nicps_xdp")
with IPRoute() as route:
    xdp = {{"attrs": [("IFLA_XDP_FD", program), ("IFLA_XDP_FLAGS", bpf.XDP_FLAGS_DRV_MODE)]}}
    route.link("set", index=socket.if_nametoindex("a0"), xdp=xdp)
'"""
    found = rows(checkout, "ip link set a0 up", left, "ip link show a0 | grep -q xdp", DOCTOR)
    assert found["XDP"]["state"] == "ok"
    assert "taken away" in found["XDP"]["found"]


def test_a_port_of_a_bridge(checkout: Path) -> None:
    """Doctor names the bridge, which works in generic mode."""
    bridge = ("ip link add br0 type bridge", "ip link set br0 up", "ip link set a0 up master br0")
    found = rows(checkout, *bridge, DOCTOR)["interface"]
    assert found["state"] == "fail"
    assert found["found"] == "a0, driver veth, is a port of the bridge br0, which takes its frames"
    assert found["mend"] == "give --iface br0, or run: ip link set a0 nomaster"
    choice = rows(checkout, *bridge, DOCTOR.replace("a0", "eth7"))["interface"]["mend"]
    assert choice == "--iface with one of: b0, br0"
    found = rows(checkout, *bridge, DOCTOR.replace("a0", "br0"))
    assert found["interface"]["state"] == found["MTU"]["state"] == "ok"
    assert found["XDP"]["state"] == "warn"
    assert found["XDP"]["found"] == "generic only: the driver bridge refuses native mode here"
