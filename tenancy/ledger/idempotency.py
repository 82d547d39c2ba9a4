"""Idempotency keys: which named requests run, and the responses that those which ended replay.

A name (the `Idempotency-Key` header) belongs to its tenant. It is claimed in the transaction that
writes the hold; the transaction that writes the entry stores the response or frees the name.
Responses are content: they have their own table, are opaque bytes here, and are erased with the
tenant's cache. The module knows no HTTP. `transactions` claims and settles the names of a batch
together; `gateway.generation.idempotency` looks them up.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from msgspec import Struct

from tenancy.errors import IdempotencyConflict
from tenancy.storage.interface import (
    Row,
    Store,
    Transaction,
    Value,
    pad_to_power_of_two,
    placeholders,
)
from tenancy.storage.pieces import SWEPT_AT_ONCE, delete_all, first_piece
from tenancy.storage.tenant_sums import subtract

T = TypeVar("T")


class Claim(Struct, frozen=True):
    """A request's claim on a name."""

    name: str
    digest: bytes
    """The digest of everything that identifies the request."""
    names_max: int
    """How many names the tenant may have at once."""


class ReplayedResponse(Struct, frozen=True):
    """A complete response that is sent again. `head` and `body` have the gateway's encoding."""

    head: str
    body: bytes


class ReplayRecord(Struct, frozen=True):
    """What is stored for replays of a named request that was answered."""

    until_ms: int
    """Its expiry."""
    bytes_max: int
    """Bound on the tenant's stored bodies."""
    answer: ReplayedResponse | None
    """None if the response is too large to keep."""


def find(store: Store, tenant_id: int, claim: Claim, now_ms: int) -> ReplayedResponse | None:
    """Return the response to replay for this request, or None if its name is free. O(log names).

    Raises IdempotencyConflict if the name is neither free nor replayable, and StoreError.
    """
    rows = store.query(
        "select digest, until_ms, head, body from named_requests where tenant_id = ? and name = ?"
        " and (until_ms is null or until_ms > ?)",
        (tenant_id, claim.name, now_ms),
    )
    if not rows:
        return None
    digest, until_ms, head, body = rows[0]
    refusal = _conflict(claim, bytes(digest), is_running=until_ms is None)
    if refusal is not None:
        raise refusal
    if body is None:
        raise IdempotencyConflict(
            "idempotency_result_gone",
            "The response to this Idempotency-Key was too large to store. The request does not run"
            " again under the same key; expected another key.",
        )
    return ReplayedResponse(head, bytes(body))


@dataclass(slots=True)
class _NameRow:
    """A name within the transaction."""

    tenant_id: int
    name: str
    digest: bytes
    until_ms: int | None
    request_id: str
    size: int = 0
    """Bytes of its stored body."""
    answer: ReplayedResponse | None = None
    """Not written yet."""


class IdempotencyNames:
    """The names that requests of one transaction claim or settle.

    They are read together, changed in memory as items are applied, and written together, while the
    transaction holds the write lock.
    """

    def __init__(
        self, db: Transaction, claimed: Collection[tuple[int, str]], ended: Collection[str]
    ) -> None:
        """Read the names. `claimed`: tenant ids and names. `ended`: request ids.

        One statement for every 64 names or 128 ids, and one for the sums of their tenants.
        """
        self._has_names = bool(claimed or ended)
        if not self._has_names:
            return  # most batches name no request
        self._db = db
        self._by_name: dict[tuple[int, str], _NameRow] = {}
        self._by_request: dict[str, _NameRow] = {}
        self._made: dict[str, tuple[Value, ...]] = {}
        self._released: list[tuple[str]] = []
        self._kept: dict[str, _NameRow] = {}
        self._moved: set[int] = set()
        self._sums: dict[int, tuple[int, int]] = {}
        self._active: set[int] = set()
        for keys in _chunks(claimed, 64):
            which = f"(tenant_id, name) in (values {', '.join([placeholders(2)] * len(keys))})"
            self._read(which, [value for key in keys for value in key])
        for ids in _chunks(ended, 128):
            self._read(f"request_id in {placeholders(len(ids))}", ids)
        tenants = {key[0] for key in (*claimed, *self._by_name)}
        for some in _chunks(tenants, 128):
            for tenant_id, is_active, names, size in db.rows(
                _SELECT_SUMS + placeholders(len(some)), some
            ):
                self._sums[tenant_id] = names, size
                if is_active:
                    self._active.add(tenant_id)

    def refusal(self, tenant_id: int, claim: Claim, now_ms: int) -> IdempotencyConflict | None:
        """Return why a hold may not claim the name now, or None. An expired name is released."""
        found = self._by_name.get((tenant_id, claim.name))
        if found is not None and (found.until_ms is None or found.until_ms > now_ms):
            # A request that has just ended is found by the client's next attempt.
            return _conflict(claim, found.digest, is_running=True)
        if found is not None:
            self._release(found)
        names, _ = self._sums.get(tenant_id, (0, 0))
        if names >= claim.names_max:
            return IdempotencyConflict(
                "idempotency_room_full",
                f"Too many Idempotency-Keys in use: {names}; limit {claim.names_max}. Retry later"
                " or without a key.",
            )
        return None

    def take(self, tenant_id: int, workspace: str, request_id: str, claim: Claim) -> None:
        """Claim the name for a request, after `refusal` returned None.

        Nothing is stored if the tenant was suspended or deleted since the request was
        authenticated.
        """
        if tenant_id not in self._active:
            return
        self._put(_NameRow(tenant_id, claim.name, claim.digest, None, request_id))
        self._made[request_id] = (tenant_id, claim.name, workspace, claim.digest, request_id)
        self._count(tenant_id, 1, 0)

    def settle(self, request_id: str, keeping: ReplayRecord | None) -> None:
        """Store the response of an ended request, or free its name.

        A repeated call changes nothing, and nothing is stored for a name that was erased meanwhile.
        """
        found = self._by_request.get(request_id)
        if found is None or found.until_ms is not None:
            return
        if keeping is None:
            self._release(found)
            return
        found.until_ms = keeping.until_ms
        _, size = self._sums.get(found.tenant_id, (0, 0))
        if keeping.answer is not None and size + len(keeping.answer.body) <= keeping.bytes_max:
            found.answer, found.size = keeping.answer, len(keeping.answer.body)
            self._count(found.tenant_id, 0, found.size)
        self._kept[request_id] = found

    def finish(self) -> None:
        """Write the changes."""
        if not self._has_names:
            return
        self._db.execute_many("delete from named_requests where request_id = ?", self._released)
        self._db.execute_many(_INSERT_NAMES, list(self._made.values()))
        kept = []
        for request_id, one in self._kept.items():
            answer = one.answer
            head, body = ("", None) if answer is None else (answer.head, answer.body)
            kept.append((one.until_ms, head, body, request_id))
        self._db.execute_many(_STORE_RESPONSES, kept)
        sums = [(tenant_id, *self._sums[tenant_id]) for tenant_id in sorted(self._moved)]
        self._db.execute_many(_WRITE_SUMS, sums)

    def _read(self, which: str, values: Sequence[Value]) -> None:
        for tenant_id, name, digest, until_ms, request_id, size in self._db.rows(
            "select tenant_id, name, digest, until_ms, request_id, coalesce(length(body), 0)"
            f" from named_requests where {which}",
            values,
        ):
            self._put(_NameRow(tenant_id, name, bytes(digest), until_ms, request_id, size))

    def _put(self, one: _NameRow) -> None:
        self._by_request[one.request_id] = self._by_name[one.tenant_id, one.name] = one

    def _release(self, one: _NameRow) -> None:
        """Free a name."""
        del self._by_name[one.tenant_id, one.name], self._by_request[one.request_id]
        self._made.pop(one.request_id, None)
        self._released.append((one.request_id,))
        self._count(one.tenant_id, -1, -one.size)

    def _count(self, tenant_id: int, names: int, size: int) -> None:
        before = self._sums.get(tenant_id, (0, 0))
        self._sums[tenant_id] = before[0] + names, before[1] + size
        self._moved.add(tenant_id)


