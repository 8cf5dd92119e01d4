# SPDX-License-Identifier: Apache-2.0
"""A script of `nicps run` (docs/run.md): packed at the host that starts it, unpacked and run on every host.

python -m trainer.script prepare --job FOLDER --out OUT --settings JSON   at the host that starts it
python -m trainer.script run --workdir FOLDER                             at every host
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from trainer.errors import FolderError, JobError
from trainer.prepare import pack, unpack

ARCHIVE, PREPARED = "job.tar", "prepared.json"
_UNPACKED = ".nicps-sent"  # the archive, while it is unpacked
BEGUN = ".begun"  # newer than the files that were sent, and older than all that the script writes (docs/run.md)
_COARSE = 5  # CLOCK_REALTIME_COARSE of clock_gettime(2), by which the kernel dates files
#: Of its folder, for people: whose it is, and where data are to be.
FOLDER = "script", "name it with --data PATH, which is not sent"


def prepare(folder: Path, out: Path, settings: dict[str, Any]) -> None:
    """Write job.tar and prepared.json.

    Raises:
        JobError: the folder cannot be packed, or the script is not in it.
        FolderError: something in it cannot be read.
    """
    script, folder = str(settings["script"]["path"]), folder.resolve()
    try:
        if not (folder / script).is_file():
            raise JobError(f"there is no {script} in {folder}")
        pack(folder, out / ARCHIVE, *FOLDER)
    except OSError as error:
        path = Path(error.filename or out)
        if not path.is_relative_to(folder):
            raise
        raise FolderError(
            f"the script's whole folder {folder} goes to every host, and the training user cannot read {path}: "
            f"{error.strerror}; put the script into a folder of its own"
        ) from None
    prepared = {
        "job": Path(script).stem,
        "entry": "trainer.script",
        "data": None,
        "settings": settings,
        "files": [{"path": name, "store": "all"} for name in (ARCHIVE, PREPARED)],
    }
    (out / PREPARED).write_text(json.dumps(prepared, indent=1) + "\n")


def run(workdir: Path) -> None:
    """Become the script, in the folder with its files.

    Raises:
        JobError: they cannot be unpacked.
    """
    settings = json.loads((workdir / PREPARED).read_text())["settings"]["script"]
    # A file of the script's may have the archive's name.
    archive = (workdir / ARCHIVE).rename(workdir / _UNPACKED)
    unpack(archive, workdir)
    archive.unlink()
    os.chdir(workdir)
    (workdir / BEGUN).touch()
    _await_later(workdir / BEGUN)
    script = workdir / settings["path"]
    # As `python script.py` does it: the script's folder is where modules are looked for first.
    os.execv(sys.executable, [sys.executable, str(script), *settings["arguments"]])


def _await_later(path: Path) -> None:
    """Wait until files that are written from now on are newer: the kernel's clock for them goes on in ticks."""
    while time.clock_gettime_ns(_COARSE) <= path.stat().st_ctime_ns:
        time.sleep(0.001)


def main() -> int:
    """Do what the agent asks for."""
    parser = argparse.ArgumentParser(prog="python -m trainer.script")
    parser.add_argument("what", choices=("prepare", "run"))
    parser.add_argument("--job", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--data")
    parser.add_argument("--settings", default="{}")
    parser.add_argument("--workdir", type=Path)
    args = parser.parse_args()
    try:
        if args.what == "prepare":
            prepare(args.job, args.out, json.loads(args.settings))
        else:
            run(args.workdir)
    except (JobError, OSError) as error:
        print(f"trainer: error: {error}", file=sys.stderr)
        return (error if isinstance(error, JobError) else JobError).exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
