# SPDX-License-Identifier: Apache-2.0
"""Cables for a BMv2 and its hosts: frames pass unchanged, and no other program sends any."""

from __future__ import annotations

from pyroute2 import IPRoute
from pyroute2.ethtool.ioctl import IoctlEthtool

from nicps.bench.bmv2 import add_cable, quieten
from nicps.lab import links, port
from tests.netns.wires import run, veth_pair

#: Offloads of the kernel that `ethtool -K IF tx off rx off tso off gso off gro off` ends.
OFFLOADS = (
    *("tx-checksum-ip-generic", "rx-checksum", "tx-tcp-segmentation", "tx-tcp6-segmentation"),
    *("tx-generic-segmentation", "rx-gro"),
)


def offloads(name: str) -> set[str]:
    """The offloads that are on."""
    features = IoctlEthtool(name).get_features()
    return {feature for feature in OFFLOADS if features.is_active(feature)}


def test_a_cable_that_ends_at_an_xdp_program() -> None:
    """The kernel has switched off the offloads that such a program cannot take, and refuses to set them."""
    with veth_pair() as (left, right), port.pass_program() as program, IPRoute() as ipr:
        links.attach(ipr, links.index_of(ipr, left), program)
        before = offloads(right)
        for end in (left, right):
            quieten(end)
            assert offloads(end) == set()
        assert "rx-checksum" in before and "tx-tcp-segmentation" not in before


def test_a_cable_is_quiet() -> None:
    with veth_pair() as plain:
        add_cable("near", "far")
        assert {end for end in plain if offloads(end)} == set(plain)
        for end in ("near", "far"):
            assert offloads(end) == set()
            shown = run(f"ip -d link show {end}")
            assert "addrgenmode none" in shown and ",UP" in shown
            assert run(f"ip -6 address show dev {end}") == ""
