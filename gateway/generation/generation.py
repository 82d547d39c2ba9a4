"""One generation request: render, admit, hold, submit, stream, settle.

A request that ends between the hold and the last byte (by a refusal, an engine failure or a
disconnect) is cancelled in the engine and settled in the ledger exactly once. The last bytes of a
complete answer wait until its ledger entry is durable. A unary answer is the fold of the stream.
The module knows no dialect by name; `gateway.api.generate` calls it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import aclosing, suppress
from functools import partial
from typing import TypeVar

from aiohttp import web
from msgspec.structs import replace

from engine.api import Request
from engine.client.request_stream import RequestStream
from engine.errors import EngineError
from gateway.caching import Contract
from gateway.caching.attention import (
    ATTENTION_HEADER,
    findable,
    parse_attention,
    with_attention,
)
from gateway.context import Context
from gateway.dialects.canonical import Begin, Call, ChoiceEnd, Delta, End, Reply, Text
from gateway.dialects.protocol import Dialect, Encoder
from gateway.dialects.tolerance import without_thinking
from gateway.engines.served_models import ServedModel
from gateway.errors import Kind, Refusal
from gateway.generation import rate_limits
from gateway.generation.admission import AdmissionContext, admit
from gateway.generation.idempotency import (
    KEY_HEADER,
    IdempotentRequest,
    parse_idempotency_key,
    replay,
)
from gateway.generation.outcome import Outcome
from gateway.generation.output_stream import InThread, OutputStream
from gateway.generation.preparation import (
    Prepared,
    admission_context,
    check_model,
    parse_body,
    prepare,
    shutting_down,
)
from gateway.generation.stored_responses import (
    StoredAnswer,
    parse_with_history,
    stored_answer,
)
from gateway.generation.usage import CACHE_HEADER, IGNORED_HEADER, cache_header
from gateway.http.connection import CONNECTION
from gateway.http.error_mapping import refusal_of
from gateway.http.request_body import BODY_SHARE, read_body
from gateway.http.request_context import STATE, RequestState, request_metadata
from gateway.http.response import ClientGone, begin, send, streamed, write
from gateway.ledger.metering import LedgerReservation
from gateway.levels.fidelity import FIDELITY_HEADER, parse_fidelity
from gateway.observability.tracing import operation_name
from gateway.waiting_requests import WaitingPlace
from tenancy.errors import LedgerUnavailable, TenancyError
from tenancy.ledger.idempotency import ReplayRecord
from tenancy.limits import NO_DEMAND
from tenancy.types import Identity

T = TypeVar("T")

TOKENS_IN_LOOP_MAX = 256
"""Most tokens of one delta that the event loop encodes with logprobs: 20 each take some 2 ms."""


class Generation:
    """One request from its body to its last byte."""

    def __init__(self, gateway: Context, dialect: Dialect, request: web.BaseRequest) -> None:
        self._gateway = gateway
        self._dialect = dialect
        self._request = request
        self._state: RequestState = request[STATE]
        self._state.operation = operation_name(dialect.name)
        self._response: web.StreamResponse | None = None
        self._contracts: list[Contract] = []
        self._ignored: tuple[str, ...] = ()
        self._on_started: Callable[[int], None] | None = None
        self._idempotent: IdempotentRequest | None = None
        self._stored: StoredAnswer | None = None
        self._in_thread: InThread | None = None
        """Where an answer with the logprobs of whole prompts is encoded; None for other answers."""

    async def run(self, id_prefix: str) -> web.StreamResponse:
        """Read, parse and prepare the request, then execute it. Nothing before the ledger hold
        needs to be undone."""
        gateway, state = self._gateway, self._state
        identity = state.identity
        assert identity is not None, "this route asks for a key"
        if gateway.is_draining:
            raise shutting_down()
        fidelity = None
        if FIDELITY_HEADER in self._request.headers:
            asked = self._request.headers.getall(FIDELITY_HEADER)
            fidelity = parse_fidelity(asked, identity.policy.fidelity)
        attention = None
        if ATTENTION_HEADER in self._request.headers:
            asked = self._request.headers.getall(ATTENTION_HEADER)
            attention = parse_attention(asked, identity.policy.attention)
        body = await read_body(self._request, gateway.config.server)
        metadata = request_metadata(self._request, gateway.config.server.tolerance)
        call = await parse_body(
            gateway, identity.tenant.tenant_id, self._dialect.parse, body, metadata
        )
        self._ignored = call.ignored
        state.is_stream = call.stream
        model = check_model(gateway, call, identity)
        state.model = model.name
        if self._ignored:
            call = self._without_honoured(model, call)
        if gateway.is_draining:
            raise shutting_down()
        replayed = None if call.operation == "count" else await self.find_replay(body, identity)
        if replayed is not None:
            return replayed
        if call.thread.is_pending:
            call = await parse_with_history(gateway, self._dialect, body, metadata, call, identity)
            call = self._without_honoured(model, call)
        del body
        call = call if fidelity is None else replace(call, fidelity=fidelity)
        call = call if attention is None else with_attention(call, attention)
        prepared = await prepare(gateway, model, call, identity)
        share = self._request[BODY_SHARE]
        share.budget.release(share)
        call = prepared.call
        if call.operation == "count":
            state.operation = ""  # nothing is generated
            body = self._dialect.count_body(prepared.tokens, prepared.resource_tokens)
            return await send(self._request, 200, body, self._head(is_stream=False))
        reply = Reply(f"{id_prefix}{state.request_id}", call.model, gateway.wall() // 1000)
        encoder = self._dialect.encoder(call, reply)
        if call.generation.prompt_logprobs is not None:
            self._in_thread = partial(_run_admitted, gateway, identity.tenant.tenant_id)
        if call.thread.input:
            self._stored = stored_answer(gateway, identity, call, reply, encoder)
        return await self.run_to_completion(self.execute(prepared, identity, encoder, reply))

    def _without_honoured(self, model: ServedModel, call: Call) -> Call:
        """Keep the names of the fields that had no effect: a model that thinks honours some."""
        if model.renderer.thinking.kind != "none":
            call = replace(call, ignored=without_thinking(call.ignored))
        self._ignored = call.ignored
        return call

    async def find_replay(self, body: bytes, identity: Identity) -> web.StreamResponse | None:
        """Replay the stored response of an idempotent request; None if it has to run.

        Raises Refusal for an invalid key, IdempotencyConflict.
        """
        gateway = self._gateway
        if KEY_HEADER not in self._request.headers:
            return None
        self._idempotent = parse_idempotency_key(
            self._request, body, identity, gateway.config.idempotency
        )
        stored = await self._idempotent.find(gateway)
        if stored is None:
            return None
        ids = self._dialect.headers(self._state.request_id)
        return await replay(gateway, self._request, stored, self._dialect.name, ids)

    async def run_to_completion(
        self, work: Coroutine[None, None, web.StreamResponse]
    ) -> web.StreamResponse:
        """Run an idempotent request to completion even if the client disconnects: the client will
        retry and get the response that it pays for."""
        request = self._idempotent
        if request is None:
            return await work
        try:
            response = await self._gateway.run_to_completion(work)
        finally:
            self._state.is_complete &= not request.is_disconnected
        if request.is_disconnected:
            raise ClientGone
        return response

    async def execute(
        self, prepared: Prepared, identity: Identity, encoder: Encoder, reply: Reply
    ) -> web.StreamResponse:
        """Run an admitted request, from the rate-limit reservation to the ledger entry."""
        self._state.response_id = reply.response_id
        gateway, model, namespace = self._gateway, prepared.model, prepared.scope.namespace
        call, rendered, self._contracts = prepared.call, prepared.rendered, prepared.contracts
        leases = [contract.leases for contract in self._contracts]
        cached, now = await self._peek_cache(prepared, identity)
        requests = admit(call, rendered, identity, self._state.request_id, now, namespace, leases)
        self._state.epoch = now.info.epoch
        most = rate_limits.estimate(requests, 0)
        hold = LedgerReservation(
            gateway.ledger,
            gateway.wall,
            self._state.request_id,
            identity,
            model.name,
            most=most,
            dialect=self._dialect.name,
            epoch=now.info.epoch,
            claim=None if self._idempotent is None else self._idempotent.claim,
        )
        self._note_user(call.client_user, identity)
        wanted = rate_limits.estimate(requests, cached) if cached else most
        dialect, state = self._dialect.name, self._state
        limit_reservation = rate_limits.reserve(gateway, state, dialect, wanted)
        outcome = Outcome(gateway, self._state, prepared, limit_reservation)

        def on_started(found: int) -> None:
            """Replace the estimate of cached tokens by the engine's count."""
            if found != cached:
                limit_reservation.correct(rate_limits.estimate(requests, found))

        self._on_started = on_started
        waiting = _enter(gateway, model, identity, requests)
        output = OutputStream(call, rendered, model.renderer, self._contracts, self._in_thread)
        ending = "failed"
        try:
            try:
                await hold.open()
                streams = await self._submit(model, requests)
            except (TenancyError, EngineError):
                limit_reservation.settle(NO_DEMAND)  # the headers report the full limit again
                raise
            finally:
                # After submitting, while the engine works.
                rate_limits.report_limits(gateway, state, dialect, limit_reservation)
            output.follow(streams, waiting.start)
            self._state.submitted_s = gateway.clock()
            respond = self._stream if call.stream else self._unary
            response = await respond(output, encoder, hold, outcome)
            ending = self._state.code
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
            gateway.leave(identity.tenant.tenant_id, len(requests))
            if output.is_over and not hold.is_open:
                outcome.record_ending(output, ending)  # the request is settled
            else:
                await gateway.run_to_completion(
                    self._cancel_and_settle(output, hold, outcome, ending)
                )

    async def _peek_cache(
        self, prepared: Prepared, identity: Identity
    ) -> tuple[int, AdmissionContext]:
        """Return the cached tokens of the prompts if a limit may depend on them, and an admission
        context that was read afterwards."""
        longest = prepared.now.limits.output_tokens_default
        most = rate_limits.upper_bound(
            prepared.tokens, prepared.call.generation, len(prepared.rendered), longest
        )
        if not rate_limits.place_of(self._state).is_near_limit(most):
            return 0, prepared.now
        shared = prepared.scope.shared_tokens
        prompts = [findable(prompt.token_ids, shared) for prompt in prepared.rendered]
        cached = await rate_limits.cached_tokens(
            prepared.model.engine, prepared.scope.namespace, prompts
        )
        now = admission_context(self._gateway, prepared.model, identity.tenant.tenant_id)
        return cached, now

    def _note_user(self, user: str, identity: Identity) -> None:
        notes = self._gateway.user_notes
        if notes is not None and user:
            notes.note(self._state.request_id, identity.tenant.tenant_id, user)

    async def _submit(
        self, model: ServedModel, requests: tuple[Request, ...]
    ) -> list[RequestStream]:
        """Submit all prompts of a call or none."""
        streams: list[RequestStream] = []
        try:
            streams.extend(map(model.engine.submit, requests))
        except EngineError:
            for stream in streams:
                await stream.aclose()
            raise
        return streams

    async def _cancel_and_settle(
        self, output: OutputStream, hold: LedgerReservation, outcome: Outcome, ending: str
    ) -> None:
        """Cancel a request that still runs and settle one that is not settled.

        A second cancellation also waits, so the log line has final counts.
        """
        await output.cancel()
        outcome.record_ending(output, ending)
        if hold.is_open:
            with suppress(LedgerUnavailable):  # the hold stays and is settled at the next start
                await hold.settle(ending, output.usage_so_far(), output.first_token_s)
                self._state.settled_s = self._gateway.clock()

    def _observe(self, deltas: Sequence[Delta]) -> None:
        """Record the deltas that the log line and the rate limits need."""
        for delta in deltas:
            if isinstance(delta, ChoiceEnd):
                self._state.finish_reasons[delta.index] = delta.reason
            elif isinstance(delta, Begin) and self._on_started is not None:
                self._on_started(delta.usage.physical_cached)

    # -- unary and streamed answers -------------------------------------------------------------

    async def _unary(
        self, output: OutputStream, encoder: Encoder, hold: LedgerReservation, outcome: Outcome
    ) -> web.StreamResponse:
        deltas = await output.collect(self._observe)
        if self._in_thread is None:
            body = encoder.unary(deltas)
        else:
            body = await self._in_thread(partial(encoder.unary, deltas))
        if self._stored is not None:
            body = await self._stored.unary(deltas)
        if self._idempotent is not None:
            self._idempotent.record(body)
        await self._settle(deltas, output, hold, outcome)
        self._state.settled_s = self._gateway.clock()
        return await send(self._request, 200, body, self._head(is_stream=False))

    def _head(self, *, is_stream: bool) -> dict[str, str]:
        """Return the headers: content type, cache header and the names of ignored fields."""
        content_type = self._dialect.stream_content_type if is_stream else "application/json"
        headers = {"Content-Type": content_type}
        if is_stream:
            headers["X-Accel-Buffering"] = "no"
        if self._contracts:
            headers[CACHE_HEADER] = cache_header(self._contracts)
        if self._ignored:
            headers[IGNORED_HEADER] = ", ".join(self._ignored)
        return headers

    async def _stream(
        self, output: OutputStream, encoder: Encoder, hold: LedgerReservation, outcome: Outcome
    ) -> web.StreamResponse:
        """Send server-sent events. An error before the first event is a plain HTTP response."""
        interval_s = self._gateway.config.server.stream_keep_alive_s
        connection = self._request[CONNECTION]
        following = self._gateway.journal.following(self._state.request_id, output, connection)
        try:
            async with aclosing(output.batches(interval_s)) as batches:
                with following as progress:
                    async for batch in batches:
                        progress.is_behind = True
                        await self._write_batch(batch, output, encoder, hold, outcome)
                        progress.wrote()
        except (Refusal, EngineError, LedgerUnavailable) as error:
            await self._send_error_event(encoder, error)
        assert self._response is not None, "a complete answer has at least one chunk"
        return self._response

    async def _write_batch(
        self,
        batch: Sequence[Delta] | None,
        output: OutputStream,
        encoder: Encoder,
        hold: LedgerReservation,
        outcome: Outcome,
    ) -> None:
        """Write one batch at once; the last one waits for the ledger. None: send a keep-alive."""
        if batch is None:
            await self._send(self._dialect.keep_alive())
            return
        self._observe(batch)
        is_last = bool(batch) and isinstance(batch[-1], End)
        if is_last and self._stored is not None:
            data = await self._stored.stream(batch)
        elif self._in_thread is not None and _has_many_tokens(batch):
            data = b"".join(await self._in_thread(lambda: list(map(encoder.stream, batch))))
        else:
            data = b"".join(map(encoder.stream, batch))
        if is_last:
            data += encoder.close()
        if self._idempotent is not None:
            self._idempotent.record(data)
        if is_last:
            await self._settle(batch, output, hold, outcome)
            self._state.settled_s = self._gateway.clock()
        if data:
            await self._send(data)
        self._state.is_complete = is_last

    async def _send_error_event(self, encoder: Encoder, error: Exception) -> None:
        """Send an error event, then abort the connection so that the stream is not complete."""
        if self._response is None:
            raise error
        refusal = refusal_of(error) or Refusal(
            Kind.INTERNAL, "internal_error", "The response was interrupted."
        )
        self._state.ending, self._state.code = "failed", refusal.code
        await self._send(encoder.error_event(refusal))
        self._response.force_close()

    async def _send(self, data: bytes) -> None:
        if self._idempotent is not None and self._idempotent.is_disconnected:
            return
        try:
            if self._response is None:
                self._response = streamed(self._request, self._head(is_stream=True))
                await begin(self._request, self._response)
            await write(self._request, self._response, data)
        except ClientGone:
            if self._idempotent is None:
                raise
            self._idempotent.is_disconnected = True

    async def _settle_stored(self, settled: asyncio.Future[None], stored: StoredAnswer) -> None:
        """Wait for the ledger entry; withdraw the stored response if it cannot be written."""
        try:
            await settled
        except LedgerUnavailable:
            await self._gateway.finish(stored.withdraw())
            raise

    def _settle(
        self,
        deltas: Sequence[Delta],
        output: OutputStream,
        hold: LedgerReservation,
        outcome: Outcome,
    ) -> Awaitable[None]:
        """Submit the ledger entry of a complete answer, with the stored response of an idempotent
        request; return an awaitable that is done when the entry is durable.

        The last bytes are encoded before this call, so an answer that cannot be encoded is not
        charged. Usage is recorded while the ledger writes.
        """
        last = deltas[-1]
        assert isinstance(last, End), "a complete answer ends with its usage"
        record: ReplayRecord | None = None
        if self._idempotent is not None:
            head = self._head(is_stream=self._state.is_stream)
            record = self._idempotent.to_store(head, self._gateway.wall())
        settled = hold.settle("done", last.usage, output.first_token_s, record)
        outcome.record_usage(output)
        return settled if self._stored is None else self._settle_stored(settled, self._stored)


def _has_many_tokens(batch: Sequence[Delta]) -> bool:
    """Return whether a batch reports so many tokens that the event loop should not encode it."""
    return any(
        isinstance(delta, Text) and len(delta.tokens) > TOKENS_IN_LOOP_MAX for delta in batch
    )


async def _run_admitted(gateway: Context, tenant_id: int, work: Callable[[], T]) -> T:
    """Run work of a running request in the pool, when it is the tenant's turn."""
    return await gateway.preparations.run(tenant_id, lambda _: work(), is_admitted=True)


def _enter(
    gateway: Context, model: ServedModel, identity: Identity, requests: Sequence[Request]
) -> WaitingPlace:
    """Count the requests of a call among the running and the waiting ones."""
    tenant_id, tokens = identity.tenant.tenant_id, [len(request.tokens) for request in requests]
    gateway.enter(tenant_id, len(requests))
    return model.waiting.enter(tenant_id, identity.policy.weight, tokens)
