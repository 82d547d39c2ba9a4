"""`trunkline` whose engines are patient ones: python -m tests.e2e.patient_server serve"""

from __future__ import annotations

import sys
from functools import partial
from unittest.mock import patch

from gateway.__main__ import main
from gateway.engines.composition import own_engine
from tests.e2e.patient_engine import COMMAND

if __name__ == "__main__":
    with patch("gateway.engines.composition.own_engine", partial(own_engine, command=COMMAND)):
        sys.exit(main())
