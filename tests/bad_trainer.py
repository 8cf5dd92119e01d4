# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.bad_trainer prepare --job CODE ...`: it reports an error, and ends with that code."""

import os
import signal
import sys

if __name__ == "__main__":
    code = int(sys.argv[sys.argv.index("--job") + 1])
    print("trainer: error: setting batch is 0", file=sys.stderr, flush=True)
    if code < 0:
        os.kill(os.getpid(), signal.Signals(-code))
    sys.exit(code)
