"""How far open requests have come: what each is settled to if its server dies now.

Kept in the hold itself, so that it goes when the hold is settled, in the same transaction. Who
notes progress counts only what the engine computed and the client's socket took. It knows no
prices; `bookkeeping` writes it, `ledger` closes dead holds by it.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from tenancy.storage.interface import Row, Transaction
from tenancy.types import UsageEntry

OPEN_HOLDS = (
    "select request_id, writer_id, tenant_id, key_id, model, started_ms, workspace, tier, dialect,"
    " epoch, case when request_id in (select request_id from named_requests) then null"
    " else progress end from holds"
)
"""What `interrupted` needs of each. A client that has named its request will send it again, and
pays then: never twice under one name."""

Count = Annotated[int, Meta(ge=0)]


class Progress(Struct, frozen=True, array_like=True):
    """What one request has used so far: an entry's counts, of which the sums are left out."""

    read: dict[str, Count] = {}
    write: dict[str, Count] = {}
    fresh_tokens: Count = 0
    output_tokens: Count = 0
    physical_cached_tokens: Count = 0
    recomputed_promised_tokens: Count = 0


class ProgressNote(Struct, frozen=True, tag="progress"):
    """How far some requests have come since the note before, by request id."""

    reached: Mapping[str, Progress]


def write_progress(db: Transaction, reached: Mapping[str, Progress]) -> None:
    """Keep it in their holds, all at once; nothing for those that have none."""
    rows = [(msgspec.msgpack.encode(one), request_id) for request_id, one in reached.items()]
    db.execute_many("update holds set progress = ? where request_id = ?", rows)


def interrupted(hold: Row, now_ms: int) -> UsageEntry:
    """The entry of a hold (of `OPEN_HOLDS`) whose server died: what was noted of it, or nothing.

    It ends when it is closed: what the engine had counted by then was asked for before.
    """
    request_id, _, tenant_id, key_id, model, started_ms, workspace, tier, dialect, epoch = hold[:-1]
    done = _decode(hold[-1])
    read_tokens, write_tokens = sum(done.read.values()), sum(done.write.values())
    return UsageEntry(
        request_id=request_id,
        tenant_id=tenant_id,
        key_id=key_id,
        model=model,
        ending="interrupted",
        started_ms=started_ms,
        ended_ms=now_ms,
        prompt_tokens=read_tokens + write_tokens + done.fresh_tokens,
        cache_read_tokens=read_tokens,
        cache_write_tokens=write_tokens,
        fresh_tokens=done.fresh_tokens,
        output_tokens=done.output_tokens,
        physical_cached_tokens=done.physical_cached_tokens,
        read=done.read,
        write=done.write,
        workspace=workspace,
        tier=tier,
        dialect=dialect,
        recomputed_promised_tokens=done.recomputed_promised_tokens,
        epoch=epoch,
    )


def _decode(blob: bytes | None) -> Progress:
    """What cannot be read is nothing: a start must not fail by it."""
    if blob is not None:
        with suppress(msgspec.MsgspecError):
            return msgspec.msgpack.decode(bytes(blob), type=Progress)
    return Progress()
