# SPDX-License-Identifier: Apache-2.0
"""The jobs that ship with nicps: MNIST, and scikit-learn's digits for where MNIST is not found."""

from __future__ import annotations

import os
from pathlib import Path

from trainer.idx import find

HERE = Path(__file__).resolve().parent
MNIST_FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)


def default_job(data: str | None = None) -> Path:
    """The folder of the job to run: mnist where any of its files is found, else digits.

    Args:
        data: the data folder; default: the environment's NICPS_DATA.
    """
    folder = data or os.environ.get("NICPS_DATA")
    found = any(find(folder, name) is not None for name in MNIST_FILES)
    return HERE / ("mnist" if found else "digits")
