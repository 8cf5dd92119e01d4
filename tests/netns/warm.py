# SPDX-License-Identifier: Apache-2.0
"""Commands of tests in labs begin in a process that has imported everything: most of their processor time is imports.

    python -m tests.netns.warm KIND FD .....   forks for each command. The child enters its host's network namespace,
                                               and becomes what the lab's launcher would have made of it: session,
                                               user, folder, environment, streams, and the command line that others see

There is one such process for `nicps` commands and for the tests' own programs, and others, which start when they are
needed, for agents and for programs with PyTorch. The workers of a test run share them: each is started by the worker
that needs it first, and ends with the last worker that uses it. `started_warm` lets the labs of this process use them.
Commands of any other kind are started as always, and so is all that `nicps` itself starts, but the training programs of
these agents (`tests/netns/warm_programs.py`).
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from nicps.__main__ import run
from nicps.lab import enter, processes
from nicps.startup import permanent
from tests.netns import warm_programs
from tests.netns.labs import ROOT

NICPS, AGENT, TORCH = "nicps", "agent", "torch"
COMMANDS = ("submit", "resume", "status", "cancel", "leave", "doctor")
_ROOM = 4096  # bytes for a child's command line
_MARK = 128  # for the name of its lab
_MOST = 1 << 18  # of a request
_STATUS = 4  # bytes of an exit status, as waitpid gives it
_STREAMS = 3
_ANSWER_S = 60.0  # of the server: its imports come before the first one
_TRIES = 3  # to reach a server that does not end
_WORKERS = 64  # that wait for it, at most
#: Options of Popen that the server carries out; with others a command is started as always.
_OPTIONS = frozenset({"stdin", "stdout", "stderr", "text", "env", "cwd", "start_new_session"})
#: The tests' own programs, with what they need beside nicps.
PROGRAMS = {
    **{f"tests.netns.{name}_program": NICPS for name in ("group", "late")},
    **{
        f"tests.netns.{name}_program": TORCH
        for name in (
            "channels",
            "compress",
            "drawn",
            "elastic",
            "low_rank",
            "overlap",
            "store",
            "torch",
        )
    },
}
#: Settings that PyTorch and NumPy read as they are imported.
_THREADS = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
_READ_EARLY = ("ATEN_", "GOMP_", "KMP_", "MKL_", "OMP_", "OPENBLAS_", "TORCH_")


class Server:
    """The client's side: the process that forks, of this kind and for this run of tests.

    Args:
        run: its name; None: that of the test run.
    """

    def __init__(self, kind: str, run: str | None = None) -> None:
        self._kind = kind
        run = run or os.environ.get("PYTEST_XDIST_TESTRUNUID") or str(os.getpid())
        self._address = f"\0nicps-warm-{run}-{kind}"  # nothing of it is left in a folder
        self._process: subprocess.Popen[bytes] | None = None
        self._answered = False
        self._socket = self._connected()

    @property
    def started(self) -> int | None:
        """The process, if it was started here."""
        return None if self._process is None else self._process.pid

    def _connected(self) -> socket.socket:
        """A connection to the server, which is started if there is none."""
        deadline = time.monotonic() + _ANSWER_S
        while True:
            found = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            found.settimeout(_ANSWER_S)
            try:
                found.connect(self._address)
                return found
            except ConnectionRefusedError:
                found.close()
            if not self._start() and time.monotonic() > deadline:
                raise TimeoutError(f"no warm server for {self._kind}")

    def _start(self) -> bool:
        """Start the server; False: another worker is about to. Connections wait until the server has imported all."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
            try:
                listening.bind(self._address)
            except OSError:
                time.sleep(0.01)
                return False
            listening.listen(_WORKERS)
            fd = listening.fileno()
            # A training program has its threads from its job.
            threads = {} if self._kind == AGENT else _THREADS
            environment = {**os.environ, **threads, processes.MARK: "." * _MARK}
            argv = [sys.executable, "-m", __name__, self._kind, str(fd), "." * _ROOM]
            self._process = subprocess.Popen(argv, cwd=ROOT, env=environment, pass_fds=[fd])
        return True

    def fork(self, request: Mapping[str, Any], streams: Sequence[int]) -> tuple[int, int]:
        """The new process, and a descriptor from which its exit status can be read once it has ended."""
        ended, ends = os.pipe()
        try:
            for _ in range(_TRIES):
                answer = self._ask(request, array.array("i", [*streams, ends]))
                if answer:
                    self._answered = True
                    return int(answer), ended
                self._socket.close()  # it ended, with its last worker, in the moment in which we came
                self._socket = self._connected()
            raise ConnectionResetError(f"the warm server for {self._kind} ends before it answers")
        finally:
            os.close(ends)

    def _ask(self, request: Mapping[str, Any], fds: array.array[int]) -> bytes:
        """The answer; nothing: the server has gone, and this client has never had an answer of it."""
        try:
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)]
            self._socket.sendmsg([json.dumps(request).encode()], ancillary)
            answer = self._socket.recv(64)
        except ConnectionError:
            answer = b""
        if self._answered and not answer:
            raise ConnectionResetError(f"the warm server for {self._kind} has ended")
        return answer

    def close(self) -> None:
        """The server ends if no other worker uses it; its children go on."""
        self._socket.close()

    def wait(self) -> None:
        """Wait until it has ended, if it was started here."""
        if self._process is not None:
            try:
                self._process.wait(_ANSWER_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                raise


class Command(subprocess.Popen[Any]):
    """A command that a server forks, and waits for."""

    def __init__(
        self,
        server: Server,
        netns: str,
        argv: Sequence[str],
        user: str | None,
        options: Mapping[str, Any],
    ) -> None:
        self._request = {"netns": netns, "user": user}
        self._server = server
        self._ended = -1
        super().__init__(argv, **options)

    def _execute_child(self, *arguments: Any) -> None:
        """As Popen's: `arguments` begin with the command, the sixth and seventh are folder and environment."""
        command, folder, environment, pipes = arguments[0], *arguments[5:7], arguments[10:16]
        theirs = pipes[0], pipes[3], pipes[5]  # -1: it has our own
        streams = [own if pipe == -1 else pipe for own, pipe in enumerate(theirs)]
        request = {**self._request, "argv": list(command), "env": dict(environment)}
        request["cwd"] = os.fspath(folder or os.getcwd())
        try:
            self.pid, self._ended = self._server.fork(request, streams)
            self._child_created = True
        finally:
            self._close_pipe_fds(*pipes)

    def _try_wait(self, flags: int) -> tuple[int, int]:
        """As Popen's: (0, 0) while it runs, if the flags are WNOHANG."""
        if not select.select([self._ended], [], [], 0 if flags else None)[0]:
            return 0, 0
        status = os.read(self._ended, _STATUS)
        os.close(self._ended)
        return self.pid, int.from_bytes(status, sys.byteorder) if status else signal.SIGKILL

    def _internal_poll(self, **_: Any) -> int | None:
        """As Popen's, which calls it in `__del__` with more arguments."""
        with self._waitpid_lock:
            if self.returncode is None and self._ended >= 0:
                pid, status = self._try_wait(os.WNOHANG)
                if pid:
                    self._handle_exitstatus(status)
        return self.returncode


@contextlib.contextmanager
def started_warm() -> Iterator[None]:
    """Labs start `nicps` commands, and the programs of tests, from servers meanwhile."""
    servers, cold = {NICPS: Server(NICPS)}, processes.start

    def start(
        lab: str, netns: str, argv: Sequence[str], user: str | None, options: dict[str, Any]
    ) -> subprocess.Popen[Any]:
        environment = processes.environment(lab, options.get("env"))
        kind = _kind_of(argv, environment)
        if kind is None or not options.keys() <= _OPTIONS:
            return cold(lab, netns, argv, user, options)
        if kind not in servers:
            servers[kind] = Server(kind)
        return Command(servers[kind], netns, argv, user, {**options, "env": environment})

    processes.start = start
    try:
        yield
    finally:
        processes.start = cold
        for server in servers.values():
            server.close()
        if "PYTEST_XDIST_WORKER" not in os.environ:  # else other workers may use them yet
            for server in servers.values():
                server.wait()


def _kind_of(argv: Sequence[str], environment: Mapping[str, str]) -> str | None:
    """The server that has imported what `python [-P] -m MODULE ...` needs, with the same settings."""
    python, *words = [word for word in argv if word != "-P"]
    if python != sys.executable or words[:1] != ["-m"]:
        return None
    if words[1] == "nicps" and words[2] in COMMANDS:
        return NICPS
    if words[1] == "nicps" and words[2] == "join":
        return AGENT
    early = {name for name in environment if name.startswith(_READ_EARLY)}
    same = all(environment[name] == {**os.environ, **_THREADS}.get(name) for name in early)
    return PROGRAMS.get(words[1]) if same else None


# ---- the server's side


def _import_all(kind: str) -> None:
    if kind == TORCH:
        names = [
            "torch.distributed",
            "torch.optim",
            "torch._dynamo",
            "torch.nn.parallel",
            "nicps.torch",
        ]
    else:
        names = [
            "nicps.agent",
            "nicps.collective",
            *(f"nicps.cli.{command}" for command in (*COMMANDS, "join")),
        ]
    with permanent():
        for name in names:
            importlib.import_module(name)
    if kind == AGENT:
        warm_programs.import_all()


def _run(module: str) -> NoReturn:
    """In the child: the command's own code."""
    if module == "nicps":
        run()
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    sys.exit()


def _become(request: Mapping[str, Any], streams: Sequence[int]) -> None:
    """In the child: what the launcher and the interpreter do before a command's own code runs."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.setsid()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    os.closerange(_STREAMS, 1 << 16)
    enter.enter(request["netns"])
    os.chdir(request["cwd"])
    if request["user"]:
        enter.become_user(request["user"])
    os.environ.clear()
    os.environ.update(request["env"])
    sys.argv = request["argv"][request["argv"].index("-m") + 1 :]


def _show_command(argv: Sequence[str]) -> None:
    """Write the command line where the kernel shows it to others, over this process's own."""
    first, last, _, _ = _shown_places()
    _write(first, last - first, b"\0".join(word.encode() for word in argv) + b"\0")


def _show_lab(lab: str) -> None:
    """Write the lab's mark into the environment that the kernel shows."""
    _, _, first, last = _shown_places()
    shown = ctypes.string_at(first, last - first)
    mark = f"{processes.MARK}=".encode()
    at = shown.index(mark + b"." * _MARK) + len(mark)
    _write(first + at, _MARK, lab.encode())


def _shown_places() -> list[int]:
    """Where arguments begin and end, and the environment."""
    fields = Path("/proc/self/stat").read_bytes().rsplit(b")", 1)[1].split()
    return [int(field) for field in fields[45:49]]


def _write(at: int, room: int, text: bytes) -> None:
    if len(text) > room:
        raise ValueError(f"{len(text)} bytes are too many for {room}")
    ctypes.memmove(at, text.ljust(room, b"\0"), room)


def _serve(kind: str, fd: int) -> None:
    """Fork for each request until all clients have gone; the first has come during the imports."""
    listening = socket.socket(fileno=fd)
    listening.setblocking(False)
    woken, wakes = socket.socketpair()
    for end in (woken, wakes):
        end.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.set_wakeup_fd(wakes.fileno(), warn_on_full_buffer=False)
    ends: dict[int, int] = {}  # where the status of a child is written
    clients: list[socket.socket] = []
    while clients or select.select([listening], [], [], 0)[0]:
        ready, _, _ = select.select([listening, woken, *clients], [], [])
        if woken in ready:
            woken.recv(4096)
            _reap(ends)
        if listening in ready:
            with contextlib.suppress(BlockingIOError):
                clients.append(listening.accept()[0])
        for client in set(clients).intersection(ready):
            data, fds, _, _ = socket.recv_fds(client, _MOST, _STREAMS + 1)
            if not data:
                clients.remove(client)
                client.close()
                continue
            request = json.loads(data)
            pid = os.fork()
            if pid == 0:
                for own in (listening, woken, wakes, *clients):
                    own.detach()  # else they would close descriptors of the command's as it ends
                _become(request, fds[:_STREAMS])
                _show_command(request["argv"])
                _show_lab(request["env"][processes.MARK])
                if kind == AGENT:
                    warm_programs.grow_stem(_show_command)
                _run(sys.argv[0])
            ends[pid] = fds[_STREAMS]
            for stream in fds[:_STREAMS]:
                os.close(stream)
            client.send(str(pid).encode())


def _reap(ends: dict[int, int]) -> None:
    with contextlib.suppress(ChildProcessError):
        while ended := os.waitpid(-1, os.WNOHANG):
            pid, status = ended
            if not pid:
                return
            end = ends.pop(pid)
            with contextlib.suppress(BrokenPipeError):
                os.write(end, status.to_bytes(_STATUS, sys.byteorder))
            os.close(end)


if __name__ == "__main__":
    _import_all(sys.argv[1])
    _serve(sys.argv[1], int(sys.argv[2]))
