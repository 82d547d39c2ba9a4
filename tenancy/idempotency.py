"""Requests that their clients have named, so that sending one again is not another request: which
of them run, and what was answered, for a time.

A name (`Idempotency-Key`) belongs to its tenant. It is claimed in the transaction that writes the
hold; the answer is kept in the one that writes the entry, or the name is free again. Answers are
content: they have a table of their own, are bytes to it, and go with their tenant's cache. It knows
no HTTP; `bookkeeping` claims and settles, `gateway.named` finds.
"""

from __future__ import annotations

from collections import Counter

from msgspec import Struct

from tenancy.errors import NameInUse
from tenancy.store import Store, Transaction

SWEPT_AT_ONCE = 200
"""Names that one transaction lets go of: nobody waits long behind it."""


class Claim(Struct, frozen=True):
    """What a request is called, and what it is. `digest`: of all that makes it this request and no
    other. `names_max`: how many names its tenant may have at once."""

    name: str
    digest: bytes
    names_max: int


class KeptAnswer(Struct, frozen=True):
    """A whole answer. `head` and `body` are the gateway's."""

    head: str
    body: bytes


class Keeping(Struct, frozen=True):
    """What becomes of a named request that was answered. `answer`: None for one that is too large.
    `bytes_max`: what the bodies of its tenant may come to."""

    until_ms: int
    bytes_max: int
    answer: KeptAnswer | None


def find(store: Store, tenant_id: int, claim: Claim, now_ms: int) -> KeptAnswer | None:
    """What was answered to this request; None where its name is free. O(log names). Raises
    NameInUse for all that is neither, and StoreError."""
    rows = store.query(
        "select digest, until_ms, head, body from named_requests where tenant_id = ? and name = ?"
        " and (until_ms is null or until_ms > ?)",
        (tenant_id, claim.name, now_ms),
    )
    if not rows:
        return None
    digest, until_ms, head, body = rows[0]
    _check(claim, bytes(digest), is_running=until_ms is None)
    if body is None:
        raise NameInUse(
            "idempotency_result_gone",
            "This request was answered, and the answer was too large to be kept. It will not run a"
            " second time under this Idempotency-Key; use another to have it run again.",
        )
    return KeptAnswer(head, bytes(body))


def refusal(db: Transaction, tenant_id: int, claim: Claim, now_ms: int) -> NameInUse | None:
    """Why a hold may not have the name now. What has expired under it goes."""
    for digest, until_ms, request_id in db.rows(
        "select digest, until_ms, request_id from named_requests where tenant_id = ? and name = ?",
        (tenant_id, claim.name),
    ):
        if until_ms is not None and until_ms <= now_ms:
            _release(db, request_id)
            continue
        try:
            _check(claim, bytes(digest), is_running=True)  # or ended a moment ago: look again
        except NameInUse as error:
            return error
    names, _ = _sums(db, tenant_id)
    if names >= claim.names_max:
        return NameInUse(
            "idempotency_room_full",
            f"{names} Idempotency-Keys are in use; at most {claim.names_max} are kept at once. Send"
            " it without one, or later.",
        )
    return None


def take(db: Transaction, tenant_id: int, workspace: str, request_id: str, claim: Claim) -> None:
    """The name is this request's, which runs from now on: after a `refusal` that was none."""
    db.execute(
        "insert into named_requests (tenant_id, name, workspace, digest, request_id)"
        " values (?, ?, ?, ?, ?)",
        (tenant_id, claim.name, workspace, claim.digest, request_id),
    )
    _add(db, tenant_id, 1, 0)


def settle(db: Transaction, request_id: str, keeping: Keeping | None) -> None:
    """It has ended: answered, or its name is free. Again it changes nothing, and nothing is kept of
    what was forgotten while it ran."""
    running = db.rows(
        "select tenant_id from named_requests where request_id = ? and until_ms is null",
        (request_id,),
    )
    if running and keeping is None:
        _release(db, request_id)
    elif running and keeping is not None:
        _keep(db, running[0][0], request_id, keeping)


def _keep(db: Transaction, tenant_id: int, request_id: str, keeping: Keeping) -> None:
    head, body = "", None
    if keeping.answer is not None:
        size = len(keeping.answer.body)
        if _sums(db, tenant_id)[1] + size <= keeping.bytes_max:
            head, body = keeping.answer.head, keeping.answer.body
            _add(db, tenant_id, 0, size)
    db.execute(
        "update named_requests set until_ms = ?, head = ?, body = ? where request_id = ?",
        (keeping.until_ms, head, body, request_id),
    )


def _release(db: Transaction, request_id: str) -> None:
    """Its name is free."""
    _count_out(
        db,
        db.rows(f"delete from named_requests where request_id = ? {_RETURNING}", (request_id,)),
    )


def forget(db: Transaction, tenant_id: int, workspace: str | None = None) -> None:
    """A tenant's names and answers, or its workspace's, go at once; what runs is not kept later.
    O(its names)."""
    _count_out(
        db,
        db.rows(
            "delete from named_requests where tenant_id = ?1"
            f" and (cast(?2 as text) is null or workspace = ?2) {_RETURNING}",
            (tenant_id, workspace),
        ),
    )


def forget_answers(store: Store, tenant_id: int, workspace: str | None = None) -> None:
    """`forget` in a transaction of its own. Raises StoreError."""
    with store.change() as db:
        forget(db, tenant_id, workspace)


def sweep(store: Store, now_ms: int) -> bool:
    """Let go of some that have expired; is there more? One small transaction. Raises StoreError."""
    with store.change() as db:
        gone = db.rows(
            "delete from named_requests where request_id in (select request_id from named_requests"
            f" where until_ms <= ? order by until_ms limit ?) {_RETURNING}",
            (now_ms, SWEPT_AT_ONCE),
        )
        _count_out(db, gone)
    return len(gone) == SWEPT_AT_ONCE


def _check(claim: Claim, digest: bytes, *, is_running: bool) -> None:
    if digest != claim.digest:
        raise NameInUse(
            "idempotency_key_reused",
            "This Idempotency-Key was used for another request. The same key is for the same"
            " request only: its path, its body and its workspace.",
        )
    if is_running:
        raise NameInUse(
            "idempotency_in_flight",
            "The request with this Idempotency-Key is still running. Try again in a moment.",
        )


def _sums(db: Transaction, tenant_id: int) -> tuple[int, int]:
    """(names, bytes of bodies) that a tenant has."""
    rows = db.rows("select names, bytes from named_sums where tenant_id = ?", (tenant_id,))
    return (rows[0][0], rows[0][1]) if rows else (0, 0)


def _add(db: Transaction, tenant_id: int, names: int, size: int) -> None:
    moved = db.execute(
        "update named_sums set names = names + ?, bytes = bytes + ? where tenant_id = ?",
        (names, size, tenant_id),
    )
    if not moved:
        db.execute("insert into named_sums values (?, ?, ?)", (tenant_id, names, size))


def _count_out(db: Transaction, gone: list[tuple[int, int]]) -> None:
    names: Counter[int] = Counter()
    sizes: Counter[int] = Counter()
    for tenant_id, size in gone:
        names[tenant_id] += 1
        sizes[tenant_id] += size
    for tenant_id, count in names.items():
        _add(db, tenant_id, -count, -sizes[tenant_id])


_RETURNING = "returning tenant_id, coalesce(length(body), 0)"
