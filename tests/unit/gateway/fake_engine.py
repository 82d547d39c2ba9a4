"""An engine that says what a test tells it to: real streams, scripted events, recorded commands.

For tests of what stands above the engine's door. Tests of whole requests use the real core over a
fake runner instead (`gateway.py`).
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
from engine.client.client import RequestStream


class FakeEngine:
    """Takes requests, sends what it is told, and remembers what it was asked."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.commands: list[Command] = []
        self.cancelled: list[str] = []
        self._streams: dict[str, RequestStream] = {}

    def submit(self, request: Request) -> RequestStream:
        """As `engine.client.client.Engine.submit`."""
        self.requests.append(request)
        return self.open(request.request_id)

    def open(self, request_id: str) -> RequestStream:
        """A stream without a request."""
        stream = RequestStream(request_id, self)
        self._streams[request_id] = stream
        return stream

    def post(self, command: Command) -> None:
        """What a stream sends up."""
        self.commands.append(command)

    def forget(self, request_id: str) -> None:
        """A reader has gone."""
        self.cancelled.append(request_id)

    @property
    def ended_samples(self) -> list[tuple[int, int]]:
        """(sample, output tokens) of each stop string that was reported."""
        return [(c.index, c.output_tokens) for c in self.commands if isinstance(c, EndSample)]

    # -- what a test makes it say ---------------------------------------------------------------

    def say(self, request_id: str, *events: Event) -> None:
        """Any events, in order."""
        for event in events:
            self._streams[request_id].push(event)

    def start(self, request_id: str, prompt_tokens: int, cached_tokens: int = 0) -> None:
        """First scheduled."""
        self.say(request_id, Started(request_id, prompt_tokens, cached_tokens))

    def tokens(self, request_id: str, sample: int, tokens: Iterable[int | SampledToken]) -> None:
        """New output tokens of a sample."""
        sampled = tuple(SampledToken(t) if isinstance(t, int) else t for t in tokens)
        self.say(request_id, Tokens(request_id, sample, sampled))

    def end(self, request_id: str, sample: int, reason: FinishReason, output_tokens: int) -> None:
        """A sample is over."""
        self.say(request_id, SampleEnded(request_id, sample, reason, output_tokens))

    def finish(
        self, request_id: str, usage: Usage | None = None, ending: Ending = "done", code: str = ""
    ) -> None:
        """The final event."""
        self.say(request_id, Finished(request_id, ending, usage or Usage(), code, code))

    def play(
        self,
        request_id: str,
        samples: Sequence[Sequence[int | SampledToken]],
        *,
        prompt_tokens: int = 4,
        cached_tokens: int = 0,
        reason: FinishReason = "length",
    ) -> None:
        """A whole good answer, all samples in step."""
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
