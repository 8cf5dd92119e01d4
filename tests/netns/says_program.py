# SPDX-License-Identifier: Apache-2.0
"""Says which process has started it; for `tests/netns/test_warm.py`."""

import os

print(os.getppid(), "says", flush=True)
