# SPDX-License-Identifier: Apache-2.0
"""`nicps join`, to which a signal comes at the moment from which on its socket answers.

python signalled_join.py NUMBER PYTHON -P -m nicps join ...
"""

from __future__ import annotations

import os
import sys
from typing import Any

from nicps.agent.control import ControlSocket
from nicps.cli import main
from nicps.startup import leave

_begin = ControlSocket.__init__


def signalled(control: ControlSocket, *arguments: Any) -> None:
    _begin(control, *arguments)
    os.kill(os.getpid(), int(sys.argv[1]))


if __name__ == "__main__":
    ControlSocket.__init__ = signalled  # type: ignore[method-assign]
    leave(main(sys.argv[sys.argv.index("nicps") + 1 :]))
