"""One admitted call: hold, submit, stream, settle.

    admit ─ hold ─ submit ─ deltas ─ answer (bytes) ─ delivery (client) ─ ledger entry ─ last bytes

A call that ends between the hold and the last byte (by a refusal, an engine failure or a
disconnect) is cancelled in the engine and settled in the ledger exactly once. The last bytes of a
complete answer wait until its ledger entry is durable. A unary answer is the fold of the stream.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing, suppress
from functools import partial

from aiohttp import web

from engine.api import Request
from engine.client.request_stream import RequestStream
from engine.errors import EngineError
from gateway.analytics.completed_prompt import CompletedPrompt, PromptContext
from gateway.analytics.interface import AnalyticsClient
from gateway.analytics.tool_digests import digests_of, head_of
from gateway.caching.attention import findable, setting_of
from gateway.dialects.canonical import Begin, ChoiceEnd, Delta, End, UsageRecord
from gateway.dialects.protocol import Dialect
from gateway.dialects.tolerance import label_of
from gateway.errors import Kind, Refusal
from gateway.generation import rate_limits
from gateway.generation.admission import AdmissionContext, admit
from gateway.generation.delivery import AnswerDelivery, PlainAnswer
from gateway.generation.output_stream import OutputStream
from gateway.generation.preparation import Prepared
from gateway.generation.rate_limits import actual_usage
from gateway.generation.serving import Serving
from gateway.generation.usage import (
    CACHE_HEADER,
    IGNORED_HEADER,
    cache_header,
    longest_wait,
    read_fidelity,
    sum_usage,
)
from gateway.http.connection import CONNECTION
from gateway.http.error_mapping import refusal_of
from gateway.http.request_context import STATE, RequestState, identity_of
from gateway.http.response import ClientGone
from gateway.ledger.metering import LedgerReservation
from gateway.observability.metrics import Metrics
from tenancy.errors import LedgerUnavailable, TenancyError
from tenancy.limits import NO_DEMAND, Reservation
from tenancy.pricing.charges import is_charged
from tenancy.reuse.prompt_changes import LOST_TOKENS_MIN


class Outcome:
    """The outcome of one call."""

    def __init__(
        self,
        metrics: Metrics,
        analytics: AnalyticsClient,
        state: RequestState,
        prepared: Prepared,
        place: Reservation,
    ) -> None:
        """`place`: the call's reservation of limits."""
        self._metrics, self._analytics = metrics, analytics
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
        self._state.epoch = output.epoch or self._state.epoch
        usage, state, metrics = sum_usage(records), self._state, self._metrics
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
        tenant = metrics.tenant_label(self._tenant)
        for one in output.usages:
            state.queue_s = max(state.queue_s, one.queue_s)
            for draft in one.drafts:
                metrics.drafts.add(tenant, draft.source, draft.drafted, draft.accepted)
        tokens = usage.total_in, usage.physical_cached, usage.out
        metrics.tokens.add(tenant, *tokens)
        metrics.count_epoch(state.epoch, *tokens)
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
            self._analytics.note(
                CompletedPrompt(
                    tenant_id=self._tenant_id,
                    model=prepared.model.name,
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
                        level_miss="" if contract.wait is None else contract.wait.cause,
                        tools=digests_of(prepared.call.prompts[number].tools),
                        head=head_of(prepared.call.prompts[number]),
                        quota_scale=prepared.model.quota_scale,
                        is_broken_by_death=contract.is_broken_by_death,
                    ),
                )
            )


