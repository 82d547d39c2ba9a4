"""From the engine's usage to the ledger: one hold, one entry, however a request ends.

Usage is counted by the engine; here it only changes its form. The entry of a successful answer is
durable before the answer's last byte is sent: `answer` awaits what `settle` returns first.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

from gateway.dialects.canonical import UsageRecord
from gateway.ledger.interface import LedgerClient
from tenancy.errors import BadPrice, BudgetExceeded, IdempotencyConflict
from tenancy.ledger.idempotency import Claim, ReplayRecord
from tenancy.ledger.progress import Progress
from tenancy.ledger.transactions import Hold, NamedEntry
from tenancy.limits import Demand
from tenancy.types import Identity, UsageEntry, WallClock

NOTHING = Demand(0, 0)


def wall_ms() -> int:
    """Milliseconds since the epoch: the ledger's clock."""
    return time.time_ns() // 1_000_000


def note_progress(ledger: LedgerClient, notes: Mapping[str, UsageRecord]) -> None:
    """Keep what open requests have delivered, by request id. Waits for nothing."""
    ledger.note_progress({request_id: _progress(record) for request_id, record in notes.items()})


def _progress(record: UsageRecord) -> Progress:
    return Progress(
        read=record.read,
        write=record.write,
        fresh_tokens=record.fresh,
        output_tokens=record.out,
        physical_cached_tokens=record.physical_cached,
        breached_tokens=record.breached_tokens,
    )


class LedgerReservation:
    """One request's place in the ledger: opened at admission, settled once."""

    def __init__(
        self,
        ledger: LedgerClient,
        wall: WallClock,
        request_id: str,
        identity: Identity,
        model: str,
        *,
        most: Demand = NOTHING,
        dialect: str = "",
        epoch: str = "",
        claim: Claim | None = None,
    ) -> None:
        """`most`: all prompt tokens and all the output that it may come to. `epoch`: the engine's
        life in which it will run. `claim`: on the name that its client gave it."""
        self._ledger = ledger
        self._wall = wall
        self._hold = Hold(
            request_id=request_id,
            tenant_id=identity.tenant.tenant_id,
            key_id=identity.key_id,
            model=model,
            started_ms=wall(),
            input_tokens=most.input_tokens,
            output_tokens=most.output_tokens,
            workspace=identity.workspace,
            tier=identity.tenant.tier,
            dialect=dialect,
            epoch=epoch,
            claim=claim,
        )
        self.is_open = False

    async def open(self) -> None:
        """Write the hold. If this raises, the request must not run.

        Raises BudgetExceeded, IdempotencyConflict, BadPrice (the maximum cost exceeds the largest
        charge) with nothing left to settle, and LedgerUnavailable.
        """
        self.is_open = True
        try:
            await self._ledger.write(self._hold)
        except (BudgetExceeded, BadPrice, IdempotencyConflict):
            self.is_open = False
            raise

    def settle(
        self,
        ending: str,
        record: UsageRecord,
        first_token_s: float | None = None,
        replay: ReplayRecord | None = None,
    ) -> asyncio.Future[None]:
        """Hand in the entry, and of a named request what is to be kept; a second call changes
        nothing.

        The future is done when it is durable, so there is time for other work meanwhile, and a
        cancelled caller has settled too. It raises LedgerUnavailable: the answer must not be
        completed then.
        """
        if not self.is_open:
            settled: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            settled.set_result(None)
            return settled
        self.is_open = False
        hold = self._hold
        entry = UsageEntry(
            request_id=hold.request_id,
            tenant_id=hold.tenant_id,
            key_id=hold.key_id,
            model=hold.model,
            ending=ending,
            started_ms=hold.started_ms,
            ended_ms=self._wall(),
            prompt_tokens=record.total_in,
            cache_read_tokens=record.read_tokens(),
            cache_write_tokens=record.write_tokens(),
            fresh_tokens=record.fresh,
            output_tokens=record.out,
            physical_cached_tokens=record.physical_cached,
            read=_some(record.read),
            write=_some(record.write),
            workspace=hold.workspace,
            tier=hold.tier,
            dialect=hold.dialect,
            recomputed_promised_tokens=record.breached_tokens,
            ttft_ms=None if first_token_s is None else round(first_token_s * 1000),
            epoch=hold.epoch,
        )
        item = entry if hold.claim is None else NamedEntry(entry, replay)
        return self._ledger.write(item)


def _some(classes: dict[str, int]) -> dict[str, int]:
    """Those of which there are tokens. Most answers have none at all."""
    return {name: tokens for name, tokens in classes.items() if tokens} if classes else classes
