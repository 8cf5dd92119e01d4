# SPDX-License-Identifier: Apache-2.0
"""`nicps switch p4`: run a BMv2 switch that follows the token. (`nicps switch xdp` is in `switch_xdp`.)

nicps switch p4 connect                      the switch's model, and its program
nicps switch p4 load --ports 1,2,3,4         our program, for one network, on these ports
nicps switch p4 run --iface cpu0 ...         the same, and record the members that the hosts agree on, until stopped
nicps switch p4 members [N=MAC@PORT ...]     the recorded members; or record these by hand
nicps switch p4 counters | registers | reset
"""

from __future__ import annotations

import argparse
import select
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson

from nicps import wire
from nicps.auth import NetworkKey
from nicps.cli import switch_xdp
from nicps.errors import EnvironmentProblem, NetworkProblem, UsageProblem
from nicps.shutdown import ending_signals

if TYPE_CHECKING:
    from nicps.dataplane.packet import PacketSocket
    from nicps.switch import Recorder

DESCRIPTION = """\
A switch that runs p4/nicps.p4 (docs/switch.md), through its own run-time API. The same program must run in
`simple_switch`; `load` says so if it does not."""
_HIGHEST_PORT = 510  # 511 drops
_LOOK_S = 0.2
_RETRY_S = 0.2


def add_parser(subparsers: Any) -> None:
    """Add `switch` with its `p4` and its `xdp`."""
    parser = subparsers.add_parser("switch", help="run a switch that adds: a Linux box, or P4")
    kinds = parser.add_subparsers(metavar="KIND", required=True)
    switch_xdp.add_parser(kinds)
    p4 = kinds.add_parser("p4", help="a BMv2 simple_switch", description=DESCRIPTION)
    commands = p4.add_subparsers(metavar="COMMAND", required=True)

    _add(commands, "connect", _connect, "show the switch's ports, and whether it runs our program")

    load = _add(commands, "load", _load, "run our program for one network; all else is forgotten")
    run = _add(commands, "run", _run, "the same, and record the members until stopped")
    for command in (load, run):
        command.add_argument("--config", type=Path, metavar="FILE", help="p4c's JSON (our own)")
        command.add_argument("--network", default="nicps", metavar="NAME", help="(%(default)s)")
        command.add_argument(
            "--ports", type=_port_list, metavar="N,N,...", help="(all of the switch's ports)"
        )
        command.add_argument(
            "--controller",
            type=int,
            required=command is run,
            metavar="N",
            help="the port that gets the lists of members too",
        )
    run.add_argument("--iface", required=True, help="where the controller's port ends")
    run.add_argument(
        "--key", type=Path, metavar="FILE", help="the network's key: believe only its holders"
    )
    run.add_argument(
        "--linux-switch", type=int, metavar="N", help="the port behind which a Linux switch adds"
    )

    members = _add(commands, "members", _members, "show who is recorded, or record by hand")
    members.add_argument("member", nargs="*", metavar="N=MAC@PORT", help="1=02:00:00:00:00:01@3")

    _add(commands, "counters", _counters, "frames by what became of them")
    _add(commands, "registers", _registers, "the newest token that has passed")
    _add(commands, "reset", _reset, "forget token, members and counters")


def _add(
    commands: Any, name: str, run: Callable[[argparse.Namespace], int], text: str
) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text)
    command.add_argument(
        "--thrift",
        default="127.0.0.1:9090",
        metavar="HOST:PORT",
        help="the switch's run-time API (%(default)s)",
    )
    command.add_argument("--json", action="store_true", help="print JSON")
    command.set_defaults(func=run)
    return command


def _switch(args: argparse.Namespace) -> Any:
    from nicps.switch import Switch

    host, colon, port = args.thrift.rpartition(":")
    if not colon or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise UsageProblem(f"--thrift takes HOST:PORT, not {args.thrift!r}")
    return Switch.connect(host.strip("[]"), int(port))


def _print(args: argparse.Namespace, values: Mapping[str, Any]) -> int:
    if args.json:
        print(orjson.dumps(dict(values)).decode())
    else:
        width = max(map(len, values), default=0)
        for name, value in values.items():
            print(f"{name:<{width}}  {value}")
    return 0


def _connect(args: argparse.Namespace) -> int:
    with _switch(args) as switch:
        info = switch.info()
    values: dict[str, Any] = {"program": info.runs.value}
    for port in info.ports:
        values[f"port {port.number}"] = f"{port.iface} {'up' if port.up else 'down'}"
    return _print(args, values)


def _load(args: argparse.Namespace) -> int:
    with _switch(args) as switch:
        done = _prepare(args, switch)
        switch.setup(done.network, done.ports, args.controller)
    loaded = "loaded" if done.loaded else "there already"
    return _print(
        args,
        {
            "program": loaded,
            "network": args.network,
            "ports": done.ports,
            "controller": args.controller,
        },
    )


class _Prepared(NamedTuple):
    """A switch that runs the program; it may still have to be set up for this network and these ports."""

    network: int
    ports: list[int]
    loaded: bool


