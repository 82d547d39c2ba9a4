"""Client of the encoder process: texts go in as packed token ids, vectors come out.

What waits when a batch returns leaves together in the next one (`text_queue`). A process that dies
or that takes too long over a batch is replaced, and what waits is encoded by the next one. The
texts of a process that died are tried once more, in batches of their own: one of them may be the
reason. A request with texts in two such batches fails, and so does one in a batch that took too
long. It knows no text, no tenant but as a number, and no HTTP. `app.serve` opens one. It belongs to
one event loop.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from typing import Protocol

from engine.client.frame_wire import FrameWire
from engine.encoder.protocol import (
    EncodeBatch,
    EncodedBatch,
    EncoderReady,
    EncoderRejected,
    StartEncoder,
    read_from_encoder,
)
from engine.errors import ModelError
from engine.processes import COMPUTING
from engine.wire import encode_frame
from gateway.embeddings.text_queue import QueuedText, TextQueue
from gateway.errors import Kind, Refusal
from gateway.processes.child_process import ChildProcess, Report, RestartPolicy

COMMAND = (sys.executable, "-m", "engine.encoder.process")
VARIABLES = {"OMP_WAIT_POLICY": "passive"}
"""Torch's threads sleep where they wait for each other: the engine shares their cores."""
RESTARTS = RestartPolicy((0.1, 0.5, 1.0, 2.0, 5.0, 15.0, 60.0), first_starts_max=5)
BATCH_TOKENS = 1_024
"""Tokens of a batch: larger ones are no faster, and a short text waits for a whole one."""
BATCH_S = 60.0
"""Longest time of a batch. A process that takes longer is stuck and is replaced."""
LOAD_S = 3.0
"""Seconds that a client should wait for an encoder that is being started."""
DIED = "connection lost"
"""Why a process is lost that has closed its end."""
DEATHS_MAX = 2
"""Processes that may die with a text of a request before it fails."""
CLOSE_S = 2.0


class TextEncoder(Protocol):
    """Encodes texts: `EncoderProcess`, or a fake."""

    @property
    def is_ready(self) -> bool:
        """Whether a text is encoded now and not after a start."""

    @property
    def restarts(self) -> int:
        """Number of restarts."""

    @property
    def waiting_tokens(self) -> int:
        """Tokens of the texts that wait for a batch."""

    @property
    def batches(self) -> int:
        """Batches that were encoded."""

    async def encode(self, tenant_id: int, texts: Sequence[bytes]) -> list[bytes]:
        """Return the vectors of packed texts, as float32, in their order.

        Raises Refusal: BUSY without an encoder or without room, RATE for the tenant's own share,
        INTERNAL for a text whose vector is not finite.
        """

    async def close(self) -> None:
        """End the process; all requests fail. Safe to repeat."""


