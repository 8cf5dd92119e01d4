# SPDX-License-Identifier: Apache-2.0
"""Which interfaces are ports of another one, told by what the kernel says of all links."""

from __future__ import annotations

from typing import Any

import pytest

from nicps.dataplane.ports import Port, _ports


class Link(dict[str, Any]):
    """One message of the kernel's, as pyroute2 gives it."""

    def __init__(
        self, index: int, name: str, kind: str = "", master: int = 0, port: str = ""
    ) -> None:
        super().__init__(index=index)
        self._attributes = {
            "IFLA_IFNAME": name,
            "IFLA_MASTER": master or None,
            "IFLA_INFO_KIND": kind or None,
            "IFLA_INFO_SLAVE_KIND": port or None,
        }

    def get_attr(self, name: str) -> Any:
        return self._attributes[name]

    def get_nested(self, *names: str) -> Any:
        return self._attributes[names[-1]]


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("bridge", "a port of the bridge m0, which takes its frames"),
        ("hsr", "a port of the hsr m0, which takes its frames"),
        ("bond", "a link of the bond m0, whose frames come in at any of its links"),
        ("team", "a link of the team m0, whose frames come in at any of its links"),
    ],
)
def test_a_port_of_one_master(kind: str, said: str) -> None:
    """What hears its frames, or all of them, is the master."""
    found = _ports([Link(2, "eth1", master=3, port=kind), Link(3, "m0", kind), Link(4, "eth2")])
    assert found == {2: Port(kind, "m0", ("m0",))}
    assert str(found[2]) == said
    assert found[2].mend("eth1") == "give --iface m0, or run: ip link set eth1 nomaster"


def test_a_master_that_the_kernel_gives_no_kind() -> None:
    assert _ports([Link(2, "eth1", master=3), Link(3, "m0")]) == {
        2: Port("interface", "m0", ("m0",))
    }


def test_an_interface_in_a_vrf_hears_its_frames() -> None:
    """A VRF has no receive handler: it chooses a routing table."""
    assert _ports([Link(2, "eth1", master=3, port="vrf"), Link(3, "red", "vrf")]) == {}


def test_a_port_of_open_vswitch() -> None:
    """Its master, ovs-system, hears nothing; internal ports do."""
    port = Link(2, "eth1", master=3, port="openvswitch")
    system = Link(3, "ovs-system", "openvswitch")
    assert _ports([port, system])[2].mend("eth1") == (
        "give --iface an internal port of its bridge, or run: ovs-vsctl del-port eth1"
    )
    others = [Link(4, "vlan7", "openvswitch"), Link(5, "lan", "openvswitch")]
    found = _ports([port, system, *others])
    assert found == {2: Port("openvswitch", "ovs-system", ("lan", "vlan7"))}
    assert str(found[2]) == "a port of Open vSwitch, which takes its frames"
    assert found[2].mend("eth1") == (
        "give --iface an internal port of its bridge (lan, vlan7), or run: ovs-vsctl del-port eth1"
    )
