# SPDX-License-Identifier: Apache-2.0
"""Child processes of the agent: training code, run as another user and never imported here."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import pwd
import signal
import socket
import struct
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from subprocess import DEVNULL, Popen, SubprocessError

from nicps.agent.crash import describe_end, reported_error
from nicps.errors import EnvironmentProblem

_PR_SET_PDEATHSIG = 1
_PR_SET_NO_NEW_PRIVS = 38
_CLONE_NEWNET = 0x40000000
_SIOCSIFFLAGS = 0x8914
_IFF_UP = 1
_TAIL_BYTES = 1 << 16  # of a log, for its last line
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

    It can gain no privileges, and is in a network namespace of its own with nothing but a loopback interface in it,
    unless it has `network_access`: then it has the agent's.

    Args:
        log: its output is appended there.
        stdout: where its standard output goes instead.
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
        begin = partial(_before_exec, user if switch else None, network_access)
        self._log_begins = log.stat().st_size if log.exists() else 0
        try:
            with log.open("ab") as stderr, (stdout or log).open("ab") as out:
                self._process = Popen(
                    argv,
                    cwd=folder,
                    env=environment,
                    stdin=DEVNULL,
                    stdout=out,
                    stderr=stderr,
                    start_new_session=True,
                    pass_fds=fds,
                    preexec_fn=begin,
                )
        except (OSError, ValueError, SubprocessError) as error:
            why = _text(log, self._log_begins)
            raise EnvironmentProblem(
                f"user {user.name!r} cannot run {argv[0]}: {why or error}; `nicps doctor --user {user.name}` says why"
            ) from None
        self._pidfd = os.pidfd_open(self._process.pid)

    @property
    def pid(self) -> int:
        """The process's number."""
        return self._process.pid

    def fileno(self) -> int:
        """A descriptor that is readable once the process has ended."""
        return self._pidfd

    def reap(self) -> int | None:
        """The exit code of the ended process, negative for a signal; None while it runs, or while its tracer has
        the code.
        """
        code = self._process.poll()
        if code is not None and self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1
        return code

    def last_line(self, where: str = "") -> str:
        """A description of its end, for an error message (`describe_end`)."""
        code, last_line = self._process.returncode, self._last_line()
        crashed = code is not None and code < 0
        if not (last_line or crashed) and os.statvfs(self.log.parent).f_bavail == 0:
            return f"No space left on device: {self.log.parent}"  # so it could not write its error
        return describe_end(code, last_line, where)

    def reported_error(self) -> str:
        """The error that it reported before it ended; empty if it crashed."""
        return reported_error(self._last_line())

    def _last_line(self) -> str:
        lines = _text(self.log, self._log_begins).strip().splitlines()
        return lines[-1] if lines else ""

    def kill(self) -> None:
        """End it, and the processes of its session. It may exist for a moment yet."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)


def _text(log: Path, first: int = 0) -> str:
    """The end of a log, from byte `first` on; empty if there is none."""
    try:
        with log.open("rb") as file:
            file.seek(max(first, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            return file.read(_TAIL_BYTES).decode(errors="replace")
    except OSError:
        return ""


def _before_exec(user: User | None, network_access: bool) -> None:
    """In the child, as the agent's user: take its rights away, then change its user. Errors go to its log."""
    try:
        os.setpriority(os.PRIO_PROCESS, 0, 0)  # while it may
        if not network_access:
            _checked(_libc.unshare(_CLONE_NEWNET), "cannot make a network namespace")
            _loopback_up()  # some libraries talk to themselves
        if user is not None:
            os.setgroups([])
            os.setgid(user.gid)
            os.setuid(user.uid)
    except OSError as error:
        os.write(2, str(error).encode())
        raise
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
