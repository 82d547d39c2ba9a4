"""Report the outcome of an answer, once, to limits, contracts, metrics, the log and analytics.

    engine's usage ─ record_usage: tokens, however the answer ends ─ record_ending: how it ended

Usage is recorded in the same event-loop turn in which the ledger entry is submitted, so while the
entry is being written. The ending is known later and goes to analytics. The module knows no HTTP
and no ledger. `gateway.generation.generation` makes one `Outcome` for each admitted call.
"""

from __future__ import annotations

from collections.abc import Sequence

from gateway.analytics.completed_prompt import CompletedPrompt, PromptContext
from gateway.analytics.tool_digests import digests_of, head_of
from gateway.caching.attention import setting_of
from gateway.context import Context
from gateway.dialects.canonical import UsageRecord
from gateway.dialects.tolerance import label_of
from gateway.generation.output_stream import OutputStream
from gateway.generation.preparation import Prepared
from gateway.generation.rate_limits import actual_usage
from gateway.generation.usage import longest_wait, read_fidelity, sum_usage
from gateway.http.request_context import RequestState
from tenancy.limits import NO_DEMAND, Reservation
from tenancy.pricing.charges import is_charged
from tenancy.reuse.prompt_changes import LOST_TOKENS_MIN


class Outcome:
    """The outcome of one call."""

    def __init__(
        self, gateway: Context, state: RequestState, prepared: Prepared, place: Reservation
    ) -> None:
        """`place`: the call's reservation of limits."""
        self._gateway = gateway
        self._state = state
        self._prepared = prepared
        self._place = place
        self._records: Sequence[UsageRecord] | None = None
        self._missed: list[str] = []
        identity = state.identity
        assert identity is not None, "answers have an owner"
        self._tenant, self._tenant_id = identity.tenant.name, identity.tenant.tenant_id
        self._ignored = tuple(dict.fromkeys(map(label_of, prepared.call.ignored)))

    def record_usage(self, output: OutputStream, ending: str = "done") -> Sequence[UsageRecord]:
        """Record the usage of each prompt; a second call changes nothing. Changes: the rate-limit
        reservation, the contracts, metrics, and the fields of the request's log line. Rate limits
        count what is charged: the tokens of a request that the server failed are given back."""
        if self._records is not None:
            return self._records
        self._records = records = output.records_so_far()
        usage, state, metrics = sum_usage(records), self._state, self._gateway.metrics
        self._place.settle(actual_usage(usage) if is_charged(ending) else NO_DEMAND)
        state.usage = usage
        state.fidelity = self._prepared.contracts[0].fidelity
        if state.fidelity != "exact":
            state.read_fidelity = read_fidelity(self._prepared.contracts)
        if (attention := self._prepared.contracts[0].attention) is not None:
            state.attention = setting_of(attention)
            metrics.attention_requests.add(1, "window")
        wait = longest_wait(self._prepared.contracts)
        if wait is not None and wait.level is not None:
            state.load_s, state.load_level = wait.load_s, wait.level
            metrics.load_s.add(wait.load_s, wait.level)
        state.first_token_s = output.first_token_s
        if len(self._prepared.rendered) == 1:
            state.segments = self._prepared.rendered[0].boundaries
        for one in output.usages:
            state.queue_s = max(state.queue_s, one.queue_s)
        tenant = metrics.tenant_label(self._tenant)
        tokens = usage.total_in, usage.physical_cached, usage.out
        metrics.tokens.add(tenant, *tokens)
        metrics.count_epoch(state.epoch, *tokens, output.unneeded_tokens)
        metrics.output_format_violations.add(output.format_violations)
        for label in self._ignored:
            metrics.ignored_fields.add(1, label)
        contracted = usage.read_tokens(), usage.write_tokens(), usage.recomputed_promised
        metrics.contract_tokens.add(tenant, *contracted)
        for contract in self._prepared.contracts:
            contract.finish(state.response_id)
        for contract in self._prepared.contracts[: len(records)]:
            missed = contract.why_missed()
            self._missed.append(missed)
            if missed:
                metrics.misses.add(1, missed)
                if not state.missed:
                    state.missed, state.missed_tokens = missed, contract.missed_tokens
        return records

    def record_ending(self, output: OutputStream, ending: str) -> None:
        """Record how the call ended, and its usage if it was not recorded yet."""
        ending = ending or "done"
        prepared, records = self._prepared, self.record_usage(output, ending)
        prompts = zip(prepared.contracts, records, prepared.rendered, strict=False)
        state = self._state
        started_s = state.started_s if state.submitted_s is None else state.submitted_s
        for number, (contract, record, prompt) in enumerate(prompts):
            computed = record.total_in - record.physical_cached
            self._gateway.analytics.note(
                CompletedPrompt(
                    tenant_id=self._tenant_id,
                    record=record,
                    prompt=prompt,
                    first_token_s=output.first_token_s,
                    missed=self._missed[number],
                    missed_tokens=contract.missed_tokens,
                    ending=ending,
                    is_further=number > 0,
                    ignored=() if number else self._ignored,
                    # Under an attention window a prompt is computed again on purpose.
                    context=None
                    if contract.attention is not None
                    else PromptContext(
                        request_id=state.request_id,
                        namespace=prepared.scope.namespace,
                        epoch=state.epoch,
                        started_s=started_s,
                        is_unmarked=contract.is_unmarked,
                        min_tokens=contract.min_tokens,
                        losses=contract.losses() if computed >= LOST_TOKENS_MIN else None,
                        model=prepared.model.name,
                        level_miss="" if contract.wait is None else contract.wait.cause,
                        tools=digests_of(prepared.call.prompts[number].tools),
                        head=head_of(prepared.call.prompts[number]),
                    ),
                )
            )
