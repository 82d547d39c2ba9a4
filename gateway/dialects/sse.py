"""Server-sent events: bytes of one event. Never an event with empty data: clients choke on it."""

from __future__ import annotations

CONTENT_TYPE = "text/event-stream; charset=utf-8"
KEEP_ALIVE = b": keep-alive\n\n"
"""A comment: kept connections open, and no client sees it."""


def event(data: bytes, name: str = "") -> bytes:
    """One event. `data` is one line of JSON, so it needs no splitting."""
    assert data, "an event without data"
    assert b"\n" not in data, "data of several lines"
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + data + b"\n\n"
