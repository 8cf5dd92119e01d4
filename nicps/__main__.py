# SPDX-License-Identifier: Apache-2.0
"""`python -m nicps` is the `nicps` command."""

import sys

from nicps.cli import main

if __name__ == "__main__":
    sys.exit(main())
