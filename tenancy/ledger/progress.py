"""Progress of open requests: what each is settled to if its server dies now.

Progress is stored in the hold, so settlement deletes it in the same transaction. The gateway counts
only what the engine computed and the client's socket accepted. The module knows no prices.
`transactions` writes progress; `writer` closes dead holds by it.
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
"""The columns of open holds that `interrupted` needs.

The progress of a named request is left out: its client sends it again and pays then, never twice
under one name.
"""

Count = Annotated[int, Meta(ge=0)]
"""A count of tokens, at least 0."""


class Progress(Struct, frozen=True, array_like=True):
    """The usage of one request so far: the counts of an entry, without sums."""

    read: dict[str, Count] = {}
    write: dict[str, Count] = {}
    fresh_tokens: Count = 0
    output_tokens: Count = 0
    physical_cached_tokens: Count = 0
    breached_tokens: Count = 0


class ProgressNote(Struct, frozen=True, tag="progress"):
    """Progress of requests since the last note, by request id."""

    reached: Mapping[str, Progress]


def write_progress(db: Transaction, reached: Mapping[str, Progress]) -> None:
    """Store progress in the requests' holds, all in one statement; ids without a hold are
    ignored."""
    rows = [(msgspec.msgpack.encode(one), request_id) for request_id, one in reached.items()]
    db.execute_many("update holds set progress = ? where request_id = ?", rows)


def interrupted(hold: Row, now_ms: int) -> UsageEntry:
    """Return the entry of a hold whose server died, from a row of `OPEN_HOLDS`.

    Its usage is the noted progress, or nothing. It ends when it is closed, as the engine's counts
    were queried before that.
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
        recomputed_promised_tokens=done.breached_tokens,
        epoch=epoch,
    )


def _decode(blob: bytes | None) -> Progress:
    """Decode progress; an unreadable blob is no progress, so a start does not fail."""
    if blob is not None:
        with suppress(msgspec.MsgspecError):
            return msgspec.msgpack.decode(bytes(blob), type=Progress)
    return Progress()
