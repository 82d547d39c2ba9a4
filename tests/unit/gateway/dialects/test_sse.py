"""Encoding of server-sent events."""

from __future__ import annotations

import pytest

from gateway.dialects import sse


def test_event_is_data_and_a_blank_line() -> None:
    """Clients split the stream by blank lines."""
    assert sse.event(b'{"a":1}') == b'data: {"a":1}\n\n'
    assert sse.event(b"{}", "ping") == b"event: ping\ndata: {}\n\n"


@pytest.mark.parametrize("data", [b"", b"two\nlines"])
def test_event_with_invalid_data_fails_an_assertion(data: bytes) -> None:
    """The official client decodes empty data as JSON and raises."""
    with pytest.raises(AssertionError):
        sse.event(data)


def test_keep_alive_is_a_comment() -> None:
    """Clients skip comments; an event without data would break them."""
    assert sse.KEEP_ALIVE.startswith(b":")
    assert sse.KEEP_ALIVE.endswith(b"\n\n")
