# SPDX-License-Identifier: Apache-2.0
"""A running `simple_switch`, through its own run-time API (Thrift).

Source: BMv2's thrift_src/standard.thrift, simple_pre_lag.thrift and targets/simple_switch/thrift/simple_switch.thrift.
BMv2's Python modules come with BMv2 (the p4lang project's package p4lang-bmv2), Thrift's with it or from PyPI. So they
are looked for only here, when a connection to a switch is made.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Self

from nicps.errors import EnvironmentProblem, NetworkProblem
from nicps.extras import install_command
from nicps.programs import find_program
from nicps.switch import program

DEFAULT_PORT = 9090
_TIMEOUT_MS = 5000
_DEEP = 8192  # frames in a port's queue: a contribution comes in one burst
_CONTEXT = 0

_SERVICES = {
    "standard": "bm_runtime.standard.Standard",
    "simple_pre_lag": "bm_runtime.simple_pre_lag.SimplePreLAG",
    "simple_switch": "sswitch_runtime.SimpleSwitch",
}
_NEEDED = ("thrift", "bm_runtime", "sswitch_runtime")
_NETWORKS = "NicpsIngress.networks"
_MEMBERS = "NicpsIngress.members.members"
_QUEUES = "NicpsIngress.priority.queues"
_BY_URGENCY = (1, 0, 2, 3, 4, 5, 6, 7)  # 802.1p priorities; without a tag it is 0
_FRAMES = "NicpsIngress.verdict.frames"
_TOKEN = {
    "view": "NicpsIngress.token.token_view",
    "position": "NicpsIngress.token.token_position",
    "owner": "NicpsIngress.token.token_owner",
    "round": "NicpsIngress.token.token_round",
    "listed": "NicpsIngress.token.token_listed",
    "settled": "NicpsIngress.token.token_settled",
}
_SLOTS = ("NicpsIngress.adding.slot_tag", "NicpsIngress.adding.slot_seen")


@dataclass(frozen=True, slots=True)
class Port:
    """One of the switch's ports."""

    number: int
    iface: str
    up: bool


class Program(Enum):
    """The program and model of a switch."""

    OURS = "nicps"
    OTHER_NICPS = "nicps, but not as compiled here: an older one, or with other settings"
    ANOTHER = "another"


@dataclass(frozen=True, slots=True)
class Info:
    """The state of a switch."""

    ports: tuple[Port, ...]
    runs: Program


@dataclass(frozen=True, slots=True)
class Member:
    """A member as the switch has recorded it (R4)."""

    number: int
    mac: bytes
    port: int


