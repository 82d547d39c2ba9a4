"""The gateway's tiny model and a gateway, for tests of the overhead bench."""

from __future__ import annotations

from tests.unit.gateway.gateway_fixture import (
    card,
    fail_on_blocking_calls,
    gateway,
    unopened_gateway,
)

__all__ = ["card", "fail_on_blocking_calls", "gateway", "unopened_gateway"]
