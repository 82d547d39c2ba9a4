"""One generation request: render, admit, hold, submit, stream, settle.

A request that ends between the hold and the last byte (by a refusal, an engine failure or a
disconnect) is cancelled in the engine and settled in the ledger exactly once. The last bytes of a
complete answer wait until its ledger entry is durable. A unary answer is the fold of the stream.
The module knows no dialect by name.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import aclosing, suppress
from functools import partial
from typing import TypeVar

from aiohttp import web
from msgspec import Struct
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
from gateway.generation.idempotency import KEY_HEADER, IdempotentRequest, find_replay
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
from tenancy.errors import LedgerUnavailable, TenancyError
from tenancy.ledger.idempotency import ReplayRecord
from tenancy.limits import NO_DEMAND, Reservation
from tenancy.types import Identity

T = TypeVar("T")

TOKENS_IN_LOOP_MAX = 256
"""Most tokens of one delta that the event loop encodes with logprobs: 20 each take some 2 ms."""


class _Running(Struct):
    """A call that was admitted, until it is settled. `place`: its reservation of limits, which
    takes `cached` tokens for cached."""

    requests: tuple[Request, ...]
    place: Reservation
    cached: int
    output: OutputStream
    encoder: Encoder
    hold: LedgerReservation
    outcome: Outcome


class Generation:
    """One request from its body to its last byte."""

    def __init__(self, gateway: Context, dialect: Dialect, request: web.BaseRequest) -> None:
        self._gateway = gateway
        self._dialect = dialect
        self._request = request
        self._state: RequestState = request[STATE]
        self._state.is_generation = True
        self._response: web.StreamResponse | None = None
        self._contracts: list[Contract] = []
        self._ignored: tuple[str, ...] = ()
        self._idempotent: IdempotentRequest | None = None
        self._stored: StoredAnswer | None = None
        self._in_thread: InThread | None = None
        """Where an answer with the logprobs of whole prompts is encoded; None for other answers."""

    async def run(self, id_prefix: str) -> web.StreamResponse:
        """Read, parse and prepare the request, then execute it. Nothing before the ledger hold
        needs to be undone."""
        gateway, state, headers = self._gateway, self._state, self._request.headers
        identity = state.identity
        assert identity is not None, "this route asks for a key"
        if gateway.is_draining:
            raise shutting_down()
        fidelity = attention = None
        if FIDELITY_HEADER in headers:
            fidelity = parse_fidelity(headers.getall(FIDELITY_HEADER), identity.policy.fidelity)
        if ATTENTION_HEADER in headers:
            attention = parse_attention(headers.getall(ATTENTION_HEADER), identity.policy.attention)
        body = await read_body(self._request, gateway.config.server)
        metadata = request_metadata(self._request, gateway.config)
        call = await parse_body(
            gateway, identity.tenant.tenant_id, self._dialect.parse, body, metadata
        )
        state.is_stream = call.stream
        state.asked_model = call.model
        model = check_model(gateway, call.model, identity)
        state.model = model.name
        if call.ignored:
            call = self._without_honoured(model, call)
        if gateway.is_draining:
            raise shutting_down()
        replayed = None if call.operation == "count" else await self.find_replay(body, identity)
        if replayed is not None:
            return replayed
        if call.thread.is_pending:
            asked = gateway, self._dialect, body, metadata, call, identity
            call = await parse_with_history(*asked, self._request[BODY_SHARE])
            call = self._without_honoured(model, call)
        del body
        call = call if fidelity is None else replace(call, fidelity=fidelity)
        call = call if attention is None else with_attention(call, attention)
        share = self._request[BODY_SHARE]
        prepared = await prepare(gateway, model, call, identity, share=share)
        share.release()
        call = prepared.call
        if call.operation == "count":
            state.is_generation = False
            body = self._dialect.count_body(prepared.tokens, prepared.resource_tokens)
            return await send(self._request, 200, body, self._head(is_stream=False))
        # What is stored is found by its id, and operators see the request's in records and logs.
        reply_id = gateway.new_id() if call.thread.input else state.request_id
        reply = Reply(f"{id_prefix}{reply_id}", call.model, gateway.wall() // 1000)
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
        if KEY_HEADER not in self._request.headers:
            return None
        asked = self._gateway, self._request, body, identity
        self._idempotent, replayed = await find_replay(*asked)
        return replayed

    def run_to_completion(
        self, work: Coroutine[None, None, web.StreamResponse]
    ) -> Awaitable[web.StreamResponse]:
        """Run an idempotent request to completion even if the client disconnects: the client will
        retry and get the response that it pays for."""
        return work if self._idempotent is None else self._complete(self._idempotent, work)

    async def _complete(
        self, request: IdempotentRequest, work: Coroutine[None, None, web.StreamResponse]
    ) -> web.StreamResponse:
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
        """Run a prepared call, from its admission to its ledger entry."""
        gateway, state, model, call = self._gateway, self._state, prepared.model, prepared.call
        state.response_id = reply.response_id
        running = await self._admit(prepared, identity, encoder)
        output, hold, requests = running.output, running.hold, running.requests
        tenant_id, prompts = identity.tenant.tenant_id, [len(one.tokens) for one in requests]
        gateway.enter(tenant_id, len(requests))
        waiting = model.waiting.enter(tenant_id, identity.policy.weight, prompts)
        ending = "failed"
        try:
            try:
                await hold.open()
                streams = await self._submit(model, requests)
            except (TenancyError, EngineError):
                running.place.settle(NO_DEMAND)  # the headers report the full limit again
                raise
            finally:
                # After submitting, while the engine works.
                rate_limits.report_limits(gateway, state)
            output.follow(streams, waiting.start)
            state.submitted_s = gateway.clock()
            response = await (self._stream(running) if call.stream else self._unary(running))
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
            gateway.leave(tenant_id, len(requests))
            if hold.is_open:
                await gateway.run_to_completion(self._cancel_and_settle(running, ending))
            else:
                running.outcome.record_ending(output, ending)

    async def _admit(self, prepared: Prepared, identity: Identity, encoder: Encoder) -> _Running:
        """Admit a call and reserve its tokens. Raises Refusal; nothing needs to be undone."""
        gateway, state = self._gateway, self._state
        call, rendered = prepared.call, prepared.rendered
        self._contracts, namespace = prepared.contracts, prepared.scope.namespace
        leases = [contract.leases for contract in self._contracts]
        cached, now = await self._peek_cache(prepared, identity)
        requests = admit(call, rendered, identity, state.request_id, now, namespace, leases)
        state.epoch = now.info.epoch
        most = rate_limits.estimate(requests, 0)
        hold = LedgerReservation(
            gateway.ledger,
            gateway.wall,
            state.request_id,
            identity,
            prepared.model.name,
            most=most,
            dialect=self._dialect.name,
            epoch=now.info.epoch,
            claim=None if self._idempotent is None else self._idempotent.claim,
        )
        if gateway.attribution is not None and call.client_user:
            gateway.attribution.note(state.request_id, identity.tenant.tenant_id, call.client_user)
        wanted = rate_limits.estimate(requests, cached) if cached else most
        place = rate_limits.reserve(gateway, state, wanted)
        outcome, renderer = Outcome(gateway, state, prepared, place), prepared.model.renderer
        output = OutputStream(call, rendered, renderer, self._contracts, self._in_thread)
        return _Running(requests, place, cached, output, encoder, hold, outcome)

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

    async def _cancel_and_settle(self, running: _Running, ending: str) -> None:
        """Cancel what still runs and settle. A second cancellation also waits, so the log line has
        final counts."""
        output = running.output
        await output.cancel()
        settled = running.hold.settle(ending, output.usage_so_far(), output.first_token_s)
        running.outcome.record_ending(output, ending)
        with suppress(LedgerUnavailable):  # the hold stays and is settled at the next start
            await settled
            self._state.settled_s = self._gateway.clock()

    def _observe(self, deltas: Sequence[Delta], running: _Running) -> None:
        """Record what the log line needs of the deltas; correct the reservation of limits by the
        engine's count of cached tokens."""
        for delta in deltas:
            if isinstance(delta, ChoiceEnd):
                self._state.finish_reasons[delta.index] = delta.reason
            elif isinstance(delta, Begin):
                found = delta.usage.physical_cached
                if found != running.cached:
                    running.place.correct(rate_limits.estimate(running.requests, found))

    # -- unary and streamed answers -------------------------------------------------------------

    async def _unary(self, running: _Running) -> web.StreamResponse:
        encoder = running.encoder
        deltas = await running.output.collect(partial(self._observe, running=running))
        if self._in_thread is None:
            body = encoder.unary(deltas)
        else:
            body = await self._in_thread(partial(encoder.unary, deltas))
        if self._stored is not None:
            body = await self._stored.unary(deltas)
        if self._idempotent is not None:
            self._idempotent.record(body)
        await self._settle(deltas, running)
        return await send(self._request, 200, body, self._head(is_stream=False))

    def _head(self, *, is_stream: bool) -> dict[str, str]:
        """Return the headers: content type, cache header and the names of ignored fields."""
        content_type = self._dialect.stream_content_type if is_stream else "application/json"
        headers = {"Content-Type": content_type}
        if is_stream:
            headers["X-Accel-Buffering"] = "no"
        if self._contracts:
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
        identity = self._state.identity
        assert identity is not None, "answers have an owner"
        tenant_id = identity.tenant.tenant_id
        cause = gateway.recent_causes.find(tenant_id, segment, gateway.clock())
        return f"; cause={cause}; segment={segment}" if cause else ""

    async def _stream(self, running: _Running) -> web.StreamResponse:
        """Send server-sent events. An error before the first event is a plain HTTP response."""
        interval_s = self._gateway.config.server.stream_keep_alive_s
        connection, output = self._request[CONNECTION], running.output
        following = self._gateway.journal.following(self._state.request_id, output, connection)
        try:
            async with aclosing(output.batches(interval_s)) as batches:
                with following as progress:
                    async for batch in batches:
                        progress.is_behind = True
                        await self._write_batch(batch, running)
                        progress.wrote()
        except (Refusal, EngineError, LedgerUnavailable) as error:
            await self._send_error_event(running.encoder, error)
        assert self._response is not None, "a complete answer has at least one chunk"
        return self._response

    async def _write_batch(self, batch: Sequence[Delta] | None, running: _Running) -> None:
        """Write one batch at once; the last one waits for the ledger. None: send a keep-alive."""
        if batch is None:
            await self._send(self._dialect.keep_alive())
            return
        encoder = running.encoder
        self._observe(batch, running)
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
            await self._settle(batch, running)
        if data:
            await self._send(data)
        self._state.is_complete = is_last

    async def _send_error_event(self, encoder: Encoder, error: Exception) -> None:
        """Send an error event, the last one of a stream that is not complete, and close the
        connection."""
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

    async def _settle(self, deltas: Sequence[Delta], running: _Running) -> None:
        """Write the ledger entry of a complete answer, with the stored response of an idempotent
        request; return when the entry is durable. If it cannot be written, the response that was
        stored is withdrawn. Raises LedgerUnavailable.

        The last bytes are encoded before this call, so an answer that cannot be encoded is not
        charged. Usage is recorded while the ledger writes.
        """
        last = deltas[-1]
        assert isinstance(last, End), "a complete answer ends with its usage"
        record: ReplayRecord | None = None
        if self._idempotent is not None:
            head = self._head(is_stream=self._state.is_stream)
            record = self._idempotent.to_store(head, self._gateway.wall())
        output = running.output
        settled = running.hold.settle("done", last.usage, output.first_token_s, record)
        running.outcome.record_usage(output)
        try:
            await settled
        except LedgerUnavailable:
            if self._stored is not None:
                await self._gateway.shield(self._stored.withdraw())
            raise
        self._state.settled_s = self._gateway.clock()


def _has_many_tokens(batch: Sequence[Delta]) -> bool:
    """Return whether a batch reports so many tokens that the event loop should not encode it."""
    return any(
        isinstance(delta, Text) and len(delta.tokens) > TOKENS_IN_LOOP_MAX for delta in batch
    )


async def _run_admitted(gateway: Context, tenant_id: int, work: Callable[[], T]) -> T:
    """Run work of a running request in the pool, when it is the tenant's turn."""
    return await gateway.preparations.run(tenant_id, lambda _: work(), is_admitted=True)
