#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Virtual machines that each run `nicps join` with native XDP, and one job on them: up, train, show, down.

    .venv/bin/python vm-lab/vm_lab.py --kernel linux-image-6.1.0-*.deb --vms 2
    .venv/bin/python vm-lab/vm_lab.py --kernel OLD.deb --kernel NEW.deb       a kernel each, in turn

h1 --+-- h2        each a guest with a virtio-net interface, eth0; the segment between them is a UNIX socket
     |
     +-- h3        of this process: no frame leaves this machine

The kernels are Debian packages (not -cloud ones). Needs root, QEMU 7.2 (Debian: qemu-system-x86 busybox-static kmod
udev) and virtme-ng (`.venv/bin/pip install virtme-ng`). The last line on stdout is the result as JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import re
import shlex
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from machines import Guest, Hardware, Kernel, choose, require_guests  # noqa: E402
from segment import Segment  # noqa: E402

from nicps.cli.submit import parse_settings  # noqa: E402
from nicps.errors import (  # noqa: E402
    EnvironmentProblem,
    JobFailed,
    NicpsError,
    NotRoot,
    UsageProblem,
)
from nicps.lab import LabSettings  # noqa: E402
from nicps.lab.agents import join_command  # noqa: E402
from nicps.lab.jobs import RunSettings, choose_user, submission  # noqa: E402
from nicps.lab.links import mac_of  # noqa: E402
from nicps.lab.shield import orderly, shielded  # noqa: E402

#: How long a member may say nothing, by accelerator: TCG runs some twenty times slower.
SILENCE_S = {"kvm": 0.3, "tcg": 3.0}
#: udev gives the only interface a name after its slot.
NAME_ETH0 = "ip link set $(ls /sys/bus/virtio/drivers/virtio_net/virtio*/net) name eth0 up"
MOST = 8
ERROR = "nicps: error: "
END_S = 30.0  # from the last word of a guest to its end


