# SPDX-License-Identifier: Apache-2.0
"""Other traffic on the same interfaces goes on untouched while training runs."""

from __future__ import annotations

import hashlib
import re
import socket
import subprocess
import threading
from pathlib import Path

import pytest
from pyroute2 import IPRoute

from nicps.lab import namespaces
from tests.netns.members import Network, tiny_job

PORT = 7000
PINGS = 60
PIECE = bytes(range(256)) * 256

# Gradients of 1.1 MB, so that training fills the cables too. It goes on until there is a file.
WIDE = """
def done(state):
    return os.path.exists({end!r})

def model():
    return nn.Sequential(nn.Linear(16, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 4))
"""


class Stream:
    """Bytes over TCP from h2 to h3, counted and hashed at both ends, until the end of the context."""

    def __init__(self, network: Network) -> None:
        source, target = network.lab.host("h2"), network.lab.host("h3")
        self.sent, self.arrived = 0, 0
        self._digests = {"sent": hashlib.sha256(), "arrived": hashlib.sha256()}
        self._stop = threading.Event()
        self._server = namespaces.inside(
            target.netns, lambda: socket.create_server((target.ip, PORT))
        )
        self._client = namespaces.inside(
            source.netns, lambda: socket.create_connection((target.ip, PORT), timeout=20)
        )
        self._server.settimeout(20)
        self._threads = [threading.Thread(target=self._send), threading.Thread(target=self._take)]
        for thread in self._threads:
            thread.start()

    def _send(self) -> None:
        with self._client:
            while not self._stop.is_set():
                piece = self.sent.to_bytes(8, "big") + PIECE
                self._client.sendall(piece)
                self._digests["sent"].update(piece)
                self.sent += len(piece)

    def _take(self) -> None:
        with self._server, self._server.accept()[0] as connection:
            connection.settimeout(20)
            while data := connection.recv(1 << 18):
                self._digests["arrived"].update(data)
                self.arrived += len(data)

    def stop(self) -> None:
        """End the sending; the rest arrives."""
        self._stop.set()
        for thread in self._threads:
            thread.join(30)

    @property
    def whole(self) -> bool:
        """Whether exactly the sent bytes have arrived."""
        digests = [digest.digest() for digest in self._digests.values()]
        return self.sent == self.arrived and digests[0] == digests[1]


def dropped(network: Network) -> int:
    """Frames for which there was no room in front of h2 and h3: a full cable drops any frame."""

    def count() -> int:
        with IPRoute() as route:
            links = [link for name in ("p2", "p3") for link in route.get_links(ifname=name)]
        return sum(link.get_attr("IFLA_STATS64")["tx_dropped"] for link in links)

    return namespaces.inside(namespaces.switch_name(network.lab.name), count)


@pytest.mark.long
def test_ping_and_tcp_while_training(network: Network, open_path: Path) -> None:
    end = open_path / "end"
    job = tiny_job(open_path, WIDE.format(end=str(end)))
    channel = network.submit("h1", job, rounds=100_000, microbatch_seconds=0.01)
    try:
        network.in_training()
        begun = network.status("h1")
        stream, full = Stream(network), dropped(network)
        try:
            argv = ["ping", "-q", f"-c{PINGS}", "-i0.05", "-W10", network.lab.host("h3").ip]
            ping = network.run("h2", argv, stdout=subprocess.PIPE, text=True)
            said = ping.communicate(timeout=60)[0]
            meanwhile, full = network.status("h1"), dropped(network) - full
        finally:
            stream.stop()
            end.touch()
        run = network.finished(channel)
    finally:
        channel.close()
    assert begun is not None and meanwhile is not None
    assert meanwhile["phase"] == "train" and meanwhile["round"] > begun["round"]
    answered = re.search(rf"{PINGS} packets transmitted, (\d+) received", said)
    assert answered is not None and PINGS - int(answered[1]) <= min(full, PINGS // 20), (said, full)
    assert stream.whole
    assert stream.sent > 1 << 20
    assert run.result["weights_identical"] is True
    assert run.result["rounds"] > meanwhile["round"] - begun["round"]
