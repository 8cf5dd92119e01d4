# SPDX-License-Identifier: Apache-2.0
"""torchft in the scene of `benchmarks.elastic`: `python -m benchmarks.elastic_torchft SETTINGS` on each of its hosts.

The model, the data and the output are those of tests/netns/elastic_program.py. torchft's Manager takes the place of the
group and of the State: DDP on ProcessGroupGloo, state by PGTransport, as in torchft's own example for DDP. With
`serves` in the settings the program is the lighthouse instead.
"""

from __future__ import annotations

import hashlib
import logging
import os
import signal
import socket
import subprocess
import sys
import time
import warnings
from dataclasses import dataclass
from datetime import timedelta
from importlib.util import find_spec
from typing import Any

import orjson
import torch
import torch.distributed as dist

from nicps.errors import EnvironmentProblem
from nicps.lab.links import HOST_INTERFACE
from tests.netns.elastic_program import flat, loss_of, make, report_end, say
from tests.netns.members import Network

PROGRAM = "benchmarks.elastic_torchft"
#: Of three, so that training goes on without one.
LEAST = 2
_PORT = 29510
_HEARTBEAT_S = 0.1  # torchft's default, as is that of the lighthouse's tick
_HEARTBEATS = 5  # in a time-out, at least
_QUORUM_S = 60.0  # torchft's default: a process whose quorum takes longer ends


def require() -> None:
    """torchft is optional.

    Raises:
        EnvironmentProblem: it is not installed.
    """
    if find_spec("torchft") is None:
        raise EnvironmentProblem("torchft is not installed: pip install torchft")


@dataclass
class Hosts(Network):
    """A lab without agents, in which torchft's lighthouse runs on the last host.

    Attributes:
        timeout_s: of Gloo, of the Manager's calls, and of heartbeats at the lighthouse.
    """

    timeout_s: float = 0.5
    lighthouse: subprocess.Popen[Any] | None = None

    def settings(self) -> dict[str, Any]:
        """What the program is given on each other host."""
        return {"lighthouse": self.lab.hosts[-1].ip, "timeout_s": self.timeout_s}

    def ready(self) -> None:
        """A new lighthouse, which knows of no process."""
        if self.lighthouse is not None:
            self.lighthouse.kill()
            self.lighthouse.wait()
        settings = orjson.dumps({"serves": True, **self.settings()}).decode()
        command = [sys.executable, "-m", PROGRAM, settings]
        self.lighthouse = self.run(self.names[-1], command, stderr=subprocess.DEVNULL)

    def all_stand_by(self, *hosts: str, timeout_s: float = 30.0) -> None:
        """There are no agents."""


def serve(timeout_s: float) -> None:
    """Be the lighthouse."""
    from torchft.coordination import LighthouseServer

    timeout_ms = round(1e3 * timeout_s)
    tick_ms = round(1e3 * heartbeat(timeout_s))
    lighthouse = LighthouseServer(
        bind=f"0.0.0.0:{_PORT}",
        min_replicas=LEAST,
        join_timeout_ms=timeout_ms,
        quorum_tick_ms=tick_ms,
        heartbeat_timeout_ms=timeout_ms,
    )
    signal.pause()
    lighthouse.shutdown()


def heartbeat(timeout_s: float) -> float:
    """Seconds between two of them."""
    return min(_HEARTBEAT_S, timeout_s / _HEARTBEATS)


def own_address(towards: str) -> str:
    """The IP address of this host that the other one sees."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((towards, _PORT))
        return str(probe.getsockname()[0])


def train(settings: dict[str, Any]) -> None:
    """Train, until eight steps after a process has taken the place of one that was lost."""
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
    from torchft.checkpointing.pg_transport import PGTransport

    timeout = timedelta(seconds=settings["timeout_s"])
    address = own_address(settings["lighthouse"])
    number = int(address.rpartition(".")[2])
    inner, unwrapped = make("sgd", seed=number)
    known: dict[str, Any] = {"here": 0, "lost": False, "end": settings.get("steps", 2000)}
    loaded = False

    def save() -> dict[str, Any]:
        return {"model": inner.state_dict(), "optimizer": unwrapped.state_dict(), "known": known}

    def load(state: dict[str, Any]) -> None:
        nonlocal loaded
        inner.load_state_dict(state["model"])
        unwrapped.load_state_dict(state["optimizer"])
        known.update(state["known"])
        loaded = True

    store = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False)
    group = ProcessGroupGloo(timeout=timeout)
    manager = Manager(
        pg=group,
        load_state_dict=load,
        state_dict=save,
        min_replica_size=LEAST,
        timeout=timeout,
        quorum_timeout=timedelta(seconds=_QUORUM_S),
        rank=0,
        world_size=1,
        store_addr=address,
        store_port=store.port,
        lighthouse_addr=f"http://{settings['lighthouse']}:{_PORT}",
        replica_id=address,
        hostname=address,
        heartbeat_interval=timedelta(seconds=heartbeat(settings["timeout_s"])),
        checkpoint_transport=PGTransport(group, timeout, torch.device("cpu")),
    )
    model, optimizer = DistributedDataParallel(manager, inner), Optimizer(manager, unwrapped)
    moment = time.monotonic()
    say(built=True, at=time.time())
    while manager.current_step() < known["end"]:
        optimizer.zero_grad()
        loss_of(model, manager.current_step(), number).backward()
        if not manager.should_commit():
            continue
        unwrapped.step()
        step, here = manager.current_step() - 1, manager.num_participants()
        came = loaded and manager.is_participating()
        loaded = loaded and not came
        before, moment = moment, time.monotonic()
        digest = hashlib.sha256(flat(inner).numpy().tobytes()).hexdigest()
        said = {"step": step, "rank": number, "here": list(range(here)), "came": came}
        say(**said, digest=digest, seconds=round(moment - before, 3), at=time.time())
        if here < known["here"]:
            known["lost"] = True
        elif here > known["here"] and known["lost"]:
            known["end"] = step + 8
        known["here"] = here
        time.sleep(settings.get("pace_s", 0.0))
    manager.shutdown(wait=False)


def main(settings: dict[str, Any]) -> int:
    """Train, or serve."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    os.environ |= {"GLOO_SOCKET_IFNAME": HOST_INTERFACE, "RUST_LOG": "error"}
    logging.disable()  # it logs every step, and every error that it deals with
    if settings.get("serves"):
        serve(settings["timeout_s"])
        return 0
    return report_end(lambda: train(settings))


if __name__ == "__main__":
    sys.exit(main(orjson.loads(sys.argv[1])))
