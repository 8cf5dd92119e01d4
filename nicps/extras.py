# SPDX-License-Identifier: Apache-2.0
"""The packages that only parts of nicps import: which extra of nicps has each.

`pip install nicps` brings none of them. They are imported where they are used; who runs a command (`nicps.cli`,
`trainer`) turns the ModuleNotFoundError into one line with the command that installs them.
"""

from __future__ import annotations

import importlib.util
import sys

from nicps.errors import EnvironmentProblem

#: Modules, and the extra of pyproject.toml that brings each.
EXTRAS = {
    "cryptography": "crypto",
    "dpkt": "captures",
    "numba": "train",
    "prometheus_client": "metrics",
    "pyspark": "spark",
    "rich": "top",
    "safetensors": "train",
    "sklearn": "train",
    "tensorboardX": "tensorboard",
    "thrift": "switch",
    "torch": "train",
    "xxhash": "train",
}

#: The PyTorch that nicps is tested with. Hosts of one network need the same: another one may round differently.
TESTED_TORCH = "2.13"


def install_command(extra: str) -> str:
    """What installs an extra for this interpreter."""
    return f"{sys.executable} -m pip install 'nicps[{extra}]'"


def missing_extra(error: ModuleNotFoundError) -> EnvironmentProblem | None:
    """What to raise in place of an import error: None where the module is of no extra of ours."""
    module = (error.name or "").partition(".")[0]
    if module not in EXTRAS:
        return None
    return EnvironmentProblem(
        f"the Python package {module} is not installed: {install_command(EXTRAS[module])}"
    )


def require_extra(module: str) -> None:
    """See to it that a module of an extra can be imported, before a process is started that imports it.

    Raises:
        EnvironmentProblem: it is not installed.
    """
    if importlib.util.find_spec(module) is None:
        error = missing_extra(ModuleNotFoundError(name=module))
        assert error is not None, f"{module} is of no extra"
        raise error
