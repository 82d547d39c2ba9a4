"""One answer: render, admit, hold, submit, stream, settle.

Whatever happens between the hold and the last byte (a refusal, a dead engine, a client that
leaves), the request is cancelled in the engine and settled in the ledger exactly once. The last
bytes of a good answer wait until its entry is durable. A unary answer is the fold of the stream.
It knows no dialect by name; handlers call it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing, suppress

from aiohttp import web

from engine.api import Request
from engine.client.client import RequestStream
from engine.errors import EngineError
from gateway.caching import Contract
from gateway.context import Context
from gateway.dialects.canonical import Begin, ChoiceEnd, Delta, End, Reply
from gateway.dialects.protocol import Dialect, Encoder
from gateway.errors import Kind, Refusal
from gateway.generation import rate_limits
from gateway.generation.admission import AdmissionContext, admit
from gateway.generation.idempotency import NAME, NamedRequest, named, replay
from gateway.generation.outcome import Outcome
from gateway.generation.output_stream import OutputStream
from gateway.generation.preparation import Prepared, check_model, circumstances, prepare
from gateway.generation.usage import CACHE_HEADER, cache_header
from gateway.http.connection import CONNECTION
from gateway.http.error_mapping import refusal_of
from gateway.http.request_body import read_body
from gateway.http.request_context import STATE, RequestState, asked
from gateway.http.response import ClientGone, begin, send, streamed, write
from gateway.ledger.metering import LedgerReservation
from gateway.observability.tracing import operation_of
from tenancy.errors import LedgerUnavailable, LimitExceeded, TenancyError
from tenancy.ledger.idempotency import Keeping, KeptAnswer
from tenancy.limits import Demand, LimitState, Meter, Reservation
from tenancy.types import Identity


class Generation:
    """One request on its way through."""

    def __init__(self, gateway: Context, dialect: Dialect, request: web.BaseRequest) -> None:
        self._gateway = gateway
        self._dialect = dialect
        self._request = request
        self._state: RequestState = request[STATE]
        self._state.operation = operation_of(dialect.name)
        self._response: web.StreamResponse | None = None
        self._contracts: list[Contract] = []
        self._begun: Callable[[int], None] | None = None
        self._named: NamedRequest | None = None

    async def run(self, id_prefix: str) -> web.StreamResponse:
        """Everything up to the hold; nothing has to be undone before it."""
        gateway, state = self._gateway, self._state
        identity = state.identity
        assert identity is not None, "this route asks for a key"
        body = await read_body(self._request, gateway.config.server)
        call = self._dialect.parse(body, asked(self._request))
        state.model, state.is_stream = gateway.model, call.stream
        check_model(gateway, call)
        if gateway.is_draining:
            raise _shutting_down()
        again = None if call.operation == "count" else await self.again(body, identity)
        if again is not None:
            return again
        del body
        made = await prepare(gateway, call, identity)
        call = made.call
        if call.operation == "count":
            state.operation = ""  # nothing was to be generated
            body = self._dialect.count_body(made.tokens, made.resource_tokens)
            return await send(self._request, 200, body, self._head(is_stream=False))
        reply = Reply(f"{id_prefix}{state.request_id}", call.model, gateway.wall() // 1000)
        encoder = self._dialect.encoder(call, reply)
        return await self.see_through(self.admitted(made, identity, encoder, reply))

    async def again(self, body: bytes, identity: Identity) -> web.StreamResponse | None:
        """Where its client has named it: what was answered to it before, sent again; None: it is to
        run. Raises Refusal for what is no name, NameInUse."""
        gateway = self._gateway
        if NAME not in self._request.headers:
            return None
        self._named = named(self._request, body, identity, gateway.config.idempotency)
        kept = await self._named.find(gateway)
        return None if kept is None else await self._replay(kept, identity)

    async def see_through(
        self, work: Coroutine[None, None, web.StreamResponse]
    ) -> web.StreamResponse:
        """Where its client has named it, to the end, whether he waits or not: he will come back for
        what he pays for."""
        request = self._named
        if request is None:
            return await work
        try:
            response = await self._gateway.see_through(work)
        finally:
            self._state.is_complete &= not request.is_left
        if request.is_left:
            raise ClientGone
        return response

    async def admitted(
        self, made: Prepared, identity: Identity, encoder: Encoder, reply: Reply
    ) -> web.StreamResponse:
        """From the tenant's count to the ledger's entry, however it ends."""
        self._state.response_id = reply.response_id
        gateway, tenant_id = self._gateway, identity.tenant.tenant_id
        call, rendered, self._contracts = made.call, made.rendered, made.contracts
        leases = [contract.leases for contract in self._contracts]
        cached, now = await self._look(made, identity)
        namespace = made.scope.namespace
        requests = admit(call, rendered, identity, self._state.request_id, now, namespace, leases)
        self._state.epoch = now.info.epoch
        most = rate_limits.estimate(requests, 0)
        account = LedgerReservation(
            gateway.ledger,
            gateway.wall,
            self._state.request_id,
            identity,
            gateway.model,
            most=most,
            dialect=self._dialect.name,
            epoch=now.info.epoch,
            claim=None if self._named is None else self._named.claim,
        )
        wanted = rate_limits.estimate(requests, cached) if cached else most
        reservation = self._reserve(identity, wanted)
        outcome = Outcome(gateway, self._state, made, reservation)

        def begun(found: int) -> None:
            """What the engine has found takes the place of what was thought."""
            if found != cached:
                reservation.correct(rate_limits.estimate(requests, found))

        self._begun = begun
        gateway.enter(tenant_id)
        answer = OutputStream(call, rendered, gateway.renderer, self._contracts)
        ending = "failed"
        try:
            try:
                await account.open()
                streams = await self._submit(requests)
            except (TenancyError, EngineError):
                reservation.settle(rate_limits.NOTHING)  # so that what is said to be left is left
                raise
            finally:
                self._say_limits(reservation.status())  # whatever came of it; the engine works
            answer.follow(streams)
            self._state.submitted_s = gateway.clock()
            shape = self._stream if call.stream else self._unary
            response = await shape(answer, encoder, account, outcome)
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
            gateway.leave(tenant_id)
            if answer.is_over and not account.is_open:
                outcome.tell(answer, ending)  # nothing is left to wait for
            else:
                await gateway.see_through(self._give_up(answer, account, outcome, ending))

    async def _look(self, made: Prepared, identity: Identity) -> tuple[int, AdmissionContext]:
        """What the cache has of the prompts, if a limit may depend on it, and how things stand
        then: what is counted now still holds when the call is admitted."""
        longest = made.now.limits.output_tokens_default
        most = rate_limits.most(made.tokens, made.call.generation, len(made.rendered), longest)
        if not self._gateway.limiter.presses(identity, most):
            return 0, made.now
        prompts = [prompt.token_ids for prompt in made.rendered]
        cached = await rate_limits.cached_tokens(
            self._gateway.engine, made.scope.namespace, prompts
        )
        return cached, circumstances(self._gateway, identity.tenant.tenant_id)

    def _reserve(self, identity: Identity, demand: Demand) -> Reservation:
        """A place in the limits. Raises Refusal, with what is left said in the headers."""
        limiter = self._gateway.limiter
        try:
            return limiter.reserve(identity, demand)
        except LimitExceeded as error:
            self._say_limits(limiter.status(identity))
            raise rate_limits.refusal_of(error) from error

    def _say_limits(self, left: Mapping[Meter, LimitState]) -> None:
        headers = rate_limits.limit_headers(self._dialect.name, left, self._gateway.wall())
        self._state.headers.update(headers)

    async def _submit(self, requests: tuple[Request, ...]) -> list[RequestStream]:
        """All prompts of a call or none."""
        streams: list[RequestStream] = []
        try:
            streams.extend(map(self._gateway.engine.submit, requests))
        except EngineError:
            for stream in streams:
                await stream.aclose()
            raise
        return streams

    async def _give_up(
        self, answer: OutputStream, account: LedgerReservation, outcome: Outcome, ending: str
    ) -> None:
        """After any other ending: cancel what runs, settle what was not. Both may be done already.
        Whoever leaves twice waits for it too, so that his request's line has its tokens."""
        await answer.cancel()
        outcome.tell(answer, ending)
        if account.is_open:
            with suppress(LedgerUnavailable):  # the hold stays and is closed at the next start
                await account.settle(ending, answer.usage_so_far(), answer.first_token_s)
                self._state.settled_s = self._gateway.clock()

    def _see(self, deltas: Sequence[Delta]) -> None:
        """What of an answer on its way others must know."""
        for delta in deltas:
            if isinstance(delta, ChoiceEnd):
                self._state.finish_reasons[delta.index] = delta.reason
            elif isinstance(delta, Begin) and self._begun is not None:
                self._begun(delta.usage.physical_cached)

    # -- the two shapes of an answer ------------------------------------------------------------

    async def _unary(
        self, answer: OutputStream, encoder: Encoder, account: LedgerReservation, outcome: Outcome
    ) -> web.StreamResponse:
        deltas = await answer.whole(self._see)
        body = encoder.unary(deltas)
        if self._named is not None:
            self._named.record(body)
        await self._close(deltas, answer, account, outcome)
        self._state.settled_s = self._gateway.clock()
        return await send(self._request, 200, body, self._head(is_stream=False))

    def _head(self, *, is_stream: bool) -> dict[str, str]:
        """What it is, and what the cache did for it."""
        content_type = self._dialect.stream_content_type if is_stream else "application/json"
        headers = {"Content-Type": content_type}
        if is_stream:
            headers["X-Accel-Buffering"] = "no"
        if self._contracts:
            headers[CACHE_HEADER] = cache_header(self._contracts)
        return headers

    async def _stream(
        self, answer: OutputStream, encoder: Encoder, account: LedgerReservation, outcome: Outcome
    ) -> web.StreamResponse:
        """Server-sent events. Until the first one, an error is still a plain HTTP answer."""
        interval_s = self._gateway.config.server.stream_keep_alive_s
        connection = self._request[CONNECTION]
        following = self._gateway.journal.following(self._state.request_id, answer, connection)
        try:
            async with aclosing(answer.batches(interval_s)) as batches:
                with following as progress:
                    async for batch in batches:
                        progress.is_behind = True
                        await self._pass_on(batch, answer, encoder, account, outcome)
                        progress.wrote()
        except (Refusal, EngineError, LedgerUnavailable) as error:
            await self._break_off(encoder, error)
        assert self._response is not None, "a whole answer has bytes"
        return self._response

    async def _pass_on(
        self,
        batch: Sequence[Delta] | None,
        answer: OutputStream,
        encoder: Encoder,
        account: LedgerReservation,
        outcome: Outcome,
    ) -> None:
        """What came at once in one write; the last one waits for the ledger. None: nothing came."""
        if batch is None:
            await self._send(self._dialect.keep_alive())
            return
        self._see(batch)
        is_last = bool(batch) and isinstance(batch[-1], End)
        data = b"".join(map(encoder.stream, batch))
        if is_last:
            data += encoder.close()
        if self._named is not None:
            self._named.record(data)
        if is_last:
            await self._close(batch, answer, account, outcome)
            self._state.settled_s = self._gateway.clock()
        if data:
            await self._send(data)
        self._state.is_complete = is_last

    async def _break_off(self, encoder: Encoder, error: Exception) -> None:
        """Tell the client inside the stream, then break the connection: half is not whole."""
        if self._response is None:
            raise error
        refusal = refusal_of(error) or Refusal(
            Kind.INTERNAL, "internal_error", "The answer broke off."
        )
        self._state.ending, self._state.code = "failed", refusal.code
        await self._send(encoder.error_event(refusal))
        self._response.force_close()

    async def _send(self, data: bytes) -> None:
        if self._named is not None and self._named.is_left:
            return
        try:
            if self._response is None:
                self._response = streamed(self._request, self._head(is_stream=True))
                await begin(self._request, self._response)
            await write(self._request, self._response, data)
        except ClientGone:
            if self._named is None:
                raise
            self._named.is_left = True

    def _close(
        self,
        deltas: Sequence[Delta],
        answer: OutputStream,
        account: LedgerReservation,
        outcome: Outcome,
    ) -> asyncio.Future[None]:
        """Hand in the entry of a good answer, and what is kept of a named one; when it is durable
        its last bytes may leave. They have been made already: what cannot be said is not charged.
        What can be counted is, while the ledger writes."""
        last = deltas[-1]
        assert isinstance(last, End), "a whole answer ends with its usage"
        keeping: Keeping | None = None
        if self._named is not None:
            head = self._head(is_stream=self._state.is_stream)
            keeping = self._named.keeping(head, self._gateway.wall())
        settled = account.settle("done", last.usage, answer.first_token_s, keeping)
        outcome.count(answer)
        return settled

    # -- named by its client --------------------------------------------------------------------

    async def _replay(self, kept: KeptAnswer, identity: Identity) -> web.StreamResponse:
        """What was answered before. It counts as a request, and as nothing else."""
        reservation = self._reserve(identity, rate_limits.NOTHING)
        reservation.settle(rate_limits.NOTHING)
        self._say_limits(reservation.status())
        self._state.operation, self._state.ending = "", "replayed"
        ids = self._dialect.headers(self._state.request_id)
        return await replay(self._request, kept, ids, is_stream=self._state.is_stream)


def _shutting_down() -> Refusal:
    message = "This server is shutting down."
    return Refusal(Kind.BUSY, "shutting_down", message, retry_after_s=5.0)