class EncoderProcess:
    """A `TextEncoder` over a model in a separate process."""

    def __init__(
        self,
        start: StartEncoder,
        waiting_tokens_max: int,
        report: Report,
        command: tuple[str, ...] = COMMAND,
        restarts: RestartPolicy = RESTARTS,
        batch_s: float = BATCH_S,
    ) -> None:
        self._start = start
        self._loop = asyncio.get_running_loop()
        self._child = ChildProcess(
            "encoder", command, restarts, report, self._run_process, variables=COMPUTING
        )
        self._report, self._batch_s = report, batch_s
        self._queue = TextQueue(waiting_tokens_max)
        self._wire: FrameWire | None = None
        self._is_serving = False
        self._in_flight: list[QueuedText] = []
        self._is_scheduled = False
        self._deadline: asyncio.TimerHandle | None = None
        self._answer: asyncio.Future[EncoderReady | EncoderRejected] | None = None
        self._lost = asyncio.Event()
        self._lost_reason = ""
        self.batches = 0

    def open(self) -> None:
        """Keep a process running from now on. Returns at once."""
        self._child.start()

    async def wait_ready(self) -> None:
        """Wait until the first process serves. Raises ModelError, or StartLimit."""
        await self._child.wait_ready()

    @property
    def pid(self) -> int:
        """Id of the running process; 0 without a process."""
        return self._child.pid

    @property
    def is_ready(self) -> bool:
        """See `TextEncoder`."""
        return self._is_serving

    @property
    def restarts(self) -> int:
        """See `TextEncoder`."""
        return self._child.restarts

    @property
    def waiting_tokens(self) -> int:
        """See `TextEncoder`."""
        return self._queue.tokens

    async def encode(self, tenant_id: int, texts: Sequence[bytes]) -> list[bytes]:
        """See `TextEncoder`. A cancelled caller leaves the queue at once."""
        if not self._is_serving:
            raise self._starting()
        request = self._queue.add(tenant_id, texts)
        self._schedule()
        try:
            await request.future
        finally:
            self._queue.remove(request)
        return request.vectors

    async def close(self) -> None:
        """See `TextEncoder`."""
        await self._child.stop()
        if self._wire is not None:
            self._wire.end()
        await self._child.end(CLOSE_S)
        self._lose("closed")
        self._queue.fail_all(self._starting())

    # -- batches --------------------------------------------------------------------------------

    def _schedule(self) -> None:
        """Send a batch at the end of this turn of the loop, so that what arrives together leaves
        together."""
        if not self._is_scheduled and not self._in_flight and self._is_serving:
            self._is_scheduled = True
            self._loop.call_soon(self._send_batch)

    def _send_batch(self) -> None:
        self._is_scheduled = False
        if self._in_flight or self._wire is None or not self._is_serving:
            return
        self._in_flight = self._queue.take(BATCH_TOKENS)
        if self._in_flight:
            texts = [text.data for text in self._in_flight]
            self._wire.send(encode_frame(EncodeBatch(self.batches, texts)))
            self._deadline = self._loop.call_later(self._batch_s, self._lose, "stuck")

    def _take_batch(self, encoded: EncodedBatch) -> None:
        batch, self._in_flight = self._in_flight, []
        assert len(encoded.vectors) == len(batch), "a batch has one vector for each text"
        self._stop_deadline()
        self.batches += 1
        for text, vector in zip(batch, encoded.vectors, strict=True):
            if vector:
                text.request.set_vector(text.place, vector)
            else:
                self._queue.remove(text.request)
                text.request.fail(_not_finite())
        self._send_batch()

    def _stop_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    # -- one process ----------------------------------------------------------------------------

    def _on_frame(self, frame: bytes) -> None:
        message = read_from_encoder(frame)
        if isinstance(message, EncodedBatch):
            self._take_batch(message)
        elif self._answer is not None and not self._answer.done():
            self._answer.set_result(message)

    def _lose(self, reason: str = DIED) -> None:
        """Give up the process, and let the texts of its batch wait again or fail."""
        self._stop_deadline()
        self._is_serving = False
        if self._wire is not None:
            self._wire.close()
            self._wire = None
        batch, self._in_flight = self._in_flight, []
        for request in dict.fromkeys(text.request for text in batch):
            request.deaths += 1
            if reason != DIED or request.deaths >= DEATHS_MAX:
                self._queue.remove(request)
                request.fail(self._died())
        self._queue.put_back([text for text in batch if not text.request.future.done()])
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(EncoderRejected("", reason))
        self._lost_reason = reason
        self._lost.set()

    async def _run_process(self) -> str:
        """Run one process from its start until it is lost; see `ChildProcess`."""
        self._lost.clear()
        try:
            spawned = await self._child.spawn(variables=VARIABLES)
            wire = FrameWire(spawned, self._on_frame, self._lose)
        except OSError as error:
            return str(error.strerror)
        self._wire, self._answer = wire, self._loop.create_future()
        wire.send(encode_frame(self._start))
        answer = await self._answer
        if isinstance(answer, EncoderRejected):
            self._lose(answer.message)
            if answer.code:
                raise ModelError(answer.code, answer.message)
            return answer.message
        self._is_serving = True
        self._child.set_ready(dimensions=answer.dimensions)
        self._schedule()
        await self._lost.wait()
        return self._lost_reason

    def _starting(self) -> Refusal:
        after_s = LOAD_S + self._child.pause_left_s
        message = "The embedding model is starting. Try again later."
        return Refusal(Kind.BUSY, "engine_starting", message, retry_after_s=after_s)

    def _died(self) -> Refusal:
        message = "The embedding model stopped while it worked on this request."
        return Refusal(Kind.BUSY, "engine_restarting", message, retry_after_s=LOAD_S)


def _not_finite() -> Refusal:
    message = "The embedding model computed a vector that is not finite: its weights are damaged."
    return Refusal(Kind.INTERNAL, "internal_error", message)
