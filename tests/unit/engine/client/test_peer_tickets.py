"""Tickets: each thing that one is good for, changed."""

from __future__ import annotations

import pytest

from engine.client.peer_tickets import SKEW_S, TICKET_S, is_valid_ticket, sign_ticket
from engine.protocol import pack_tokens

KEY, OTHER_KEY = bytes(32), bytes([1]) * 32
IDS = pack_tokens(range(40))
NOW_S = 1_000.0


def is_valid(ticket: bytes, **changed: object) -> bool:
    use = {"keys": (OTHER_KEY, KEY), "namespace": b"n", "token_ids": IDS, "reader": "e1"}
    return is_valid_ticket(ticket=ticket, **{**use, "now_s": NOW_S, **changed})  # type: ignore[arg-type]


def test_a_ticket_is_good_for_what_it_names() -> None:
    """Under any key of the gateways that are connected, for 30 seconds."""
    ticket = sign_ticket(KEY, b"n", IDS, "e1", NOW_S)
    assert is_valid(ticket)
    assert is_valid(ticket, now_s=NOW_S + TICKET_S - 1)


@pytest.mark.parametrize(
    "changed",
    [
        {"keys": (OTHER_KEY,)},
        {"keys": ()},
        {"namespace": b"m"},
        {"token_ids": pack_tokens(range(39))},
        {"token_ids": pack_tokens(range(1, 41))},
        {"reader": "e2"},
        {"now_s": NOW_S + TICKET_S},
        {"now_s": NOW_S - SKEW_S - 1},
    ],
    ids=lambda changed: "-".join(changed),
)
def test_a_ticket_is_good_for_nothing_else(changed: dict[str, object]) -> None:
    """Each of these would give a prefix to somebody who may not have it."""
    assert not is_valid(sign_ticket(KEY, b"n", IDS, "e1", NOW_S), **changed)


def test_no_byte_of_a_ticket_may_differ() -> None:
    """Also the end of its time is signed, and where a namespace ends and a name begins."""
    ticket = sign_ticket(KEY, b"n", IDS, "e1", NOW_S)
    for place in range(len(ticket)):
        other = ticket[:place] + bytes([ticket[place] ^ 1]) + ticket[place + 1 :]
        assert not is_valid(other)
        assert not is_valid(ticket[:place])
    assert not is_valid(sign_ticket(KEY, b"ne", IDS, "1", NOW_S))