class Switch:
    """A connection to a switch. Use as a context manager, or `close` it.

    Raises (every method): NetworkProblem, the switch has gone, or does not have what our program needs.
    """

    def __init__(self, transport: Any, standard: Any, multicast: Any, simple: Any) -> None:
        self._transport = transport
        self._standard, self._multicast, self._simple = standard, multicast, simple
        self._types = _module("bm_runtime.standard.ttypes")

    @classmethod
    def connect(cls, host: str = "127.0.0.1", port: int = DEFAULT_PORT) -> Self:
        """Connect to the Thrift server of a `simple_switch`.

        Raises:
            EnvironmentProblem: BMv2's Python modules are not installed.
            NetworkProblem: no switch listens there.
        """
        logging.getLogger("thrift").addHandler(logging.NullHandler())  # our error reports it
        sockets = _module("thrift.transport.TSocket")
        transports = _module("thrift.transport.TTransport")
        binary = _module("thrift.protocol.TBinaryProtocol")
        multiplexed = _module("thrift.protocol.TMultiplexedProtocol").TMultiplexedProtocol
        services = {name: _module(module) for name, module in _SERVICES.items()}
        connection = sockets.TSocket(host, port)
        connection.setTimeout(_TIMEOUT_MS)
        transport = transports.TBufferedTransport(connection)
        try:
            transport.open()
        except transports.TTransportException:
            raise NetworkProblem(
                f"no switch listens on {host}:{port}: start `simple_switch --thrift-port {port} ...` "
                "(docs/switch.md), or name another with --thrift"
            ) from None
        protocol = binary.TBinaryProtocol(transport)
        clients = [module.Client(multiplexed(protocol, name)) for name, module in services.items()]
        return cls(transport, *clients)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; the switch goes on."""
        self._transport.close()

    # ---- its state and its program

    def info(self) -> Info:
        """Its ports, and its program."""
        with _told():
            ports = tuple(
                Port(found.port_num, found.iface_name, bool(found.is_up))
                for found in self._standard.bm_dev_mgr_show_ports()
            )
            config = self._standard.bm_get_config().strip()
        runs = Program.OTHER_NICPS if f'"{_FRAMES}"' in config else Program.ANOTHER
        if config == program.compiled().read_text().strip():
            runs = Program.OURS
        return Info(tuple(sorted(ports, key=lambda port: port.number)), runs)

    def load(self, config: str) -> bool:
        """Run this program (p4c's JSON) if it is not running already; return whether it had to be loaded.

        Raises:
            NetworkProblem: the switch cannot change its program while it runs.
        """
        with _told():
            if self._standard.bm_get_config().strip() == config.strip():
                return False
            try:
                self._standard.bm_load_new_config(config)
                self._standard.bm_swap_configs()
            except self._types.InvalidSwapOperation:
                raise NetworkProblem(
                    "this switch runs another program, and cannot change it while it runs: start it with "
                    f"`simple_switch {program.compiled()} ...`"
                ) from None
            return True

    def serves(self, network: int, ports: Sequence[int], controller: int | None) -> bool:
        """Whether it is set up for exactly that already, as `setup` does it."""
        with _told():
            entries = self._standard.bm_mt_get_entries(_CONTEXT, _NETWORKS)
            groups = json.loads(self._multicast.bm_mc_get_entries(_CONTEXT))
        served = [entry.match_key[0].exact.key for entry in entries]
        nodes = {node["handle"]: node for node in groups["l1_handles"]}
        members = {node["handle"]: node["ports"] for node in groups["l2_handles"]}
        found = {
            group["id"]: {
                port: nodes[handle]["rid"]
                for handle in group["l1_handles"]
                for port in members[nodes[handle]["l2_handle"]]
            }
            for group in groups["mgrps"]
        }
        return served == [network.to_bytes(4, "big")] and found == _groups(ports, controller)

    def setup(self, network: int, ports: Sequence[int], controller: int | None) -> None:
        """Serve this network on these ports, and forget all else.

        Args:
            controller: the port that gets the lists of members too.
        """
        with _told():
            self._standard.bm_reset_state()
            for number, group in _groups(ports, controller).items():
                self._multicast_group(number, group)
            self._add(_NETWORKS, "NicpsIngress.serve", network.to_bytes(4, "big"))
            self._simple.set_all_egress_queue_depths(_DEEP)
            for priority, queue in queues_of(self._queues(ports[0])).items():
                self._add(_QUEUES, "NicpsIngress.priority.wait_in", bytes([priority]), queue=queue)

    def limit_queues(self, frames_per_s: int, frames: int = _DEEP) -> None:
        """Each queue of each port sends so many frames a second at most (0: as fast as it can), and has that room."""
        with _told():
            self._simple.set_all_egress_queue_depths(frames)
            self._simple.set_all_egress_queue_rates(frames_per_s)

    def _queues(self, port: int) -> int:
        """How many queues a port has, up to eight: `simple_switch --priority-queues`."""
        refused = _module("thrift.Thrift").TApplicationException
        for queue in range(1, len(_BY_URGENCY)):
            try:
                self._simple.set_egress_priority_queue_depth(port, queue, _DEEP)
            except refused:
                return queue
        return len(_BY_URGENCY)

    def _multicast_group(self, number: int, ports: Mapping[int, int]) -> None:
        """A group of these ports, each with its replication number."""
        group = self._multicast.bm_mc_mgrp_create(_CONTEXT, number)
        for replication in set(ports.values()):
            among = {port for port, its in ports.items() if its == replication}
            wanted = "".join("1" if port in among else "0" for port in range(max(among), -1, -1))
            node = self._multicast.bm_mc_node_create(_CONTEXT, replication, wanted, "")
            self._multicast.bm_mc_node_associate(_CONTEXT, group, node)

    # ---- members (R4)

    def members(self) -> dict[int, Member]:
        """The recorded members, by number."""
        with _told():
            return dict(sorted((member.number, member) for _, member in self._recorded()))

    def record(self, members: Mapping[int, Member]) -> None:
        """Record these members; leave those alone that are recorded already with the same port and address."""
        with _told():
            here: set[Member] = set()
            for handle, member in self._recorded():
                if members.get(member.number) == member:
                    here.add(member)
                else:
                    self._standard.bm_mt_delete_entry(_CONTEXT, _MEMBERS, handle)
            for member in members.values():
                if member not in here:
                    key = (
                        member.number.to_bytes(2, "big"),
                        member.mac,
                        member.port.to_bytes(2, "big"),
                    )
                    self._add(_MEMBERS, "NicpsIngress.members.member", *key)

    def _recorded(self) -> list[tuple[int, Member]]:
        """(handle of the entry, the member)"""
        found = []
        for entry in self._standard.bm_mt_get_entries(_CONTEXT, _MEMBERS):
            number, mac, port = (part.exact.key for part in entry.match_key)
            member = Member(
                int.from_bytes(number, "big"), mac.rjust(6, b"\0"), int.from_bytes(port, "big")
            )
            found.append((entry.entry_handle, member))
        return found

    def _add(self, table: str, action: str, *key: bytes, queue: int | None = None) -> None:
        """An entry; `queue` is what the action is given."""
        types = self._types
        given = [] if queue is None else [bytes([queue])]
        params = [
            types.BmMatchParam(
                type=types.BmMatchParamType.EXACT, exact=types.BmMatchParamExact(part)
            )
            for part in key
        ]
        options = types.BmAddEntryOptions(priority=0)
        self._standard.bm_mt_add_entry(_CONTEXT, table, params, action, given, options)

    # ---- its counts

    def counters(self) -> dict[str, int]:
        """Counts of frames by outcome."""
        with _told():
            return {
                name: int(self._standard.bm_counter_read(_CONTEXT, _FRAMES, place).packets)
                for place, name in enumerate(program.reasons())
            }

    def registers(self) -> dict[str, int]:
        """Of the newest token that passed: view, position (generation << 32 | hop), owner, round, listed, settled."""
        with _told():
            read = {
                name: self._standard.bm_register_read_all(_CONTEXT, register)
                for name, register in _TOKEN.items()
            }
        return {
            name: int.from_bytes(b"".join(_word(w) for w in words)) for name, words in read.items()
        }

    def forget_token(self) -> None:
        """A new network begins: the next token is taken whatever its view is, and no sum is complete any more."""
        with _told():
            for register in (*_TOKEN.values(), *_SLOTS):
                self._standard.bm_register_reset(_CONTEXT, register)

    def reset(self) -> None:
        """Forget token, sums, members and counts; the program and its ports stay."""
        self.forget_token()
        self.record({})
        with _told():
            self._standard.bm_counter_reset_all(_CONTEXT, _FRAMES)


def queues_of(count: int) -> dict[int, int]:
    """The queue of each 802.1p priority, where a port has so many: 0 is served last. One needs no entries."""
    if count == 1:
        return {}
    return {priority: at * count // len(_BY_URGENCY) for at, priority in enumerate(_BY_URGENCY)}


def _groups(ports: Sequence[int], controller: int | None) -> dict[int, dict[int, int]]:
    """Multicast groups by number: the ports of each, with their replication numbers."""
    numbers = program.numbers()
    flood = dict.fromkeys(ports, 0)
    tell = {} if controller is None else {controller: numbers["TELL"]}
    return {numbers["FLOOD"]: flood, numbers["FLOOD_AND_TELL"]: flood | tell}


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """The switch's error, or its silence, as one of our errors."""
    thrift = _module("thrift.Thrift").TException
    try:
        yield
    except thrift as error:
        # `InvalidTableOperation` has a number of `TableOperationErrorCode`, of the same module.
        name = type(error).__name__.removeprefix("Invalid") + "ErrorCode"
        codes = getattr(_module(type(error).__module__), name, None)
        if codes is None:
            raise NetworkProblem(f"the switch does not answer as ours does ({error})") from None
        raise NetworkProblem(f"the switch refuses: {codes._VALUES_TO_NAMES[error.code]}") from None
    except OSError as error:
        raise NetworkProblem(f"the switch does not answer: {error}") from None


def _word(value: int) -> bytes:
    return (value & 0xFFFFFFFF).to_bytes(4, "big")


def missing_modules() -> tuple[str, ...]:
    """The Python modules for connections to a switch that cannot be imported.

    A BMv2 with a prefix of its own has its modules in PREFIX/lib/python3.N, which is not on this Python's path: this
    adds it, behind all other folders.
    """
    if importlib.util.find_spec("bm_runtime") is None and (switch := find_program("simple_switch")):
        library = Path(switch).resolve().parent.parent / "lib"
        for kind in ("site-packages", "dist-packages"):
            found = library.glob(f"python3*/{kind}/bm_runtime")
            sys.path += [str(module.parent) for module in sorted(found)]
    return tuple(name for name in _NEEDED if importlib.util.find_spec(name) is None)


def require_modules() -> None:
    """Make sure that the Python modules can be imported.

    Raises:
        EnvironmentProblem: one is missing.
    """
    if missing := missing_modules():
        raise EnvironmentProblem(
            f"the Python module {missing[0]} is missing: it comes with BMv2, the p4lang project's "
            f"package p4lang-bmv2 (docs/switch.md); thrift also with {install_command('switch')}"
        )


def _module(name: str) -> Any:
    require_modules()
    return importlib.import_module(name)
