# SPDX-License-Identifier: Apache-2.0
"""`python -m trainer.dbn`: what `nicps dbn` starts, and spark-submit."""

from nicps.startup import leave
from trainer.dbn.cli import main

if __name__ == "__main__":
    leave(main())
