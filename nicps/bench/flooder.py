# SPDX-License-Identifier: Apache-2.0
"""A stranger on the LAN, for `nicps bench flood`: frames with members' addresses, forged and overheard ones.

It has no key and no agent. It makes its frames from those that it overhears: a fragment with another payload, a token
of a later generation, control frames of every kind, each with fresh numbers, a made-up tag, and a member's number and
MAC address; and whole frames again, unchanged. `python -m nicps.bench.flooder --barrier SOCKET` obeys orders.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import socket
import struct
import sys
import time
from collections.abc import Iterator
from dataclasses import replace

from nicps import wire
from nicps.session.channel import Channel, ChannelClosed

_SOL_PACKET, _IGNORE_OUTGOING = 263, 23
_KEPT = 512  # overheard frames to send again
_LISTEN_S = 0.5  # between two times of listening to the LAN
_BATCH_S = 0.002
_HEADER = wire.Layout.of(wire.Header)
_SEQUENCE_AT = wire.ETHERNET_BYTES + _HEADER.offsets[_HEADER.names.index("sequence")]
_AHEAD = 1 << 12  # so that a number is not refused for its age


class Flooder:
    """Sends on one interface, at a steady pace."""

    def __init__(self, iface: str, seed: int = 1) -> None:
        self._random = random.Random(seed)
        self._iface = iface
        self._out = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
        self._out.bind((iface, 0))
        self._heard: list[bytes] = []

    def listen(self) -> None:
        """Overhear some frames, and drop older ones."""
        with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0) as sock:
            sock.setsockopt(_SOL_PACKET, _IGNORE_OUTGOING, 1)
            sock.bind((self._iface, wire.ETHERTYPE))
            sock.settimeout(0.01)
            end = time.monotonic() + 0.05
            while time.monotonic() < end:
                try:
                    self._heard.append(sock.recv(2048))
                except TimeoutError:
                    continue
        del self._heard[:-_KEPT]

    def run(self, seconds: float, count: int, ethertype: int) -> dict[str, float]:
        """So many forged frames and as many overheard ones, one after the other, over so many seconds.

        Args:
            ethertype: of the frames sent: with another one than ours no host listens.
        """
        used, began = _used_s(), time.monotonic()
        sent, listened = 0, 0.0
        frames: Iterator[bytes] = iter(())
        while sent < 2 * count:
            now = time.monotonic()
            if now >= listened + _LISTEN_S:
                self.listen()
                listened, frames = now, self._frames(ethertype)
            due = min(2 * count, int((now - began) / seconds * 2 * count) + 1)
            while sent < due:
                self._out.send(next(frames))
                sent += 1
            time.sleep(_BATCH_S)
        time.sleep(max(0.0, began + seconds - time.monotonic()))
        return {"forged": sent // 2, "replayed": sent // 2, "processor_s": _used_s() - used}

    def _frames(self, ethertype: int) -> Iterator[bytes]:
        """Without an end: a forged frame, an overheard one."""
        forged = [bytearray(frame) for frame in self._forged()]
        patch = struct.Struct(">IQ")
        kind = struct.pack(">H", ethertype)
        for frame in forged:
            frame[12:14] = kind
        heard = [frame[:12] + kind + frame[14:] for frame in self._heard]
        while True:
            frame = self._random.choice(forged)
            (sequence,) = struct.unpack_from(">I", frame, _SEQUENCE_AT)
            patch.pack_into(frame, _SEQUENCE_AT, sequence + 1, self._random.getrandbits(64))
            yield bytes(frame)
            yield self._random.choice(heard)

    def _forged(self) -> Iterator[bytes]:
        """One third each: fragments, tokens, control frames of all kinds; of every member that was overheard."""
        fragments, tokens = [], []
        for ethernet in self._heard:
            frame = wire.unpack(ethernet[wire.ETHERNET_BYTES :])
            if isinstance(frame.body, wire.Fragment):
                fragments.append((ethernet[6:12], frame))
            elif isinstance(frame.body, wire.Token):
                tokens.append((ethernet[6:12], frame))
        control = [
            wire.ethernet(mac, wire.pack(header, body, tail=tail))
            for mac, frame in dict(tokens).items()
            for header, body, tail in _control(mac, frame.header)
        ]
        for at in range(len(control)):
            if fragments:
                mac, frame = fragments[at % len(fragments)]
                tail = self._random.randbytes(wire.PAYLOAD_BYTES)
                yield wire.ethernet(mac, wire.pack(_ahead(frame.header), frame.body, tail=tail))
            mac, frame = tokens[at % len(tokens)]
            assert isinstance(frame.body, wire.Token)
            flags = self._random.choice((0, wire.Flag.REPEAT, wire.Flag.PARKED))
            body = replace(frame.body, generation=frame.body.generation + 1)
            header = replace(_ahead(frame.header), flags=int(flags))
            yield wire.ethernet(mac, wire.pack(header, body, *frame.items))
            yield control[at]


def _ahead(header: wire.Header) -> wire.Header:
    return replace(header, sequence=(header.sequence + _AHEAD) & 0x7FFFFFFF)


def _control(mac: bytes, header: wire.Header) -> Iterator[tuple[wire.Header, wire.Body, bytes]]:
    """Control frames of every kind, in the view and outside any, well formed."""
    stop = json.dumps(
        {
            "first_round": 0, "rounds": 0, "fragments": 0, "last_fragments": 0, "width": 0,
            "shares": [], "quorum": 0, "unit": 0, "settings": {"ok": False, "message": "forged"},
        }
    ).encode()  # fmt: skip
    bodies: tuple[tuple[wire.Body, bytes], ...] = (
        (wire.Call(1), b"nicps"),
        (wire.Answer(1, 2, header.view, 2), b"h9"),
        (wire.View(1, 0, header.view + 1, header.view, 1 << 20, 0, 0, 0, 1), b""),
        (wire.Vote(1, 1 << 20, 0, header.round, 0, mac, 2, 1), b""),
        (wire.Decision(1 << 20, 1 << 20, 5), stop),
        (wire.Ack(1 << 20, 1), b""),
        (wire.Want(1, header.round), b""),
        (wire.Fail(), b"forged"),
        (wire.Leave(), b"forged"),
        (wire.Probe(1, 1, 1), b""),
        (wire.Echo(1, 0, 0, 0, 1), b"h9"),
    )
    for body, tail in bodies:
        for view, sender in ((header.view, header.sender), (0, 0)):
            yield replace(_ahead(header), view=view, sender=sender, flags=0), body, tail


def _used_s() -> float:
    own = resource.getrusage(resource.RUSAGE_SELF)
    return own.ru_utime + own.ru_stime


def main() -> int:
    """Obey orders until the other end has gone."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--iface", default="eth1")
    parser.add_argument(
        "--barrier", required=True, help="the path of a socket: orders come from there"
    )
    args = parser.parse_args()
    flooder = Flooder(args.iface)
    channel = Channel.connect(args.barrier)
    while True:
        try:
            order, _ = channel.recv()
        except ChannelClosed:
            return 0
        done = flooder.run(order["seconds"], order["count"], order["ethertype"])
        channel.send(dict(done))


if __name__ == "__main__":
    sys.exit(main())
