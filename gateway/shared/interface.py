"""The state that several gateways share: how much of their limits tenants and keys have used.

A call belongs to two accounts, its tenant's and its line of keys'. A `Change` says what a request
takes of both from now on; all of it is taken, or nothing. It is keyed by the request, so a change
that comes twice counts once. `valkey` does it in one script.
"""

from __future__ import annotations

from typing import Literal, Protocol

from msgspec import Struct

Counts = tuple[int, int, int, int]
"""Requests, tokens, input and output tokens: the order of `tenancy.limits.METERS`."""
AccountLimits = tuple[int, int, int, int, int]
"""The limits a minute of these, and the requests at once; 0 for none."""

LEASE_S = 60.0
"""How long a running request counts without a renewal: the places of a dead gateway come back."""
REQUEST_S = 600.0
"""How long a request is known, so that a change of it that comes twice counts once."""
TOKEN_MS = 60_000
"""A token of a limit a minute in token-milliseconds, the unit of debts: exact integers."""


class SharedAway(Exception):
    """The shared state does not answer."""


class Account(Struct, frozen=True):
    """An account of a call."""

    name: str
    limits: AccountLimits


class Change(Struct, frozen=True):
    """What a request takes from now on.

    `take`: its place, and a request of the minute. `extend`: these counts, if every limit has room.
    `correct`: these counts, whether or not. `settle`: these, and its place is free.
    """

    kind: Literal["take", "extend", "correct", "settle"]
    request_id: str
    accounts: tuple[Account, Account]
    counts: Counts


class Standing(Struct, frozen=True):
    """The accounts after a change, or as they are where it does not fit."""

    fits: bool
    owed: tuple[Counts, Counts]
    """Token-milliseconds until each limit is free again, by account."""
    running: tuple[int, int]
    """Requests at once, by account, over all gateways."""


class SharedLimits(Protocol):
    """The limits that gateways share. Belongs to one event loop."""

    @property
    def is_away(self) -> bool:
        """Whether each gateway has a part of the limits for itself now."""

    @property
    def gateways(self) -> int:
        """How many gateways were seen in the last minute: 1 or more."""

    async def change(self, change: Change) -> Standing:
        """Change the accounts. Raises SharedAway."""

    def note(self, change: Change) -> None:
        """Change the accounts soon, in order with other changes; lost where the state is away."""
