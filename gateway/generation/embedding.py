"""One request for embeddings: parse, tokenize, look up, hold, encode, settle, send.

It has the same admission as a generation (a place among the tenant's requests, its rate limits, its
budget, an idempotency key) and the same ledger: one entry, however it ends. An answer is charged
when it is complete and before its first byte leaves; a request that ends before has delivered
nothing and is charged nothing. The chat model's engine takes no part. `gateway.api.generate` calls
it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from aiohttp import web

from gateway.dialects.canonical import UsageRecord
from gateway.dialects.families import embeddings as dialect
from gateway.dialects.validation import invalid_field
from gateway.embeddings.embedder import Embedder, TextLookup, cut_vector
from gateway.embeddings.text_tokenizer import SparseTextError, TokenizedText
from gateway.engines.served_models import ServedModels
from gateway.errors import TOO_LONG, Kind, Refusal
from gateway.generation.delivery import AnswerDelivery
from gateway.generation.preparation import INLINE_CHARS_MAX
from gateway.generation.serving import Serving
from gateway.generation.usage import CACHE_HEADER, IGNORED_HEADER
from gateway.http.request_body import BODY_SHARE, read_body
from gateway.http.request_context import STATE, RequestState, identity_of, request_metadata
from gateway.http.response import ClientGone
from gateway.ledger.metering import LedgerReservation
from gateway.preparation_pool import PreparationPool
from gateway.retention_classes import BEST_EFFORT
from tenancy.errors import LedgerUnavailable, TenancyError
from tenancy.limits import NO_DEMAND, Demand
from tenancy.types import Identity

TRUNCATED_HEADER = "X-Trunkline-Truncated"
"""Names the inputs that were cut at the model's limit, by index, and their number."""
TRUNCATED_SHOWN = 20

INPUT_CHARS = 32
"""How many characters an input counts as, however short it is."""
TOKENS_MAX = 300_000
"""Most tokens of one request."""
INLINE_NUMBERS_MAX = 4_096
"""Numbers of an answer that the event loop encodes; more are encoded in a thread."""
NOTHING = UsageRecord(total_in=0, read={}, fresh=0, out=0, physical_cached=0)


