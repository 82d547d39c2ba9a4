"""What came of an answer, told once to everybody who counts.

    engine's usage ─ count: what it took, however it ends ─ tell: how it ended

What it took is counted in the turn of the loop in which its entry is handed to the ledger, and so
while that is being written: limits, contracts, metrics and the request's own line. How it ended is
known later; analytics is told then. It knows no HTTP and no ledger. `answer` makes one for each
call that was admitted.
"""

from __future__ import annotations

from collections.abc import Sequence

from gateway.analytics.aggregates import Facts
from gateway.context import Context
from gateway.dialects.canonical import UsageRecord
from gateway.generation.output_stream import OutputStream
from gateway.generation.preparation import Prepared
from gateway.generation.rate_limits import truth
from gateway.generation.usage import added
from gateway.http.request_context import RequestState
from tenancy.limits import Reservation


class Outcome:
    """Of one call. Whoever leaves twice has his request reported before its end: so its tokens are
    counted here, with its entry, and not there."""

    def __init__(
        self, gateway: Context, state: RequestState, made: Prepared, reservation: Reservation
    ) -> None:
        self._gateway = gateway
        self._state = state
        self._made = made
        self._reservation = reservation
        self._records: Sequence[UsageRecord] | None = None
        identity = state.identity
        assert identity is not None, "answers have an owner"
        self._tenant = identity.tenant.name

    def count(self, answer: OutputStream) -> Sequence[UsageRecord]:
        """What it took, prompt by prompt; a second call changes nothing. Changes: its reservation,
        its contracts, metrics, and what its line in the log will say."""
        if self._records is not None:
            return self._records
        self._records = records = answer.records_so_far()
        usage, state, telemetry = added(records), self._state, self._gateway.telemetry
        self._reservation.settle(truth(usage))
        state.prompt_tokens = usage.total_in
        state.cached_tokens = usage.physical_cached
        state.cache_read_tokens = usage.read_tokens()
        state.cache_write_tokens = usage.write_tokens()
        state.output_tokens = usage.out
        state.first_token_s = answer.first_token_s
        tenant = telemetry.tenant_label(self._tenant)
        tokens = usage.total_in, usage.physical_cached, usage.out
        telemetry.tokens.add(tenant, *tokens)
        telemetry.count_epoch(state.epoch, *tokens, answer.unneeded_tokens)
        telemetry.output_format_violations.add(answer.format_violations)
        for contract in self._made.contracts:
            contract.finish(state.response_id)
        for contract, record in zip(self._made.contracts, records, strict=False):
            telemetry.contract_tokens.add(
                tenant, record.read_tokens(), record.write_tokens(), record.breached_tokens
            )
            if missed := contract.why_missed():
                telemetry.misses.add(1, missed)
        return records

    def tell(self, answer: OutputStream, ending: str) -> None:
        """How it ended, and what it took where that has not been counted."""
        made, records = self._made, self.count(answer)
        prompts = zip(made.contracts, records, made.rendered, strict=False)
        for number, (contract, record, prompt) in enumerate(prompts):
            self._gateway.analytics.note(
                Facts(
                    tenant=self._tenant,
                    record=record,
                    prompt=prompt,
                    first_token_s=answer.first_token_s,
                    missed=contract.why_missed(),
                    missed_tokens=contract.missed_tokens,
                    ending=ending or "done",
                    is_further=number > 0,
                )
            )
