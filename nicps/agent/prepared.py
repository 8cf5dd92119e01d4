# SPDX-License-Identifier: Apache-2.0
"""prepared.json: a job's settings, files and model, as its preparation leaves them and as they are handed out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson

from nicps.agent.records import read_object
from nicps.errors import JobFailed

NAME = "prepared.json"
_MOST_BYTES = 16 << 20


def read_prepared(folder: Path) -> dict[str, Any]:
    """Read it, once: the folder is the training user's, who can replace the file later.

    Raises:
        JobFailed: it is missing, or not readable.
    """
    try:
        prepared = read_object(folder / NAME, _MOST_BYTES)
        orjson.dumps(
            prepared
        )  # which refuses JSON that is nested too deeply: no message could hold it
        return prepared
    except (OSError, orjson.JSONDecodeError, orjson.JSONEncodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise JobFailed(f"there is no readable {NAME}: {reason}") from None