def main() -> int:
    """Everything, and its exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("job", nargs="?", type=Path, default=ROOT / "trainer" / "jobs" / "digits")
    parser.add_argument(
        "--kernel",
        type=Path,
        action="append",
        required=True,
        metavar="DEB",
        help="a linux-image-*.deb; again: the next guest's",
    )
    parser.add_argument("--vms", type=int, help="2 to 8 (2, or as many as there are kernels)")
    parser.add_argument("--cpus", type=int, default=1, help="a guest's (%(default)s)")
    parser.add_argument("--memory", default="2G", help="a guest's (%(default)s)")
    parser.add_argument("--accel", choices=("auto", "kvm", "tcg"), default="auto")
    parser.add_argument("--data", type=Path, default=os.environ.get("NICPS_DATA"))
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--silence", type=float, metavar="SECONDS", help="for `nicps join`")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="where results go")
    parser.add_argument("--timeout", type=float, default=1800.0, metavar="SECONDS", help="in all")
    args = parser.parse_args()
    try:
        with orderly():
            return run(args)
    except NicpsError as error:
        print(f"nicps: error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130


def run(args: argparse.Namespace) -> int:
    """Up, train, show, down."""
    count = args.vms or max(2, len(args.kernel))
    if not max(2, len(args.kernel)) <= count <= MOST:
        raise UsageProblem(f"--vms takes 2 to {MOST}, and no less than kernels, not {count}")
    if not (args.job / "job.py").is_file():
        raise UsageProblem(f"{args.job} holds no job.py (docs/jobs.md says what a job is)")
    if os.geteuid() != 0:
        raise NotRoot("a guest sees this machine's files as root: run it as root")
    require_guests()
    begun = time.monotonic()
    stack = contextlib.ExitStack()
    try:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="nicps-vms-")))
        kernels = [Kernel(deb, folder / f"kernel{n}") for n, deb in enumerate(args.kernel)]
        accelerator = choose(kernels[0], args.accel)
        args.runs.mkdir(parents=True, exist_ok=True)
        segment = stack.enter_context(Segment(folder / "segment"))
        lab = VmLab(args, begun + args.timeout)
        for number in range(1, count + 1):
            hardware = Hardware(
                accelerator,
                cpus=args.cpus,
                memory=args.memory,
                name=f"h{number}",
                share=(args.runs,) if number == 1 else (),
                devices=segment.device(mac_of(number)),
            )
            with shielded():
                stack.enter_context(lab.boot(kernels[(number - 1) % len(kernels)], hardware))
        lab.await_agents()
        up_s = time.monotonic() - begun
        result = lab.train()
        result |= {
            "hosts": count,
            "xdp_mode": "native",
            "kernels": [guest.kernel.version for guest in lab.guests],
            "accelerator": accelerator.upper(),
            "frames": segment.frames,
            "up_seconds": round(up_s, 1),
        }
    finally:
        with shielded():  # Ctrl-C twice must leave nothing either
            stack.close()
    result["all_seconds"] = round(time.monotonic() - begun, 1)
    print(json.dumps(result), flush=True)
    if not result["weights_identical"]:
        raise JobFailed("the guests' weights differ: see metrics.jsonl of each host")
    return 0


class VmLab:
    """The guests, what they say, and what h1 is told to train. `deadline`: time.monotonic()'s."""

    def __init__(self, args: argparse.Namespace, deadline: float) -> None:
        self.args, self.deadline = args, deadline
        self.job = RunSettings(args.job, LabSettings(), args.data, parse_settings(args.set))
        self.user = choose_user(self.job)
        self.guests: list[Guest] = []
        self._said: queue.Queue[tuple[Guest, str, str | None]] = queue.Queue()  # None: no more
        self._words: dict[Guest, str] = {}  # its error, else its last line
        self._open: dict[Guest, int] = {}  # streams

    def boot(self, kernel: Kernel, hardware: Hardware) -> Guest:
        """A guest that joins, and submits the job if it is h1 and told to (a line)."""
        _print_line(f"{hardware.name}: Linux {kernel.version}, {hardware.accelerator.upper()}")
        silence_s = self.args.silence or SILENCE_S[hardware.accelerator]
        join = [*join_command("eth0", hardware.name, self.user), "--silence", f"{silence_s}"]
        command = f"export PYTHONPATH={shlex.quote(str(ROOT))}; {NAME_ETH0} && "
        if not self.guests:
            join += ["--runs", str(self.args.runs.resolve())]
            command += f"{{ ({shlex.join(join)}; kill $$) & }} && read go && "
            command += shlex.join(submission(self.job))
        else:
            command += shlex.join(join)
        guest = Guest(kernel, hardware, command)
        self.guests.append(guest)
        self._words[guest], self._open[guest] = "it said nothing", 2
        for stream in ("stdout", "stderr"):
            threading.Thread(target=self._listen, args=(guest, stream), daemon=True).start()
        return guest

    def _listen(self, guest: Guest, stream: str) -> None:
        with getattr(guest.process, stream) as lines:
            for line in lines:
                self._said.put((guest, stream, line.decode(errors="replace").strip()))
        self._said.put((guest, stream, None))

    def await_agents(self) -> None:
        """Until the agent of every guest runs with native XDP.

        Raises:
            EnvironmentProblem: one does not, and why.
        """
        waiting = {guest.name for guest in self.guests}
        for guest, _, line in self._lines("an agent on every guest"):
            if mode := re.search(r" on eth0, XDP (\w+) mode", line):
                if mode[1] != "native":
                    raise EnvironmentProblem(
                        f"{guest.name} got XDP {mode[1]} mode, not native (Linux {guest.kernel.version})"
                    )
                waiting.discard(guest.name)
                if not waiting:
                    return

    def train(self) -> dict[str, Any]:
        """Submit the job at h1; its result.

        Raises:
            JobFailed: it has failed.
        """
        first = self.guests[0]
        assert first.process.stdin is not None
        first.process.stdin.write(b"go\n")
        first.process.stdin.flush()
        for guest, stream, line in self._lines("the job's result"):
            if guest is first and stream == "stdout" and line.startswith("{"):
                result: dict[str, Any] = json.loads(line)
                return result
        raise AssertionError("there are always more lines, or an error")

    def _lines(self, what: str) -> Iterator[tuple[Guest, str, str]]:
        """What the guests say, shown on stderr; no guest may end before the caller has what it waits for.

        Raises:
            JobFailed: one has ended, with that guest's exit code.
            EnvironmentProblem: it takes too long.
        """
        while True:
            try:
                left_s = max(0.0, self.deadline - time.monotonic())
                guest, stream, line = self._said.get(timeout=left_s)
            except queue.Empty:
                raise EnvironmentProblem(
                    f"after {self.args.timeout:g} s still not: {what}"
                ) from None
            if line is None:
                self._open[guest] -= 1
                if not self._open[guest]:
                    said = self._words[guest].removeprefix(ERROR)
                    raise GuestEnded(f"{guest.name} has ended: {said}", guest.wait(END_S))
                continue
            if line and not line.startswith("{"):
                print(f"{guest.name}: {line}", file=sys.stderr, flush=True)
                if line.startswith(ERROR) or not self._words[guest].startswith(ERROR):
                    self._words[guest] = line
            yield guest, stream, line


class GuestEnded(JobFailed):
    """A guest's command ended before it was to; `exit_code` is its own."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code if 0 < exit_code < 128 else 5


def _print_line(text: str) -> None:
    print(f"nicps: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
