# SPDX-License-Identifier: Apache-2.0
"""The XDP program on real interfaces: attaching, obstacles to it, and interfaces below and above."""

from __future__ import annotations

import gc
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyroute2 import IPRoute

from nicps import wire
from nicps.dataplane import DataPlane, bpf, interface, loader, xdp
from nicps.errors import InterfaceBusy, InterfaceDown, InterfaceMissing, InterfaceUnfit
from tests.netns.planes import NETWORK, VIEW, form, fragments, random_lanes, send_all, until
from tests.netns.wires import run, veth_pair


def programs(name: str) -> str:
    """The output of `ip` about a program on the interface."""
    return "\n".join(
        line for line in run(f"ip -d link show {name}").splitlines() if "prog/xdp" in line
    )


def set_by_netlink(ifindex: int, program_fd: int, mode: str) -> None:
    """Attach a program the old way, without a link, so that it outlives its process; -1 takes away what is there."""
    flags = {"native": bpf.XDP_FLAGS_DRV_MODE, "generic": bpf.XDP_FLAGS_SKB_MODE}[mode]
    with IPRoute() as route:
        attributes = {"attrs": [("IFLA_XDP_FD", program_fd), ("IFLA_XDP_FLAGS", flags)]}
        route.link("set", index=ifindex, xdp=attributes)


