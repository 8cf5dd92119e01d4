# SPDX-License-Identifier: Apache-2.0
"""`nicps join` on a host whose kernel refuses the program of stripes: the program has no end.

python refused_stripes.py PYTHON -P -m nicps join ...
"""

from __future__ import annotations

import sys
from dataclasses import replace

from nicps.cli import main
from nicps.dataplane.loader import Loaded
from nicps.startup import leave

_INSTRUCTION = 8  # bytes

_open = Loaded.open


def refused(loaded: Loaded, name: str) -> int:
    """Give the verifier a program whose last instruction is not `exit`."""
    program = loaded.later[name]
    loaded.later[name] = replace(program, code=program.code[:-_INSTRUCTION])
    return _open(loaded, name)


if __name__ == "__main__":
    Loaded.open = refused  # type: ignore[method-assign]
    leave(main(sys.argv[sys.argv.index("nicps") + 1 :]))