class Execution:
    """A prepared call, from its admission to its ledger entry."""

    def __init__(
        self,
        serving: Serving,
        dialect: Dialect,
        prepared: Prepared,
        answer: PlainAnswer,
        delivery: AnswerDelivery,
        ignored: tuple[str, ...] = (),
    ) -> None:
        """`ignored`: names of the request's fields that had no effect."""
        self._serving, self._gateway = serving, serving.gateway
        self._dialect = dialect
        self._prepared, self._contracts = prepared, prepared.contracts
        self._answer, self._delivery = answer, delivery
        self._ignored = ignored
        self._state: RequestState = delivery.request[STATE]
        self._identity = identity_of(delivery.request)
        self._requests: tuple[Request, ...] = ()
        self._cached = 0
        """Tokens that the reservation of limits takes for cached."""
        renderer = prepared.model.renderer
        self._output = OutputStream(
            prepared.call, prepared.rendered, renderer, prepared.contracts, answer.in_thread
        )

    @property
    def is_submitted(self) -> bool:
        """Whether the engine got the call."""
        return self._state.submitted_s is not None

    async def run(self, response_id: str) -> web.StreamResponse:
        """Run the call. Raises Refusal, EngineError, ClientGone, and what the ledger raises."""
        gateway, state, model = self._gateway, self._state, self._prepared.model
        identity, output = self._identity, self._output
        state.response_id = response_id
        hold, place = await self._admit()
        outcome = Outcome(gateway.metrics, gateway.analytics, state, self._prepared, place)
        tenant_id, prompts = identity.tenant.tenant_id, [one.sent_tokens for one in self._requests]
        gateway.running.enter(tenant_id, len(prompts))
        waiting = model.waiting.enter(tenant_id, identity.policy.weight, prompts)
        ending = "failed"
        try:
            try:
                await hold.open()
                streams = await self._submit()
            except (TenancyError, EngineError):
                place.settle(NO_DEMAND)  # the headers report the full limit again
                raise
            finally:
                # After submitting, while the engine works.
                self._serving.limits.report(state)
            output.follow(streams, waiting.start)
            state.submitted_s = gateway.clock()
            send = self._stream if self._prepared.call.stream else self._unary
            response = await send(hold, outcome, place)
            ending = state.code
        except (asyncio.CancelledError, ClientGone):
            ending = "cancelled"
            raise
        except (Refusal, EngineError) as error:
            ending = error.code
            raise
        else:
            return response
        finally:
            waiting.leave()
            gateway.running.leave(tenant_id, len(prompts))
            if hold.is_open:
                await gateway.work.run_to_completion(self._cancel(hold, outcome, ending))
            else:
                outcome.record_ending(output, ending)

    async def _admit(self) -> tuple[LedgerReservation, Reservation]:
        """Admit the call and reserve its tokens. Raises Refusal; nothing needs to be undone."""
        gateway, state, prepared, identity = (
            *(self._gateway, self._state, self._prepared),
            self._identity,
        )
        leases = [contract.leases for contract in self._contracts]
        self._cached, now = await self._peek_cache()
        self._requests = admit(
            *(prepared.call, prepared.rendered, identity, state.request_id, now),
            prepared.scope.namespace,
            leases,
        )
        replicas = prepared.model.replicas
        state.epoch = now.info.epoch
        if len(replicas) > 1:
            state.epoch = replicas.likely_epoch(self._requests[0])
        most = rate_limits.estimate(self._requests, 0)
        hold = LedgerReservation(
            gateway.ledger,
            gateway.wall,
            state.request_id,
            identity,
            prepared.model.name,
            most=most,
            dialect=self._dialect.name,
            epoch=state.epoch,
            claim=self._delivery.claim,
        )
        user = prepared.call.client_user
        if user and gateway.attribution is not None:
            gateway.attribution.note(state.request_id, identity.tenant.tenant_id, user)
        cached = self._cached
        wanted = rate_limits.estimate(self._requests, cached) if cached else most
        return hold, await self._serving.limits.reserve(state, wanted)

    async def _peek_cache(self) -> tuple[int, AdmissionContext]:
        """Return the cached tokens of the prompts if a limit may depend on them, and an admission
        context that was read afterwards."""
        prepared = self._prepared
        longest = prepared.now.limits.output_tokens_default
        most = rate_limits.upper_bound(
            prepared.tokens, prepared.call.generation, len(prepared.rendered), longest
        )
        if not rate_limits.place_of(self._state).is_near_limit(most):
            return 0, prepared.now
        shared = prepared.scope.shared_tokens
        prompts = [findable(prompt.token_ids, shared) for prompt in prepared.rendered]
        replicas, namespace = prepared.model.replicas, prepared.scope.namespace
        cached = await rate_limits.cached_tokens(replicas, namespace, prompts)
        tenant_id = self._identity.tenant.tenant_id
        return cached, self._serving.preparation.admission(prepared.model, tenant_id)

    async def _submit(self) -> list[RequestStream]:
        """Submit all prompts of the call or none."""
        streams: list[RequestStream] = []
        try:
            replicas, is_alone = self._prepared.model.replicas, len(self._requests) == 1
            submit = replicas.submit
            streams.extend(submit(request, may_move=is_alone) for request in self._requests)
            for stream in streams:
                stream.hold_epoch = self._state.epoch
            self._state.choice = replicas.chooser.recent.get(self._state.request_id)
        except EngineError:
            for stream in streams:
                await stream.aclose()
            raise
        return streams

    async def _cancel(self, hold: LedgerReservation, outcome: Outcome, ending: str) -> None:
        """Cancel what still runs and settle. A second cancellation also waits, so the log line has
        final counts."""
        output = self._output
        await output.cancel()
        settled = hold.settle(
            *(ending, output.usage_so_far(), output.first_token_s),
            epoch=output.epoch,
            uncounted=output.uncounted,
        )
        outcome.record_ending(output, ending)
        with suppress(LedgerUnavailable):  # the hold stays and is settled at the next start
            await settled
            self._state.settled_s = self._gateway.clock()

    # -- unary and streamed answers -------------------------------------------------------------

    async def _unary(
        self, hold: LedgerReservation, outcome: Outcome, place: Reservation
    ) -> web.StreamResponse:
        deltas = await self._output.collect(partial(self._observe, place=place))
        body = await self._answer.unary(deltas)
        self._delivery.record(body)
        await self._settle(deltas, hold, outcome)
        return await self._delivery.send(body, self._head())

    async def _stream(
        self, hold: LedgerReservation, outcome: Outcome, place: Reservation
    ) -> web.StreamResponse:
        """Send server-sent events. An error before the first event is a plain HTTP response."""
        gateway, output, delivery = self._gateway, self._output, self._delivery
        interval_s = gateway.config.server.stream_keep_alive_s
        connection = delivery.request[CONNECTION]
        following = gateway.journal.following(self._state.request_id, output, connection)
        try:
            async with aclosing(output.batches(interval_s)) as batches:
                with following as progress:
                    async for batch in batches:
                        progress.is_behind = True
                        if batch is None:
                            await delivery.write(self._dialect.keep_alive(), self._head)
                        else:
                            self._observe(batch, place)
                            await self._write_batch(batch, hold, outcome)
                        progress.wrote()
        except (Refusal, EngineError, LedgerUnavailable) as error:
            await self._send_error_event(error)
        assert delivery.response is not None, "a complete answer has at least one chunk"
        return delivery.response

    async def _write_batch(
        self, batch: Sequence[Delta], hold: LedgerReservation, outcome: Outcome
    ) -> None:
        """Write one batch at once; the last one waits for the ledger."""
        is_last = bool(batch) and isinstance(batch[-1], End)
        data = await self._answer.stream(batch)
        if is_last:
            data += self._answer.encoder.close()
        self._delivery.record(data)
        if is_last:
            await self._settle(batch, hold, outcome)
        if data:
            await self._delivery.write(data, self._head)
        self._state.is_complete = is_last

    async def _send_error_event(self, error: Exception) -> None:
        """Send an error event, the last one of a stream that is not complete, and close the
        connection."""
        if self._delivery.response is None:
            raise error
        refusal = refusal_of(error) or Refusal(
            Kind.INTERNAL, "internal_error", "The response was interrupted."
        )
        self._state.ending, self._state.code = "failed", refusal.code
        await self._delivery.write(self._answer.encoder.error_event(refusal), self._head)
        self._delivery.response.force_close()

    async def _settle(
        self, deltas: Sequence[Delta], hold: LedgerReservation, outcome: Outcome
    ) -> None:
        """Write the ledger entry of a complete answer, with the kept one of an idempotent request;
        return when the entry is durable. If it cannot be written, the response that was stored is
        withdrawn. Raises LedgerUnavailable.

        The last bytes are encoded before this call, so an answer that cannot be encoded is not
        charged. Usage is recorded while the ledger writes.
        """
        last, output = deltas[-1], self._output
        assert isinstance(last, End), "a complete answer ends with its usage"
        kept = self._delivery.to_store(self._head, self._gateway.wall())
        settled = hold.settle(
            *("done", last.usage, output.first_token_s, kept),
            epoch=output.epoch,
            uncounted=output.uncounted,
        )
        outcome.record_usage(output)
        try:
            await settled
        except LedgerUnavailable:
            await self._gateway.work.shield(self._answer.withdraw())
            raise
        self._state.settled_s = self._gateway.clock()

    def _observe(self, deltas: Sequence[Delta], place: Reservation) -> None:
        """Record what the log line needs of the deltas; correct the reservation of limits by the
        engine's count of cached tokens."""
        for delta in deltas:
            if isinstance(delta, ChoiceEnd):
                self._state.finish_reasons[delta.index] = delta.reason
            elif isinstance(delta, Begin):
                found = delta.usage.physical_cached
                if found != self._cached:
                    place.correct(rate_limits.estimate(self._requests, found))

    def _head(self) -> dict[str, str]:
        """Return the headers: content type, cache header and the names of ignored fields."""
        is_stream = self._prepared.call.stream
        content_type = self._dialect.stream_content_type if is_stream else "application/json"
        headers = {"Content-Type": content_type}
        if is_stream:
            headers["X-Accel-Buffering"] = "no"
        headers[CACHE_HEADER] = cache_header(self._contracts) + self._cause()
        if self._ignored:
            headers[IGNORED_HEADER] = ", ".join(self._ignored)
        return headers

    def _cause(self) -> str:
        """Return the header's cause of a prompt without breakpoints: that of the latest comparison
        of the tenant's prompts which part in the same place; "" if there is none."""
        contract, gateway = self._contracts[0], self._gateway
        segment = contract.parting_segment()
        if not segment or len(self._contracts) > 1:
            return ""
        tenant_id = self._identity.tenant.tenant_id
        cause = gateway.recent_causes.find(tenant_id, segment, gateway.clock())
        return f"; cause={cause}; segment={segment}" if cause else ""