class EmbeddingRequest:
    """One request from its body to its last byte."""

    def __init__(self, serving: Serving, request: web.BaseRequest) -> None:
        self._serving, self._gateway = serving, serving.gateway
        self._request = request
        self._state: RequestState = request[STATE]
        self._delivery = AnswerDelivery(request)
        self._head = {"Content-Type": "application/json"}

    @property
    def _identity(self) -> Identity:
        return identity_of(self._request)

    async def run(self) -> web.StreamResponse:
        """Read and parse the request, then execute it. Raises Refusal, and what the ledger and the
        limits raise."""
        gateway, state, embedder = self._gateway, self._state, self._gateway.embeddings
        tenant_id, serving = self._identity.tenant.tenant_id, self._serving
        if embedder is None:
            message = "Embeddings are not offered: the server's embeddings.model is not set."
            raise Refusal(Kind.NOT_FOUND, "not_served", message)
        serving.check_open()
        state.is_generation = True
        body = await read_body(self._request)
        metadata = request_metadata(self._request, gateway.config)
        call = await serving.preparation.parse(tenant_id, dialect.parse, body, metadata)
        state.asked_model = call.model
        check_embedding_model(gateway.models, embedder, call.model)
        state.model = embedder.name
        _check_dimensions(embedder, call.dimensions)
        delivery = await serving.delivery(self._request, body, self._identity)
        if isinstance(delivery, web.StreamResponse):
            return delivery
        self._delivery = delivery
        del body
        texts = await tokenize(gateway.preparations, embedder, tenant_id, call)
        self._request[BODY_SHARE].release()
        _check_sizes(embedder, call, texts)
        self._set_head(call, texts)
        serving.check_open()
        return await delivery.run(self._execute(embedder, call, texts))

    async def _execute(
        self, embedder: Embedder, call: dialect.EmbeddingCall, texts: Sequence[TokenizedText]
    ) -> web.StreamResponse:
        """Run a request from the rate-limit reservation to the last byte."""
        gateway, state, identity = self._gateway, self._state, self._identity
        tenant_id, limits = identity.tenant.tenant_id, self._serving.limits
        lookup = embedder.look_up(tenant_id, identity.workspace, texts)
        hold = LedgerReservation(
            gateway.ledger,
            gateway.wall,
            state.request_id,
            identity,
            embedder.name,
            most=Demand(lookup.tokens, 0),
            dialect=dialect.SHAPE.name,
            claim=self._delivery.claim,
        )
        if gateway.attribution is not None and call.client_user:
            gateway.attribution.note(state.request_id, tenant_id, call.client_user)
        demand = Demand(lookup.tokens - lookup.cached_tokens, 0)
        place = await limits.reserve(state, demand)
        gateway.running.enter(tenant_id)
        ending = "failed"
        try:
            try:
                await hold.open()
                state.submitted_s = gateway.clock()
                answer, record = await self._embed(embedder, call, lookup)
            except (TenancyError, Refusal):
                place.settle(NO_DEMAND)
                raise
            finally:
                limits.report(state)
            settled = self._settle(hold, answer, record, lookup)
            embedder.store(lookup)
            await settled
            state.settled_s = gateway.clock()
            place.settle(demand)
            response = await self._delivery.send(answer, self._head)
            state.is_complete = True
            return response
        except (asyncio.CancelledError, ClientGone):
            ending = "cancelled"
            place.settle(demand)  # it is not charged, but the encoder worked for it
            raise
        except Refusal as error:
            ending = error.code
            raise
        finally:
            gateway.running.leave(tenant_id)
            if hold.is_open:
                await gateway.work.run_to_completion(_close(hold, ending))

    async def _embed(
        self, embedder: Embedder, call: dialect.EmbeddingCall, lookup: TextLookup
    ) -> tuple[bytes, UsageRecord]:
        """Return the answer and its usage. Raises Refusal without an encoder or after the longest
        wait."""
        gateway = self._gateway
        limit_s = gateway.config.limits.queue_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                vectors = await embedder.complete(lookup)
        except TimeoutError:
            message = f"The request waited longer than {limit_s:g} s to be embedded."
            raise Refusal(Kind.BUSY, "queue_timeout", message, retry_after_s=5.0) from None
        cached = lookup.cached_tokens
        record = UsageRecord(
            total_in=lookup.tokens,
            read={BEST_EFFORT: cached} if cached else {},
            fresh=lookup.tokens - cached,
            out=0,
            physical_cached=cached,
        )
        dimensions = call.dimensions or embedder.card.dimensions
        if len(vectors) * dimensions <= INLINE_NUMBERS_MAX:
            return self._encode(call, vectors, record), record
        encode = partial(self._encode, call, vectors, record)
        return await gateway.preparations.run_admitted(lookup.tenant_id, encode), record

    def _encode(
        self, call: dialect.EmbeddingCall, vectors: Sequence[bytes], record: UsageRecord
    ) -> bytes:
        """Return the answer's body, and record it. Runs in a thread, too:
        it touches nothing else."""
        answer = _answer(call, vectors, record)
        self._delivery.record(answer)
        return answer

    def _settle(
        self, hold: LedgerReservation, answer: bytes, record: UsageRecord, lookup: TextLookup
    ) -> asyncio.Future[None]:
        """Write the entry; return a future that is done when it is durable."""
        state = self._state
        self._head[CACHE_HEADER] = f"read={record.read_tokens()}; fresh={record.fresh}"
        kept = self._delivery.to_store(lambda: self._head, self._gateway.wall())
        settled = hold.settle("done", record, None, kept)
        state.usage = record
        metrics = self._gateway.metrics
        tenant = metrics.tenant_label(self._identity.tenant.name)
        counts = len(lookup.vectors), record.total_in, record.physical_cached
        metrics.embeddings.add(tenant, *counts)
        return settled

    def _set_head(self, call: dialect.EmbeddingCall, texts: Sequence[TokenizedText]) -> None:
        cut = [index for index, text in enumerate(texts) if not text.is_whole]
        if cut:
            shown = ", ".join(map(str, cut[:TRUNCATED_SHOWN]))
            self._head[TRUNCATED_HEADER] = f"{len(cut)} of {len(texts)} inputs: {shown}"
        if call.ignored:
            self._head[IGNORED_HEADER] = ", ".join(call.ignored)


