"""Server-sent events: one event a call, never an empty one."""

from __future__ import annotations

import pytest

from gateway.dialects import sse


def test_an_event_is_data_and_a_blank_line() -> None:
    """What every client splits by."""
    assert sse.event(b'{"a":1}') == b'data: {"a":1}\n\n'
    assert sse.event(b"{}", "ping") == b"event: ping\ndata: {}\n\n"


@pytest.mark.parametrize("data", [b"", b"two\nlines"])
def test_an_event_that_clients_choke_on_is_our_mistake(data: bytes) -> None:
    """The official client decodes empty data as JSON, and raises."""
    with pytest.raises(AssertionError):
        sse.event(data)


def test_a_keep_alive_is_a_comment() -> None:
    """Clients skip comments; an event without data would break them."""
    assert sse.KEEP_ALIVE.startswith(b":")
    assert sse.KEEP_ALIVE.endswith(b"\n\n")
