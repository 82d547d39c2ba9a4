"""Errors of a fleet: one class, whose message is one line for an operator."""

from __future__ import annotations


class FleetError(Exception):
    """What was asked of a fleet cannot be done; the message says what would be right."""
