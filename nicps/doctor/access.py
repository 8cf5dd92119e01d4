# SPDX-License-Identifier: Apache-2.0
"""Whether the training user can read the interpreter, the packages, the job and the data.

The kernel itself is asked, from a child process that has become that user. So modes, groups, access lists and mount
options all count.
"""

from __future__ import annotations

import importlib.util
import os
import pwd
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from nicps.doctor.check import Check, fail, ok, warn

#: Of a folder, no more files than this are tried.
MOST_FILES = 2000

PACKAGES = ("nicps", "trainer", "torch", "numpy")


def closed_path(paths: Iterable[Path], user: pwd.struct_passwd) -> str | None:
    """The first file or folder that `user` cannot read or enter, as "FOLDER (why)"; None if there is none.

    Must be root to ask for another user than one's own.
    """
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(read_end)
            if os.geteuid() != user.pw_uid:
                os.setgroups([])  # as a training program
                os.setgid(user.pw_gid)
                os.setuid(user.pw_uid)
            answer = next(_closed(paths), "")
            os.write(write_end, answer.encode(errors="replace")[:4000])
            code = 0
        except OSError as error:
            os.write(write_end, f"? ({error})".encode())
            code = 0
        finally:
            os._exit(code)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        answer = pipe.read().decode(errors="replace")
    os.waitpid(child, 0)
    return answer or None


def _closed(paths: Iterable[Path]) -> Iterator[str]:
    for path in paths:
        for name in (path, path.resolve()):
            yield from _closed_on_the_way(name)
        if path.is_dir():
            yield from _closed_inside(path)
        elif not os.access(path, os.R_OK):
            yield f"{path} (cannot be read)"


def _closed_on_the_way(path: Path) -> Iterator[str]:
    for folder in reversed(path.absolute().parents):
        if not os.access(folder, os.X_OK):
            yield f"{folder} (cannot be entered)"


def _closed_inside(folder: Path) -> Iterator[str]:
    tried = 0
    if not os.access(folder, os.R_OK | os.X_OK):
        yield f"{folder} (cannot be listed)"
    for root, folders, files in os.walk(folder):
        for name in folders:
            if not os.access(Path(root, name), os.R_OK | os.X_OK):
                yield f"{Path(root, name)} (cannot be listed)"
        for name in files:
            if not os.access(Path(root, name), os.R_OK):
                yield f"{Path(root, name)} (cannot be read)"
            tried += 1
            if tried >= MOST_FILES:
                return


def interpreter_paths() -> list[Path]:
    """The interpreter and the entry file of each package that a trainer imports."""
    paths = [Path(sys.executable)]
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None:
            paths.append(Path(spec.origin))
    return paths


def check_access(user_name: str, job: Path | None, data: Path | None) -> list[Check]:
    """One row for the user, and one each for interpreter, job and data (if they are named)."""
    try:
        user = pwd.getpwnam(user_name)
    except KeyError:
        mend = "name one that exists with --user"
        return [fail("training user", f"no user {user_name!r} on this host", mend)]
    rows = [ok("training user", f"{user_name} (uid {user.pw_uid})")]
    if user.pw_uid == 0:
        mend = "name an unprivileged one with --user"
        rows = [warn("training user", f"{user_name}: a job's code would run as root", mend)]
    rows.append(_check_paths("interpreter", interpreter_paths(), user))
    if job is not None:
        rows.append(_check_job(job, user))
    if data is not None:
        rows.append(_check_paths("data", [data], user))
    return rows


def _check_job(job: Path, user: pwd.struct_passwd) -> Check:
    if not (job / "job.py").is_file():
        return fail("job", f"{job} has no job.py", "name the folder that holds job.py")
    return _check_paths("job", [job], user)


def _check_paths(name: str, paths: list[Path], user: pwd.struct_passwd) -> Check:
    text = str(paths[0])
    for path in paths:
        if not path.exists():
            return fail(name, f"no {path}", "name one that exists")
    if os.geteuid() not in (0, user.pw_uid):
        mend = "run this with sudo to find out"
        return warn(name, f"{text}; only root can ask what {user.pw_name} may read", mend)
    closed = closed_path(paths, user)
    if closed is None:
        return ok(name, text)
    where = closed.rsplit(" (", 1)[0]
    letter = "r" if closed.endswith("(cannot be read)") else "rx"
    mend = f"chmod o+{letter} {where}, or move it (not into a home folder), or another --user"
    return fail(name, f"{user.pw_name} is stopped at {closed}", mend)
