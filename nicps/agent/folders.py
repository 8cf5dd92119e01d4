# SPDX-License-Identifier: Apache-2.0
"""Working folders of jobs, and names of runs."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path


def sweep(parent: Path) -> None:
    """Remove the working folders of agents that were killed."""
    for folder in parent.glob("nicps-*-*"):
        pid = folder.name.split("-")[1]
        ours = folder.lstat().st_uid == os.geteuid() and not folder.is_symlink()
        if ours and pid.isdecimal() and not Path("/proc", pid).exists():
            shutil.rmtree(folder, ignore_errors=True)


def working_folder(parent: Path) -> Path:
    """A new folder that only root can change and everybody can enter.

    Raises:
        OSError: the disk is full, or there is no such parent.
    """
    folder = Path(tempfile.mkdtemp(prefix=f"nicps-{os.getpid()}-", dir=parent))
    folder.chmod(0o755)
    return folder


def new_job_id(name: str) -> str:
    """A run's name: time and job."""
    safe = "".join(c if c.isalnum() or c in "-_" else "-" for c in name)
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{safe}-{os.urandom(2).hex()}"
