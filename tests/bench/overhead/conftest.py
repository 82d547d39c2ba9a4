"""The gateway's tiny model, for the overhead bench's own tests."""

from __future__ import annotations

from tests.unit.gateway.gateway_fixture import card, fail_on_blocking_calls

__all__ = ["card", "fail_on_blocking_calls"]
