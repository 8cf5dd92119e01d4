# SPDX-License-Identifier: Apache-2.0
"""A standalone cluster of Spark in the hosts of a lab: real Master and Worker processes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from nicps.lab.links import ip_of
from nicps.lab.processes import Running, alive
from tests.netns.labs import until
from tests.netns.members import Network

EXECUTOR = "CoarseGrainedExecutorBackend"
PORT = 7077


@dataclass
class Cluster:
    """The master is h1, on which commands are also given; the other hosts have a worker each."""

    network: Network
    folder: Path
    processes: dict[str, subprocess.Popen[Any]] = field(default_factory=dict)

    def __enter__(self) -> Self:
        """Whether the master answers, and knows all workers."""
        master, *workers = self.network.names
        self.start(master, "master.Master", "--port", str(PORT))
        self.await_text(master, "I have been elected leader")
        for host in workers:
            self.start(host, "worker.Worker", "-c", "1", "-m", "1g", self.url)
        for host in workers:
            self.await_text(host, "Successfully registered with master")
        return self

    def __exit__(self, *_: object) -> None:
        """End it, with all that it has started."""
        for process in self.processes.values():
            process.kill()
        for host in self.network.names:
            until(lambda host=host: not self.java(host), f"the end of Spark on {host}")

    @property
    def url(self) -> str:
        """The master's."""
        return f"spark://{ip_of(1)}:{PORT}"

    def start(self, host: str, what: str, *arguments: str) -> None:
        """Start a program of the cluster there."""
        import pyspark

        home = Path(pyspark.__file__).parent
        address = ip_of(self.network.lab.host(host).number)
        # Spark's programs reach the host's own name, if it is that of another network, by this address.
        environment = {
            **os.environ,
            "SPARK_HOME": str(home),
            "SPARK_LOCAL_IP": address,
            "SPARK_WORKER_DIR": str(self.folder / host / "work"),
        }
        (self.folder / host).mkdir(exist_ok=True)
        command = [str(home / "bin" / "spark-class"), f"org.apache.spark.deploy.{what}"]
        with (self.folder / host / "spark.log").open("ab") as log:
            self.processes[host] = self.network.run(
                host,
                [*command, "--host", address, *arguments],
                env=environment,
                stdout=log,
                stderr=log,
            )

    def log(self, host: str) -> str:
        """The log of Spark there."""
        return (self.folder / host / "spark.log").read_text(errors="replace")

    def await_text(self, host: str, text: str) -> None:
        """Wait until Spark has logged that there."""

        def said() -> bool:
            assert self.processes[host].poll() is None, self.log(host)
            return text in self.log(host)

        until(said, f"{text!r} on {host}", 120)

    def java(self, host: str, what: str = "org.apache.spark") -> list[Running]:
        """Spark's processes there."""
        found = self.network.lab.processes()[host]
        return [
            process for process in found if what in process.command and "java" in process.command
        ]

    def kill_executor(self, host: str) -> Running:
        """SIGKILL; return the process."""
        (executor,) = self.java(host, EXECUTOR)
        with contextlib.suppress(ProcessLookupError):
            os.kill(executor.pid, signal.SIGKILL)
        until(lambda: not alive(executor), f"the end of the executor on {host}")
        return executor

    def dbn(self, *arguments: str, host: str = "h1", **options: Any) -> subprocess.Popen[str]:
        """Start `nicps dbn` with this master."""
        return self.network.start(host, "dbn", "--master", self.url, *arguments, **options)