_INSERT_NAMES = (
    "insert into named_requests (tenant_id, name, workspace, digest, request_id)"
    " values (?, ?, ?, ?, ?)"
)
_STORE_RESPONSES = "update named_requests set until_ms = ?, head = ?, body = ? where request_id = ?"
_SELECT_SUMS = (
    "select tenants.tenant_id, status = 'active', coalesce(names, 0), coalesce(bytes, 0) from"
    " tenants left join named_sums on named_sums.tenant_id = tenants.tenant_id"
    " where tenants.tenant_id in "
)
_WRITE_SUMS = (
    "insert into named_sums (tenant_id, names, bytes) values (?, ?, ?)"
    " on conflict (tenant_id) do update set names = excluded.names, bytes = excluded.bytes"
)


def _chunks(asked: Collection[T], count: int) -> Iterator[list[T]]:
    """Yield chunks of up to `count` items, padded to few different lengths."""
    rest = list(asked)
    for first in range(0, len(rest), count):
        yield pad_to_power_of_two(rest[first : first + count])


def forget(db: Transaction, tenant_id: int, workspace: str | None = None) -> None:
    """Delete the names and responses of a tenant, or of one workspace. O(names).

    Requests that still run are not stored at their end.
    """
    deleted = db.rows(
        f"delete from named_requests where {_OF_OWNER} {_RETURNING}", (tenant_id, workspace)
    )
    subtract(db, "named_sums", "names", deleted)


def forget_answers(store: Store, tenant_id: int, workspace: str | None = None) -> None:
    """Delete what `forget` does, in small transactions. Raises StoreError."""
    delete_all(store, lambda db: _delete_some(db, _OF_OWNER, (tenant_id, workspace)))


def sweep(store: Store, now_ms: int) -> bool:
    """Delete some expired names in one small transaction. Returns whether there may be more. Raises
    StoreError."""
    with store.change() as db:
        return _delete_some(db, "until_ms <= ?1", (now_ms,))


def _delete_some(db: Transaction, where: str, values: Row) -> bool:
    """Delete as many names as one transaction may; return whether there may be more."""
    found = db.rows(
        f"select request_id, coalesce(length(body), 0) from named_requests where {where}"
        f" order by until_ms limit {SWEPT_AT_ONCE + 1:d}",
        values,
    )
    ids = first_piece(found)
    if ids:
        deleted = db.rows(
            f"delete from named_requests where request_id in {placeholders(len(ids))} {_RETURNING}",
            ids,
        )
        subtract(db, "named_sums", "names", deleted)
    return len(found) > len(ids)


def _conflict(claim: Claim, digest: bytes, *, is_running: bool) -> IdempotencyConflict | None:
    if digest != claim.digest:
        return IdempotencyConflict(
            "idempotency_key_reused",
            "This Idempotency-Key was used for another request; expected the same path, body and"
            " workspace.",
        )
    if is_running:
        return IdempotencyConflict(
            "idempotency_in_flight",
            "The request with this Idempotency-Key is still running; retry in a moment.",
        )
    return None


_OF_OWNER = "tenant_id = ?1 and (cast(?2 as text) is null or workspace = ?2)"
_RETURNING = "returning tenant_id, coalesce(length(body), 0)"
