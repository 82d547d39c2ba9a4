"""The smoke test's request: one token, of no tenant, that reads and leaves nothing in the cache.

The service computes it before the engine is ready. Core repeats it where steps in a row give no
sequence a token, which may be one request's fault or the device's.
"""

from __future__ import annotations

from typing import Final

from engine.api import CacheGrant, Request, Sampling

SMOKE_TEST_ID: Final = "canary"

BARREN_STEPS_MAX: Final = 5
"""Steps in a row that failed, or all of whose sequences did, after which core repeats the test."""


def smoke_test_request() -> Request:
    """Return the request. Its step contains no other, whose fault might look like the engine's."""
    grant = CacheGrant(b"", read=False, write=False)
    return Request(SMOKE_TEST_ID, (0,), 1, grant, Sampling(temperature=0), isolated_tokens=1)
