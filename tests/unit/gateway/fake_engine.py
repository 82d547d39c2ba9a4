"""A fake engine client for tests: real streams, scripted events, recorded commands.

For tests of code above the engine's client. Tests of whole requests use the real core over a fake
runner instead (`gateway_fixture`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from engine.api import (
    Command,
    Ending,
    EndSample,
    Event,
    Finished,
    FinishReason,
    Request,
    SampledToken,
    SampleEnded,
    Started,
    Tokens,
    Usage,
)
from engine.client.request_stream import RequestStream


class FakeEngine:
    """Accepts requests, emits the events that a test gives, and records requests and commands."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.commands: list[Command] = []
        self.cancelled: list[str] = []
        self._streams: dict[str, RequestStream] = {}

    def submit(self, request: Request) -> RequestStream:
        """See `engine.client.client.Engine.submit`."""
        self.requests.append(request)
        return self.open(request.request_id)

    def open(self, request_id: str) -> RequestStream:
        """Open a stream without a request."""
        stream = RequestStream(request_id, self)
        self._streams[request_id] = stream
        return stream

    def post(self, command: Command) -> None:
        """Record a command of a stream."""
        self.commands.append(command)

    def forget(self, request_id: str) -> None:
        """Record that a reader has left."""
        self.cancelled.append(request_id)

    @property
    def ended_samples(self) -> list[tuple[int, int]]:
        """(sample, output tokens) of each reported stop string."""
        return [(c.index, c.output_tokens) for c in self.commands if isinstance(c, EndSample)]

    # -- scripted events -------------------------------------------------------------------------

    def emit(self, request_id: str, *events: Event) -> None:
        """Emit events in order."""
        for event in events:
            self._streams[request_id].push(event)

    def start(self, request_id: str, prompt_tokens: int, cached_tokens: int = 0) -> None:
        """Emit that the request was scheduled."""
        self.emit(request_id, Started(request_id, prompt_tokens, cached_tokens))

    def tokens(self, request_id: str, sample: int, tokens: Iterable[int | SampledToken]) -> None:
        """Emit output tokens of a sample."""
        sampled = tuple(SampledToken(t) if isinstance(t, int) else t for t in tokens)
        self.emit(request_id, Tokens(request_id, sample, sampled))

    def end(self, request_id: str, sample: int, reason: FinishReason, output_tokens: int) -> None:
        """Emit the end of a sample."""
        self.emit(request_id, SampleEnded(request_id, sample, reason, output_tokens))

    def finish(
        self, request_id: str, usage: Usage | None = None, ending: Ending = "done", code: str = ""
    ) -> None:
        """Emit the final event."""
        self.emit(request_id, Finished(request_id, ending, usage or Usage(), code, code))

    def play(
        self,
        request_id: str,
        samples: Sequence[Sequence[int | SampledToken]],
        *,
        prompt_tokens: int = 4,
        cached_tokens: int = 0,
        reason: FinishReason = "length",
    ) -> None:
        """Emit a complete response, all samples in step."""
        self.start(request_id, prompt_tokens, cached_tokens)
        for position in range(max(map(len, samples))):
            for sample, tokens in enumerate(samples):
                self.tokens(request_id, sample, tokens[position : position + 1])
        for sample, tokens in enumerate(samples):
            self.end(request_id, sample, reason, len(tokens))
        usage = Usage(
            prompt_tokens=prompt_tokens,
            cached_tokens=cached_tokens,
            computed_tokens=prompt_tokens - cached_tokens,
            output_tokens=sum(map(len, samples)),
        )
        self.finish(request_id, usage)
