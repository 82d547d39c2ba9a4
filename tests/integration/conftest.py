"""A gateway on a loopback port over the real core and the fake runner, one per test."""

from __future__ import annotations

from tests.unit.gateway.gateway_fixture import (
    at_noon,
    card,
    fail_on_blocking_calls,
    gateway,
    no_periodic_tasks,
    room_for_tools,
    room_for_turns,
    unopened_gateway,
)

__all__ = [
    "at_noon",
    "card",
    "fail_on_blocking_calls",
    "gateway",
    "no_periodic_tasks",
    "room_for_tools",
    "room_for_turns",
    "unopened_gateway",
]
