# SPDX-License-Identifier: Apache-2.0
"""Child processes of the agent: training code, run as another user and never imported here."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import itertools
import os
import pwd
import signal
import socket
import struct
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from nicps.agent.crash import describe_end, reported_error
from nicps.errors import EnvironmentProblem

_PR_SET_PDEATHSIG = 1
_PR_SET_NO_NEW_PRIVS = 38
_CLONE_NEWNET = 0x40000000
_SIOCSIFFLAGS = 0x8914
_IFF_UP = 1
_TAIL_BYTES = 1 << 16  # of a log, for its last line
_MOST_BYTES = 4096  # of an error
_MOST_FDS = 1 << 20
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class User:
    """The user that runs training code."""

    name: str
    uid: int
    gid: int

    @classmethod
    def named(cls, name: str) -> User:
        """Look the name up.

        Raises:
            EnvironmentProblem: there is no such user.
        """
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            raise EnvironmentProblem(
                f"there is no user {name!r} to run training code: name another with --user"
            ) from None
        return cls(name, entry.pw_uid, entry.pw_gid)


class Child:
    """A started process. `fileno` becomes readable when it has ended.

    Nobody waits until it has begun: that takes 10 ms, and 300 ms on a busy machine, where other members would evict a
    host that stands still so long. If it could not be begun, it ends with the exit code of an `EnvironmentProblem`,
    and `failure` says why.

    It can gain no privileges, and is in a network namespace of its own with nothing but a loopback interface in it,
    unless it has `network_access`: then it has the agent's.

    Args:
        log: its output is appended there.
        stdout: where its standard output goes instead.

    Raises:
        EnvironmentProblem: no process can be made, or its log cannot be written.
    """

    def __init__(
        self,
        argv: Sequence[str],
        user: User,
        folder: Path,
        log: Path,
        env: Mapping[str, str],
        fds: Sequence[int] = (),
        network_access: bool = False,
        stdout: Path | None = None,
    ) -> None:
        self.log = log
        packages = str(Path(__file__).resolve().parents[2])
        inherited = [p for p in (packages, os.environ.get("PYTHONPATH", "")) if p]
        environment = {
            "PATH": os.environ.get("PATH", "/usr/bin:/bin"),
            "HOME": str(folder),
            "LANG": "C.UTF-8",
            "PYTHONPATH": os.pathsep.join(inherited),
            "PYTHONDONTWRITEBYTECODE": "1",
            **env,
        }
        switch = os.geteuid() == 0 and user.uid != 0
        self._log_begins = log.stat().st_size if log.exists() else 0
        self._who, self._what = user, argv[0]
        self._code: int | None = None
        self.failure = ""
        try:
            with log.open("ab") as stderr, (stdout or log).open("ab") as out:
                self._pid, self._failed = start(
                    argv,
                    folder,
                    environment,
                    (out.fileno(), stderr.fileno(), *fds),
                    user if switch else None,
                    network_access,
                )
        except OSError as error:
            raise EnvironmentProblem(self._unbegun(str(error))) from None
        self._pidfd = os.pidfd_open(self._pid)

    @property
    def pid(self) -> int:
        """The process's number."""
        return self._pid

    def fileno(self) -> int:
        """A descriptor that is readable once the process has ended."""
        return self._pidfd

    def reap(self) -> int | None:
        """The exit code of the ended process, negative for a signal; None while it runs, or while its tracer has
        the code.
        """
        if self._code is None:
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            if pid:
                self._close(os.waitstatus_to_exitcode(status))
        return self._code

    def _close(self, code: int) -> None:
        with contextlib.suppress(BlockingIOError):
            if why := os.read(self._failed, _MOST_BYTES).decode(errors="replace"):
                self.failure = self._unbegun(why)
                code = EnvironmentProblem.exit_code
        os.close(self._failed)
        os.close(self._pidfd)
        self._pidfd, self._code = -1, code

    def _unbegun(self, why: str) -> str:
        name = self._who.name
        return (
            f"user {name!r} cannot run {self._what}: {why}; `nicps doctor --user {name}` says why"
        )

    def last_line(self, where: str = "") -> str:
        """A description of its end, for an error message (`describe_end`)."""
        if self.failure:
            return self.failure
        code, last_line = self._code, self._last_line()
        crashed = code is not None and code < 0
        if not (last_line or crashed) and os.statvfs(self.log.parent).f_bavail == 0:
            return f"No space left on device: {self.log.parent}"  # so it could not write its error
        return describe_end(code, last_line, where)

    def reported_error(self) -> str:
        """The error that it reported before it ended; empty if it crashed."""
        return self.failure or reported_error(self._last_line())

    def _last_line(self) -> str:
        lines = _text(self.log, self._log_begins).strip().splitlines()
        return lines[-1] if lines else ""

    def kill(self) -> None:
        """End it, and the processes of its session. It may exist for a moment yet."""
        if self._pidfd >= 0:  # it may not have its session yet
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)


