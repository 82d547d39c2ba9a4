"""An engine whose loads have a minute at least: python -m tests.e2e.patient_engine

On a busy machine a load reaches its deadline of a quarter of a second now and then, and the rest is
computed; a test of what comes back cannot tell that from a loss.
"""

from __future__ import annotations

import sys

from engine.levels import loads
from engine.server.server import main

COMMAND = (sys.executable, "-m", "tests.e2e.patient_engine")
LOAD_S = 60.0


def wait_for_loads() -> None:
    """Give each load of this process a minute at least."""
    loads.DEADLINE_S_MIN = LOAD_S


if __name__ == "__main__":
    wait_for_loads()
    main()
