"""Encoding of server-sent events. No event has empty data, because clients fail to parse one."""

from __future__ import annotations

CONTENT_TYPE = "text/event-stream; charset=utf-8"
KEEP_ALIVE = b": keep-alive\n\n"
"""A comment, which keeps the connection open and which clients skip."""


def event(data: bytes, name: str = "") -> bytes:
    """Return the bytes of one event. `data` is one line of JSON, so it needs no splitting."""
    assert data, "event has no data"
    assert b"\n" not in data, "event data spans several lines"
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + data + b"\n\n"
