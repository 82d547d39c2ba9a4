"""An engine that loads what a level has: python -m tests.e2e.patient_engine

On a busy machine a load reaches its deadline of a quarter of a second now and then, or its level
has been so slow that computing is predicted to be faster; a test of what comes back cannot tell
that from a loss.
"""

from __future__ import annotations

import sys

import pytest

from engine.levels import loads
from engine.levels.load_choice import LevelPace
from engine.server.server import main

COMMAND = (sys.executable, "-m", "tests.e2e.patient_engine")
LOAD_S = 60.0
LOOK_MS = 60_000.0
"""For `engine.levels.look_ms`: by default the index has 20 ms, then the prompt is computed."""


def wait_for_loads(patch: pytest.MonkeyPatch) -> None:
    """Give each load a minute at least, and levels the pace that is expected of them."""
    patch.setattr(loads, "DEADLINE_S_MIN", LOAD_S)
    patch.setattr(LevelPace, "record_block", lambda *_: None)


if __name__ == "__main__":
    wait_for_loads(pytest.MonkeyPatch())
    main()