def start(
    argv: Sequence[str],
    folder: Path,
    environment: Mapping[str, str],
    fds: Sequence[int],
    user: User | None,
    network_access: bool,
) -> tuple[int, int]:
    """Start a program, and wait for nothing.

    Popen returns once the program has begun, and its caller stands still as long as a busy machine does not run it.

    Args:
        fds: its standard output and error, and others that it gets under the same numbers.
        user: as whom it runs; None: as this process's.

    Returns:
        The number of the process, and a descriptor from which one reads why it could not be begun. It is at its end
        once the program has begun.

    Raises:
        OSError: there can be no process.
    """
    agent = os.getpid()
    failed, fails = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        pid = os.fork()
        if pid == 0:
            _become(agent, argv, folder, environment, fds, fails, user, network_access)
    except OSError:
        os.close(failed)
        raise
    finally:
        os.close(fails)
    return pid, failed


def _become(
    agent: int,
    argv: Sequence[str],
    folder: Path,
    environment: Mapping[str, str],
    fds: Sequence[int],
    fails: int,
    user: User | None,
    network_access: bool,
) -> NoReturn:
    """In the new process: what Popen does between fork and exec."""
    try:
        os.setsid()
        os.chdir(folder)
        first = os.open(os.devnull, os.O_RDONLY), *fds[:2]
        streams = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3) for fd in first]
        for place, fd in enumerate(streams):
            os.dup2(fd, place)
        for fd in fds[2:]:
            os.set_inheritable(fd, True)
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)  # Python ignores them
        _before_exec(user, network_access)
        if os.getppid() != agent:
            os._exit(255)  # it ended before it could take this process with it
        kept = sorted({2, fails, *fds[2:]})
        for fd, following in itertools.pairwise((*kept, _MOST_FDS)):
            os.closerange(fd + 1, following)
        os.execvpe(argv[0], list(argv), environment)
    except BaseException as error:
        os.write(fails, str(error).encode()[:_MOST_BYTES])
    os._exit(255)


def _text(log: Path, first: int = 0) -> str:
    """The end of a log, from byte `first` on; empty if there is none."""
    try:
        with log.open("rb") as file:
            file.seek(max(first, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            return file.read(_TAIL_BYTES).decode(errors="replace")
    except OSError:
        return ""


def _before_exec(user: User | None, network_access: bool) -> None:
    """In the child, as the agent's user: take its rights away, then change its user."""
    os.setpriority(os.PRIO_PROCESS, 0, 0)  # while it may
    if not network_access:
        _checked(_libc.unshare(_CLONE_NEWNET), "cannot make a network namespace")
        _loopback_up()  # some libraries talk to themselves
    if user is not None:
        os.setgroups([])
        os.setgid(user.gid)
        os.setuid(user.uid)
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # no process of ours outlives the agent
    _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def _loopback_up() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as handle:
        fcntl.ioctl(handle, _SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", _IFF_UP))


def _checked(result: int, failure: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{failure}: {os.strerror(number)}")


def set_nice(pid: int, nice: int) -> None:
    """Set the priority: nice value of a process, and of its session.

    Linux shares processors out between sessions first (sched_autogroup), so a nice value alone counts only within one.
    """
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, pid, nice)
    with contextlib.suppress(OSError):
        Path(f"/proc/{pid}/autogroup").write_text(str(nice))


def python(module: str, *arguments: str) -> list[str]:
    """A command line for this interpreter, without modules of the current folder: other users may have written them."""
    return [sys.executable, "-P", "-m", module, *arguments]
