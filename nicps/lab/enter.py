# SPDX-License-Identifier: Apache-2.0
"""Enter a named network namespace: a module for the lab, and the launcher of the lab's processes.

    python -I -S enter.py NETNS [--user USER] -- COMMAND ...

As a script it enters the namespace and becomes the command, so that the process that was started
is the command itself: a direct child, whose signals and exit code need no go-between. It imports
the standard library only. Like `ip netns exec` it also mounts a sysfs of its own, because
/sys/class/net shows the interfaces of the namespace in which sysfs was mounted.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import sys

NETNS_DIR = "/run/netns"
CLONE_NEWNS = 0x00020000
CLONE_NEWNET = 0x40000000
MS_BIND = 0x1000
MS_REC = 0x4000
MS_SLAVE = 0x80000
MS_SHARED = 0x100000
MNT_DETACH = 2

NOT_EXECUTABLE = 126
NOT_FOUND = 127

# File systems that common systems mount below /sys, and that a new sysfs would hide.
_BELOW_SYS = (
    "/sys/fs/cgroup",
    "/sys/fs/bpf",
    "/sys/kernel/security",
    "/sys/kernel/debug",
    "/sys/kernel/tracing",
)

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def unshare(flags: int) -> None:
    """unshare(2)."""
    _check(_libc.unshare(flags), "unshare")


def setns(fd: int) -> None:
    """Put the calling thread into the network namespace behind `fd`."""
    _check(_libc.setns(fd, CLONE_NEWNET), "setns")


def mount(source: str, target: str, kind: str = "none", flags: int = 0) -> None:
    """mount(2) without data."""
    result = _libc.mount(
        source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), None
    )
    _check(result, f"mount {target}")


def unmount(target: str) -> None:
    """umount2(2), lazily, so that a process inside does not hold it."""
    _check(_libc.umount2(target.encode(), MNT_DETACH), f"umount {target}")


def path_of(netns: str) -> str:
    """The path of the namespace of that name, as iproute2 has it; a path stands for itself."""
    return os.path.join(NETNS_DIR, netns)


def enter(netns: str) -> None:
    """Put this process (its calling thread) into `netns`, with a /sys that shows that namespace."""
    fd = os.open(path_of(netns), os.O_RDONLY | os.O_CLOEXEC)
    try:
        setns(fd)
    finally:
        os.close(fd)
    unshare(CLONE_NEWNS)
    if not _become_slave() and not os.path.ismount("/sys"):
        return  # a sysfs of our own would show up outside
    kept = [(os.open(path, os.O_PATH), path) for path in _BELOW_SYS if os.path.ismount(path)]
    mount("sysfs", "/sys", "sysfs")
    for fd, path in kept:
        mount(f"/proc/self/fd/{fd}", path, flags=MS_BIND | MS_REC)
        os.close(fd)


def _become_slave() -> bool:
    """A name that is unmounted outside (a lab's names, above all) goes away in here as well.

    False in a chroot whose root is no mount point: then only mounts below it are slaves.
    """
    try:
        mount("none", "/", flags=MS_SLAVE | MS_REC)
        return True
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    with open("/proc/self/mountinfo", "rb") as mounts:
        points = [line.split()[4].decode("unicode_escape") for line in mounts]
    for point in points:
        with contextlib.suppress(OSError):  # hidden below another mount
            mount("none", point, flags=MS_SLAVE)
    return False


def become_user(user: str) -> None:
    """Give up root for `user` and its groups."""
    import pwd

    entry = pwd.getpwnam(user)
    os.initgroups(user, entry.pw_gid)
    os.setgid(entry.pw_gid)
    os.setuid(entry.pw_uid)


def become_command(command: list[str]) -> int:
    """Replace this process by `command`; returns only if that fails, with an exit code."""
    try:
        os.execvp(command[0], command)
    except (FileNotFoundError, NotADirectoryError):
        print(f"nicps: error: {command[0]}: no such command", file=sys.stderr)
        return NOT_FOUND
    except OSError as error:
        print(f"nicps: error: {command[0]}: {error.strerror}", file=sys.stderr)
        return NOT_EXECUTABLE


def _main(argv: list[str]) -> int:
    split = argv.index("--")
    options, command = argv[:split], argv[split + 1 :]
    enter(options[0])
    if "--user" in options:
        become_user(options[options.index("--user") + 1])
    return become_command(command)


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
