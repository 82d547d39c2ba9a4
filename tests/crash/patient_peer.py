"""An engine that waits for its peers and its loads: python -m tests.crash.patient_peer

On a busy machine a fetch reaches its deadline of a quarter of a second now and then.
"""

from __future__ import annotations

import sys

import pytest

from engine.levels.peers import fetching, near_fetching
from engine.server.server import main
from tests.e2e.patient_engine import wait_for_loads

COMMAND = (sys.executable, "-m", "tests.crash.patient_peer")
FETCH_S = 5.0


if __name__ == "__main__":
    patch = pytest.MonkeyPatch()
    wait_for_loads(patch)
    for module in (fetching, near_fetching):
        patch.setattr(module, "FETCH_S_MIN", FETCH_S)
    main()
