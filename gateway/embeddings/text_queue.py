"""Texts that wait for the encoder, with a turn for each tenant.

A batch takes texts of all tenants that wait, one each in turn, and of a tenant's requests in turn,
so that a request of two thousand texts holds up a single one by a batch at most. The tokens that
wait are bounded, and a tenant may hold half of what the others leave. It knows no socket and no
clock. `encoder_client` owns one.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from typing import NamedTuple

from gateway.errors import Kind, Refusal

SHARE_PARTS = 2
"""A tenant may hold one part in this many of the room that the others leave."""
BYTES_PER_TOKEN = 4
RETRY_AFTER_S = 5.0


class TextRequest:
    """The texts of one request, and the future of their vectors. Belongs to the event loop."""

    def __init__(
        self, tenant_id: int, texts: Sequence[bytes], future: asyncio.Future[None]
    ) -> None:
        self.tenant_id = tenant_id
        self.texts = texts
        self.future = future
        self.vectors: list[bytes] = [b""] * len(texts)
        self.taken = 0
        """How many of the texts have left in a batch; they leave in order."""
        self.deaths = 0
        """How many processes were lost with a text of this request."""
        self.is_suspect = False
        """No vector has arrived since the last of them: its texts leave in batches of their own."""
        self._missing = len(texts)

    def set_vector(self, index: int, vector: bytes) -> None:
        """Take a text's vector; the last one ends the request."""
        self.vectors[index] = vector
        self.is_suspect = False
        self._missing -= 1
        if not self._missing and not self.future.done():
            self.future.set_result(None)

    def fail(self, error: Exception) -> None:
        """End the request with an error, unless it has ended."""
        if not self.future.done():
            self.future.set_exception(error)


class QueuedText(NamedTuple):
    """One text of a request."""

    request: TextRequest
    place: int
    """Its index there."""

    @property
    def data(self) -> bytes:
        """The packed token ids."""
        return self.request.texts[self.place]


class TextQueue:
    """Waiting requests by tenant. Belongs to one event loop."""

    def __init__(self, tokens_max: int) -> None:
        self.tokens_max = tokens_max
        self.tokens = 0
        self._requests: OrderedDict[int, deque[TextRequest]] = OrderedDict()
        """The requests of each tenant that waits; the tenants in the order of their turns."""
        self._tokens_of: Counter[int] = Counter()

    def add(self, tenant_id: int, texts: Sequence[bytes]) -> TextRequest:
        """Append the texts of a request. O(texts). Raises Refusal without room for them."""
        tokens = _tokens(texts)
        own = self._tokens_of[tenant_id] + tokens
        others = self.tokens - self._tokens_of[tenant_id]
        if own * SHARE_PARTS > self.tokens_max - others:
            raise self._refusal(tokens, own)
        request = TextRequest(tenant_id, texts, asyncio.get_running_loop().create_future())
        self._requests.setdefault(tenant_id, deque()).append(request)
        self._count(tenant_id, tokens)
        return request

    def take(self, tokens_max: int) -> list[QueuedText]:
        """Take a batch of at most `tokens_max` tokens, or of one longer text; empty if no text
        waits.

        Each tenant gives a text in turn, of each of its requests in turn. O(texts taken).
        """
        batch: list[QueuedText] = []
        room = tokens_max
        while self._requests:
            tenant_id, requests = next(iter(self._requests.items()))
            text = QueuedText(requests[0], requests[0].taken)
            if (
                batch
                and text.request is not (first := batch[0].request)
                and (text.request.is_suspect or first.is_suspect)
            ):
                break
            size = len(text.data) // BYTES_PER_TOKEN
            if batch and size > room:
                break
            room -= size
            batch.append(text)
            requests[0].taken += 1
            self._count(tenant_id, -size)
            if requests[0].taken == len(requests[0].texts):
                requests.popleft()
            else:
                requests.rotate(-1)
            if requests:
                self._requests.move_to_end(tenant_id)
            else:
                del self._requests[tenant_id]
        return batch

    def put_back(self, batch: Sequence[QueuedText]) -> None:
        """Let texts of a lost process wait again, before all others of their tenants.

        Their requests are suspects until a vector of theirs arrives. O(texts of the requests).
        """
        for request in dict.fromkeys(text.request for text in reversed(batch)):
            first = min(text.place for text in batch if text.request is request)
            requests = self._requests.setdefault(request.tenant_id, deque())
            if request in requests:
                requests.remove(request)
            requests.appendleft(request)
            self._count(request.tenant_id, _tokens(request.texts[first : request.taken]))
            request.taken, request.is_suspect = first, True

    def remove(self, request: TextRequest) -> None:
        """Drop the texts of a request that have not been taken. Safe to repeat. O(requests of the
        tenant)."""
        requests = self._requests.get(request.tenant_id)
        if requests is None or request not in requests:
            return
        requests.remove(request)
        self._count(request.tenant_id, -_tokens(request.texts[request.taken :]))
        if not requests:
            del self._requests[request.tenant_id]

    def fail_all(self, error: Exception) -> None:
        """End every waiting request with an error."""
        for requests in self._requests.values():
            for request in requests:
                request.fail(error)
        self._requests.clear()
        self._tokens_of.clear()
        self.tokens = 0

    def check(self) -> None:
        """Raise AssertionError if the counts disagree. O(texts)."""
        for tenant_id, requests in self._requests.items():
            assert requests, f"tenant {tenant_id} waits without a request"
            left = sum(_tokens(request.texts[request.taken :]) for request in requests)
            assert left == self._tokens_of[tenant_id], f"tenant {tenant_id} has {left} tokens"
        assert self.tokens == self._tokens_of.total()
        assert self._tokens_of.keys() == self._requests.keys()

    def _count(self, tenant_id: int, tokens: int) -> None:
        self.tokens += tokens
        self._tokens_of[tenant_id] += tokens
        if not self._tokens_of[tenant_id]:
            del self._tokens_of[tenant_id]

    def _refusal(self, tokens: int, own: int) -> Refusal:
        most = self.tokens_max // SHARE_PARTS
        if own > most:
            message = (
                f"Too many tokens to embed at once: {own} with this request, limit {most};"
                " expected fewer or smaller requests at a time."
            )
            return Refusal(Kind.RATE, "rate_limit_exceeded", message, retry_after_s=RETRY_AFTER_S)
        message = (
            f"The server is overloaded: {self.tokens} tokens wait to be embedded, this request has"
            f" {tokens}, limit {self.tokens_max}."
        )
        return Refusal(Kind.BUSY, "overloaded", message, retry_after_s=RETRY_AFTER_S)


def _tokens(texts: Sequence[bytes]) -> int:
    return sum(map(len, texts)) // BYTES_PER_TOKEN
