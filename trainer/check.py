# SPDX-License-Identifier: Apache-2.0
"""What is wrong with a job or a script, as far as it shows at once: `nicps lab run` asks before it makes a lab."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer import script, startup
from trainer.errors import JobError
from trainer.job import Blame, load
from trainer.prepare import explain_files, files_of
from trainer.settings import Settings, merge


def check_job(folder: Path, overrides: Mapping[str, Any]) -> None:
    """The job is loaded only if it is for its own settings to say what these overrides are.

    Raises:
        JobError: the folder, job.py or a setting is wrong.
    """
    _check(folder, "job.py")
    try:
        merge(Settings(), overrides)
    except JobError:
        startup.import_torch()
        load(folder, overrides)


def check_script(folder: Path, name: str) -> None:
    """The same of a script.

    Raises:
        JobError: the folder or the script is wrong.
    """
    _check(folder, name, *script.FOLDER)


def _check(folder: Path, name: str, *about: str) -> None:
    """The folder can be sent, and that file in it is Python."""
    try:
        for _ in files_of(folder, *about):
            pass
        code = (folder / name).read_bytes()
    except OSError as error:
        raise JobError(explain_files(error, folder, Path(os.devnull))) from None
    with Blame(folder, name), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the program itself says them
        compile(code, str(folder / name), "exec", dont_inherit=True)
