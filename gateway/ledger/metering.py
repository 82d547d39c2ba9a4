"""Convert the engine's usage to ledger items: one hold and one entry per request, however it ends.

The engine counts usage; this module only changes its form. The entry of a successful request is
durable before the response's last byte is sent: `gateway.generation` awaits `settle` first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from gateway.dialects.canonical import UsageRecord
from gateway.ledger.interface import LedgerClient
from tenancy.errors import BadPrice, BudgetExceeded, IdempotencyConflict
from tenancy.ledger.engine_counts import Counts
from tenancy.ledger.idempotency import Claim, ReplayRecord
from tenancy.ledger.transactions import Hold, NamedEntry
from tenancy.limits import NO_DEMAND, Demand
from tenancy.types import Identity, UsageEntry, WallClock


def note_progress(ledger: LedgerClient, notes: Mapping[str, UsageRecord]) -> None:
    """Record what running requests have delivered, by request id. Waits for nothing."""
    ledger.note_progress({request_id: record.counts() for request_id, record in notes.items()})


class LedgerReservation:
    """The hold and the entry of one request: opened at admission, settled once."""

    def __init__(
        self,
        ledger: LedgerClient,
        wall: WallClock,
        request_id: str,
        identity: Identity,
        model: str,
        *,
        most: Demand = NO_DEMAND,
        dialect: str = "",
        epoch: str = "",
        claim: Claim | None = None,
    ) -> None:
        """`most`: all prompt tokens, and the limit of output tokens. `epoch`: of the engine that
        will run the request. `claim`: on the client's idempotency key."""
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
        """Write the hold. The request may not run if this raises.

        Raises BudgetExceeded, IdempotencyConflict, BadPrice (the maximum price exceeds the largest
        charge): then nothing is left to settle. Raises LedgerUnavailable.
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
        *,
        epoch: str = "",
        uncounted: Mapping[str, Counts] | None = None,
    ) -> asyncio.Future[None]:
        """Write the entry and, for an idempotent request, the response to keep. A second call does
        nothing. `epoch`: of the engine that has finished the request, if that is another one.
        `uncounted`: by epoch, what the record has more of tokens than that engine has counted; ""
        is the hold's.

        The future is done when the entry is durable; a caller may work meanwhile, and a cancelled
        caller has settled, too. The future raises LedgerUnavailable: then the response must not be
        completed.
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
            workspace=hold.workspace,
            tier=hold.tier,
            dialect=hold.dialect,
            ttft_ms=None if first_token_s is None else round(first_token_s * 1000),
            epoch=epoch or hold.epoch,
            **record.counts().fields(),
        )
        if hold.claim is None and not uncounted:
            return self._ledger.write(entry)
        more = {epoch or hold.epoch: counts for epoch, counts in (uncounted or {}).items()}
        return self._ledger.write(NamedEntry(entry, replay, more))