def test_native_and_gone_again(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with veth_pair() as (left, _):
        gc.collect()
        descriptors = len(os.listdir("/proc/self/fd"))
        with DataPlane(left, NETWORK) as host:
            assert host.mode == "native"
            assert host.mac == interface.read_interface(left).mac
            assert host.maps.config["network"] == NETWORK
            assert host.maps.config["enabled"] == 0
            assert "nicps_xdp" in programs(left)
        assert programs(left) == ""
        host.close()
        del host  # and with it the views, whose memory Python keeps a descriptor for
        gc.collect()
        assert len(os.listdir("/proc/self/fd")) == descriptors
    assert "XDP program on left in native mode" in caplog.text


def test_generic_where_the_driver_cannot() -> None:
    with veth_pair(mtu=9000) as (left, _), DataPlane(left, NETWORK) as host:
        assert host.mode == "generic"
        assert "nicps_xdp" in programs(left)
        host.close()
        assert programs(left) == ""


CHILD = """
import sys, time
from nicps.dataplane import DataPlane
plane = DataPlane(sys.argv[1], 1)
print("up", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_gone_with_its_process(how: signal.Signals, checkout: Path) -> None:
    with veth_pair() as (left, _):
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, left],
            cwd=checkout,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == b"up\n"
            assert "nicps_xdp" in programs(left)
            with pytest.raises(InterfaceBusy, match="nicps runs on interface left already"):
                DataPlane(left, NETWORK)
            child.send_signal(how)
            child.wait(10)
        finally:
            child.kill()
            child.wait()
            if child.stdout is not None:
                child.stdout.close()
        until(lambda: programs(left) == "", "the program is gone")


def test_a_second_one_is_refused() -> None:
    with veth_pair() as (left, right), DataPlane(left, NETWORK):
        with pytest.raises(InterfaceBusy, match="nicps runs on interface left already"):
            DataPlane(left, NETWORK)
        assert "nicps_xdp" in programs(left)
        DataPlane(right, NETWORK).close()


SOMEBODY_ELSES = """
#include <uapi/linux/bpf.h>
int firewall(struct xdp_md *ctx) { return XDP_PASS; }
int nicps_xdp(struct xdp_md *ctx) { return XDP_PASS; }
"""


@pytest.fixture
def others(tmp_path: Path) -> Iterator[loader.Loaded]:
    """Programs attached by netlink, as other tools and older versions do it."""
    source = tmp_path / "others.c"
    source.write_text(SOMEBODY_ELSES)
    loaded = loader.load(str(source), {"firewall": "xdp", "nicps_xdp": "xdp"})
    yield loaded
    loaded.close()


@pytest.mark.parametrize("mode", ["native", "generic"])
def test_somebody_elses_program_stays(others: loader.Loaded, mode: xdp.Mode) -> None:
    with veth_pair() as (left, _):
        set_by_netlink(socket.if_nametoindex(left), others.programs["firewall"], mode)
        with pytest.raises(InterfaceBusy, match=r"another XDP program, firewall .*xdp off"):
            DataPlane(left, NETWORK)
        assert "firewall" in programs(left)


@pytest.mark.parametrize("mode", ["native", "generic"])
def test_what_an_older_run_left_is_cleared(
    others: loader.Loaded, mode: xdp.Mode, caplog: pytest.LogCaptureFixture
) -> None:
    with veth_pair() as (left, _):
        found = interface.read_interface(left)
        set_by_netlink(found.index, others.programs["nicps_xdp"], mode)
        assert (there := xdp.attached(found.index)) is not None
        assert (there.name, there.mode) == ("nicps_xdp", mode)
        with DataPlane(left, NETWORK) as host:
            assert host.mode == "native"
        assert "older run left on left" in caplog.text
        assert xdp.attached(found.index) is None
        assert not xdp.clear(found)


def test_interfaces_that_cannot_serve() -> None:
    with veth_pair() as (left, _):
        with pytest.raises(InterfaceMissing, match="no interface eth9; there are: left, lo, right"):
            DataPlane("eth9", NETWORK)
        with pytest.raises(InterfaceUnfit, match="lo is not an Ethernet"):
            DataPlane("lo", NETWORK)
        for mtu in (1400, wire.LEAST_MTU - 1):
            run(f"ip link set {left} mtu {mtu}")
            with pytest.raises(InterfaceUnfit, match=f"MTU of {mtu} bytes, {wire.LEAST_MTU} are"):
                DataPlane(left, NETWORK)
        run(f"ip link set {left} mtu {wire.LEAST_MTU}")
        run("ip link add br0 type bridge")
        run(f"ip link set {left} master br0")
        mend = f"give --iface br0, or run: ip link set {left} nomaster"
        with pytest.raises(InterfaceUnfit, match=f"{left} is a port of the bridge br0, .*; {mend}"):
            DataPlane(left, NETWORK)
        run(f"ip link set {left} nomaster down")
        with pytest.raises(InterfaceDown, match="ip link set left up"):
            DataPlane(left, NETWORK)
        assert programs(left) == ""


# ---- interfaces below others, and above


def hears_and_is_heard(one: DataPlane, other: DataPlane) -> None:
    """Control frames both ways, and fragments from the other."""
    frame = wire.pack(wire.Header(network=NETWORK), wire.Fail())
    for sender, receiver in ((one, other), (other, one)):
        assert sender.send(frame)
        until(receiver.receive, "the frame")
    form(other, one)
    send_all(other, *fragments(64, random_lanes(64)))
    until(lambda: one.maps.count(1, VIEW, 1) == 64, "all have come")


def test_on_a_bridge_in_place_of_its_port() -> None:
    """In generic mode: bridges have no native XDP."""
    with veth_pair() as (left, right):
        run("ip link add br0 type bridge")
        run("ip link set br0 addrgenmode none up")
        run(f"ip link set {left} master br0")
        with DataPlane("br0", NETWORK) as host, DataPlane(right, NETWORK) as other:
            assert host.mode == "generic"
            hears_and_is_heard(host, other)


@pytest.mark.parametrize("mode", ["bridge", "vepa", "private", "passthru"])
def test_an_interface_with_a_macvlan_above_it(mode: str) -> None:
    """It hears its frames, and so does the macvlan."""
    with veth_pair() as (left, right):
        run(f"ip link add above link {left} type macvlan mode {mode}")
        run("ip link set above addrgenmode none up")
        with DataPlane(right, NETWORK) as other:
            for name, expected in ((left, "native"), ("above", "generic")):
                with DataPlane(name, NETWORK) as host:
                    assert host.mode == expected
                    hears_and_is_heard(host, other)
