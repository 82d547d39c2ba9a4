"""`trunkline` that parts every long prompt: python -m tests.crash.parting_server serve

Two engines on the same cores win nothing by it, so no server would.
"""

from __future__ import annotations

import sys
from unittest.mock import patch

from gateway.__main__ import main
from gateway.routing import router

PROGRAM = (sys.executable, "-m", "tests.crash.parting_server")

if __name__ == "__main__":
    with patch.object(router, "APART_FACTOR", 0.0):
        sys.exit(main())