def check_embedding_model(models: ServedModels, embedder: Embedder, name: str) -> None:
    """Check that a name is the embedding model's. Raises Refusal if it is not."""
    if name in embedder.names:
        return
    names = ", ".join(embedder.names)
    if name in models.names:
        message = f"model: {name[:80]!r} is a chat model; expected an embedding model: {names}."
        raise Refusal(Kind.BAD, "model_not_supported", message, param="model")
    message = f"Model not found: the model `{name[:80]}` does not exist; expected one of: {names}."
    raise Refusal(Kind.NOT_FOUND, "model_not_found", message, param="model")


async def tokenize(
    pool: PreparationPool, embedder: Embedder, tenant_id: int, call: dialect.EmbeddingCall
) -> list[TokenizedText]:
    """Return the tokens of a call's inputs; of long ones in a thread. Raises Refusal for a token id
    outside the vocabulary, and for a text of spaces without end."""
    work = partial(_tokenize, embedder, call)
    if sum(INPUT_CHARS + len(one) for one in call.inputs) <= INLINE_CHARS_MAX:
        return work(lambda: False)
    return await pool.run(tenant_id, work)


def _tokenize(
    embedder: Embedder, call: dialect.EmbeddingCall, is_abandoned: Callable[[], bool]
) -> list[TokenizedText]:
    found: list[TokenizedText] = []
    for index, one in enumerate(call.inputs):
        if is_abandoned():
            break
        found.append(_tokens_of(embedder, one, call.path(index)))
    return found


def _tokens_of(embedder: Embedder, one: str | tuple[int, ...], path: str) -> TokenizedText:
    tokenizer = embedder.tokenizer
    try:
        return tokenizer.tokenize(one) if isinstance(one, str) else tokenizer.wrap(one)
    except SparseTextError as error:
        problem = f"too few words in {len(one)} characters: {error}; expected more words."
        raise invalid_field(path, problem) from None
    except ValueError as error:
        size = tokenizer.vocab_size
        problem = f"token id {error.args[0]} is outside the vocabulary (0 to {size - 1})."
        raise invalid_field(path, problem) from None


def _check_sizes(
    embedder: Embedder, call: dialect.EmbeddingCall, texts: Sequence[TokenizedText]
) -> None:
    """Refuse a request of too many tokens, and a text that is too long where none is cut."""
    tokens = sum(text.tokens for text in texts)
    if tokens > TOKENS_MAX:
        message = f"The inputs have {tokens} tokens; expected at most {TOKENS_MAX} per request."
        raise Refusal(Kind.BAD, TOO_LONG, message, param="input", size=(tokens, TOKENS_MAX))
    if embedder.settings.truncate:
        return
    limit = embedder.card.tokens_max
    for index, text in enumerate(texts):
        if not text.is_whole:
            path = call.path(index)
            message = f"{path}: the text has more than the model's {limit} tokens."
            raise Refusal(Kind.BAD, TOO_LONG, message, param=path, size=(limit + 1, limit))


def _check_dimensions(embedder: Embedder, dimensions: int | None) -> None:
    card = embedder.card
    if dimensions is None or dimensions in (card.dimensions, *card.cuts):
        return
    allowed = ", ".join(map(str, (*card.cuts, card.dimensions)))
    problem = f"{dimensions}; this model's vectors may have {allowed} dimensions."
    if not card.cuts:
        problem = (
            f"{dimensions}; this model was not trained to have its vectors cut; expected"
            f" {card.dimensions}, or no value."
        )
    raise invalid_field("dimensions", problem)


def _answer(call: dialect.EmbeddingCall, vectors: Sequence[bytes], record: UsageRecord) -> bytes:
    """Return the answer's body."""
    if call.dimensions is not None and vectors and 4 * call.dimensions < len(vectors[0]):
        vectors = [cut_vector(vector, call.dimensions) for vector in vectors]
    items = [
        dialect.encode_vector(vector, index, call.encoding_format)
        for index, vector in enumerate(vectors)
    ]
    return dialect.join_answer(call.model, items, record)


async def _close(hold: LedgerReservation, ending: str) -> None:
    """Settle a request that ended without an answer: nothing was delivered."""
    with suppress(LedgerUnavailable):  # the hold stays and is settled at the next start
        await hold.settle(ending, NOTHING)
