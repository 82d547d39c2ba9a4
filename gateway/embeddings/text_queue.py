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


class TextJob:
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
        self._missing = len(texts)

    def set_vector(self, index: int, vector: bytes) -> None:
        """Take a text's vector; the last one ends the job."""
        self.vectors[index] = vector
        self._missing -= 1
        if not self._missing and not self.future.done():
            self.future.set_result(None)

    def fail(self, error: Exception) -> None:
        """End the job with an error, unless it has ended."""
        if not self.future.done():
            self.future.set_exception(error)


class QueuedText(NamedTuple):
    """One text of a job. `place`: its index there."""

    job: TextJob
    place: int

    @property
    def data(self) -> bytes:
        """The packed token ids."""
        return self.job.texts[self.place]


class TextQueue:
    """Waiting jobs by tenant. Belongs to one event loop."""

    def __init__(self, tokens_max: int) -> None:
        self.tokens_max = tokens_max
        self.tokens = 0
        self._jobs: OrderedDict[int, deque[TextJob]] = OrderedDict()
        """The jobs of each tenant that waits; the tenants in the order of their turns."""
        self._tokens_of: Counter[int] = Counter()

    def add(self, tenant_id: int, texts: Sequence[bytes]) -> TextJob:
        """Append the texts of a request. O(texts). Raises Refusal without room for them."""
        tokens = _tokens(texts)
        own = self._tokens_of[tenant_id] + tokens
        others = self.tokens - self._tokens_of[tenant_id]
        if own * SHARE_PARTS > self.tokens_max - others:
            raise self._refusal(tokens, own)
        job = TextJob(tenant_id, texts, asyncio.get_running_loop().create_future())
        self._jobs.setdefault(tenant_id, deque()).append(job)
        self._count(tenant_id, tokens)
        return job

    def take(self, tokens_max: int) -> list[QueuedText]:
        """Take a batch of at most `tokens_max` tokens, or of one longer text; empty if no text
        waits.

        Each tenant gives a text in turn, of each of its jobs in turn. O(texts taken).
        """
        batch: list[QueuedText] = []
        room = tokens_max
        while self._jobs:
            tenant_id, jobs = next(iter(self._jobs.items()))
            text = QueuedText(jobs[0], jobs[0].taken)
            size = len(text.data) // BYTES_PER_TOKEN
            if batch and size > room:
                break
            room -= size
            batch.append(text)
            jobs[0].taken += 1
            self._count(tenant_id, -size)
            if jobs[0].taken == len(jobs[0].texts):
                jobs.popleft()
            else:
                jobs.rotate(-1)
            if jobs:
                self._jobs.move_to_end(tenant_id)
            else:
                del self._jobs[tenant_id]
        return batch

    def remove(self, job: TextJob) -> None:
        """Drop the texts of a job that have not been taken. Safe to repeat. O(jobs of the
        tenant)."""
        jobs = self._jobs.get(job.tenant_id)
        if jobs is None or job not in jobs:
            return
        jobs.remove(job)
        self._count(job.tenant_id, -_tokens(job.texts[job.taken :]))
        if not jobs:
            del self._jobs[job.tenant_id]

    def fail_all(self, error: Exception) -> None:
        """End every waiting job with an error."""
        for jobs in self._jobs.values():
            for job in jobs:
                job.fail(error)
        self._jobs.clear()
        self._tokens_of.clear()
        self.tokens = 0

    def check(self) -> None:
        """Raise AssertionError if the counts disagree. O(texts)."""
        for tenant_id, jobs in self._jobs.items():
            assert jobs, f"tenant {tenant_id} waits without a job"
            left = sum(_tokens(job.texts[job.taken :]) for job in jobs)
            assert left == self._tokens_of[tenant_id], f"tenant {tenant_id} has {left} tokens"
        assert self.tokens == self._tokens_of.total()
        assert self._tokens_of.keys() == self._jobs.keys()

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