def _prepare(args: argparse.Namespace, switch: Any) -> _Prepared:
    """Make sure that the program runs, and that the ports exist."""
    from nicps.switch import program

    path = args.config or program.compiled()
    try:
        config = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise EnvironmentProblem(f"cannot read {path}: {error}") from None
    there = {port.number for port in switch.info().ports}
    ports = args.ports or sorted(there - {args.controller})
    missing = ({*ports} | {args.controller} - {None}) - there
    if missing or not ports:
        raise UsageProblem(
            f"the switch has no port {', '.join(map(str, sorted(missing))) or 'at all'}: it has"
            f" {', '.join(map(str, sorted(there))) or 'none'} (`simple_switch -i N@IFACE`)"
        )
    return _Prepared(wire.network_id(args.network), ports, switch.load(config))


def _set_up(args: argparse.Namespace, switch: Any) -> bool:
    """Set the switch up, unless it serves this network on these ports, as hosts may be training then. Return
    whether it did.
    """
    done = _prepare(args, switch)
    if args.linux_switch is not None and args.linux_switch not in done.ports:
        numbers = ", ".join(map(str, done.ports))
        raise UsageProblem(
            f"--linux-switch takes one of the ports {numbers}, not {args.linux_switch}"
        )
    what = (done.network, done.ports, args.controller)
    if not done.loaded and switch.serves(*what):
        return False
    switch.setup(*what)
    return True


def _port_list(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) <= _HIGHEST_PORT for part in parts):
        raise argparse.ArgumentTypeError(f"numbers up to {_HIGHEST_PORT} and commas, not {text!r}")
    return sorted({int(part) for part in parts})


def _run(args: argparse.Namespace) -> int:
    from nicps.dataplane.interface import usable
    from nicps.dataplane.packet import PacketSocket
    from nicps.switch import Recorder

    key = NetworkKey.read(args.key) if args.key else None
    interface = usable(args.iface)
    ended: list[int] = []
    for number in ending_signals(signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda got, _: ended.append(got))
    packets = PacketSocket(interface, wire.ETHERTYPE, all_destinations=True)
    recorder: Recorder | None = None
    gone = False
    try:
        while not ended:
            try:
                with _switch(args) as switch:
                    anew = _set_up(args, switch)
                    if recorder is None:
                        network = wire.network_id(args.network)
                        recorder = Recorder(switch, network, interface.mac, key, args.linux_switch)
                        recorder.ask(time.monotonic())
                        there = "" if anew else ", whom the switch serves already"
                        _print_line(f"recording the members of {args.network}{there}")
                    else:
                        recorder.again(time.monotonic(), switch)
                        _print_line(
                            f"the switch is there again{', and set up anew' if anew else ''}"
                        )
                    gone = False
                    while not ended:
                        _record(packets, recorder)
                        switch.registers()  # fails if the switch is gone
            except NetworkProblem as problem:
                if recorder is None:
                    raise
                if not gone:
                    _print_line(f"{problem}; waiting for it")
                gone = True
                time.sleep(_RETRY_S)
    finally:
        packets.close()
    return 0


def _record(packets: PacketSocket, recorder: Recorder) -> None:
    """Wait a little for lists of members, find out whether they are in force, and record them."""
    select.select([packets], [], [], recorder.wait(time.monotonic(), _LOOK_S))
    now = time.monotonic()
    for frame in packets.receive_whole():
        recorder.on_frame(now, frame)
    question = recorder.question(now)
    if question is not None:
        packets.send(question)
    news = recorder.describe_change(now)
    if news is not None:
        _print_line(news)


def _print_line(text: str) -> None:
    print(f"nicps: {text}", file=sys.stderr, flush=True)


def _members(args: argparse.Namespace) -> int:
    from nicps.switch.runtime import Member

    wanted = [Member(*_parts(text)) for text in args.member]
    with _switch(args) as switch:
        if wanted:
            switch.record({member.number: member for member in wanted})
            switch.forget_token()  # that of another network, which had higher numbers
        found = switch.members()
    values = {f"{m.number}": f"{wire.mac_text(m.mac)} at port {m.port}" for m in found.values()}
    return _print(args, values)


def _parts(text: str) -> tuple[int, bytes, int]:
    """`1=02:00:00:00:00:01@3` as number, MAC address, port."""
    number, _, rest = text.partition("=")
    mac, _, port = rest.rpartition("@")
    try:
        raw = bytes.fromhex(mac.replace(":", ""))
        least = 0 if raw == wire.SWITCH else 1
        if len(raw) == 6 and least <= int(number) <= wire.MAX_MEMBERS and 0 <= int(port) <= 510:
            return int(number), raw, int(port)
    except ValueError:
        pass
    raise UsageProblem(f"a member is N=MAC@PORT, like 1=02:00:00:00:00:01@3, not {text!r}")


def _counters(args: argparse.Namespace) -> int:
    with _switch(args) as switch:
        return _print(args, switch.counters())


def _registers(args: argparse.Namespace) -> int:
    with _switch(args) as switch:
        found = switch.registers()
    position = found["position"]
    values = {
        "view": found["view"],
        "generation": position >> 32,
        "hop": position & 0xFFFFFFFF,
        "owner": found["owner"],
        "round": found["round"],
        "listed": [k for k in range(1, 65) if found["listed"] >> k - 1 & 1],
        "settled": found["settled"],
    }
    return _print(args, values)


def _reset(args: argparse.Namespace) -> int:
    with _switch(args) as switch:
        switch.reset()
    return 0
