"""One sample of an answer: its tokens become text, and are counted.

Text comes out as soon as it is certain: a stop token may yet be text, and what may begin a stop
string waits. It knows no events and nothing of other samples; `stream` has one for each.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from engine.api import FinishReason, SampledToken, TokenLogprob
from gateway.dialects.canonical import Call, Text, TokenText
from gateway.generation.output_parser import OutputParser
from gateway.prompt import Renderer
from gateway.prompt.detokenizer import Detokenizer


class Choice:
    """One sample's text on its way out, and the tokens that spelt it."""

    def __init__(
        self, index: int, sample: int, call: Call, renderer: Renderer, output: OutputParser
    ) -> None:
        self.index = index
        self.sample = sample
        self.output = output
        own = () if call.generation.ignore_eos else renderer.stop_token_ids
        self._stops = frozenset(own + call.generation.stop_token_ids)
        self._wants_logprobs = call.generation.sampling.logprobs is not None
        ranks = call.generation.samples > call.generation.choices
        self._is_plain = not (self._wants_logprobs or call.generation.stop or ranks)
        self._renderer = renderer
        self._text = renderer.detokenizer(call.generation.stop, shows_markers=output.reads_calls)
        self.passed_on = PassedOn(self._text, output)
        self._last_stop: SampledToken | None = None
        self._waiting: deque[tuple[int, TokenText]] = deque()
        self.tokens = 0
        self.is_over = False
        self.logprob = 0.0

    def push(self, tokens: Sequence[SampledToken]) -> Text | None:
        """The text that is certain now; after it `stopped_by` may be set.

        A stop token is silent if it ends the sample, and is text if the sample goes on (before its
        `min_tokens`): so the latest one waits.
        """
        if self._is_plain and self._last_stop is None:
            ids = [token.token_id for token in tokens]
            if self._stops.isdisjoint(ids):
                return self._push_plain(ids)
        pieces = []
        for token in tokens:
            if self._last_stop is not None:
                pieces.append(self._spell(self._last_stop))
                self._last_stop = None
            if self.stopped_by is not None:
                break
            self.tokens += 1
            self.logprob += token.logprob or 0.0
            if token.token_id in self._stops:
                self._last_stop = token
            else:
                pieces.append(self._spell(token))
        return self._delta("".join(pieces))

    def _push_plain(self, ids: list[int]) -> Text | None:
        """What nearly every step is: tokens that are only text."""
        self.tokens += len(ids)
        text = self._text.push_all(ids)
        return Text(self.index, text) if text else None

    def steps(self, tokens: Sequence[SampledToken]) -> Iterable[Sequence[SampledToken]]:
        """One token at a time where it matters with which of them a call ends."""
        if self.output.reads_calls and (self._wants_logprobs or not self.output.parallel):
            return ([token] for token in tokens)
        return (tokens,)

    def finish(self, reason: FinishReason) -> Text | None:
        """What was held back."""
        piece = ""
        if self._last_stop is not None and reason != "stop":
            piece = self._spell(self._last_stop)
        return self._delta(piece + self._text.finish(), is_last=True)

    @property
    def spelt_tokens(self) -> int:
        """All but one that waits to be text or the end."""
        return self.tokens - (self._last_stop is not None)

    @property
    def stopped_by(self) -> str | None:
        """The stop string that was found."""
        return self._text.stopped_by

    def _spell(self, token: SampledToken) -> str:
        if self._wants_logprobs:
            self._waiting.append((self._text.decoded, token_text(token, self._renderer)))
        return self._text.push(token.token_id)

    def _delta(self, text: str, *, is_last: bool = False) -> Text | None:
        """Tokens go with the first of their characters; a stop string's go nowhere."""
        everything = is_last and self.stopped_by is None
        ready = []
        while self._waiting and (everything or self._waiting[0][0] < self._text.released):
            ready.append(self._waiting.popleft()[1])
        return Text(self.index, text, tuple(ready)) if text or ready else None


def token_text(token: SampledToken, renderer: Renderer) -> TokenText:
    """A token with its logprobs, in bytes."""

    def alternative(top: TokenLogprob) -> TokenText:
        return TokenText(top.token_id, _bytes_of(top.token_id, renderer), top.logprob)

    return TokenText(
        token.token_id,
        _bytes_of(token.token_id, renderer),
        token.logprob,
        tuple(alternative(top) for top in token.top),
    )


def _bytes_of(token_id: int, renderer: Renderer) -> bytes:
    return renderer.token_bytes(token_id) or renderer.special_text(token_id).encode()


class PassedOn:
    """One choice's."""

    __slots__ = ("_before_call", "_calls", "_output", "_text", "_tokens")

    def __init__(self, text: Detokenizer, output: OutputParser) -> None:
        self._text = text
        self._output = output
        self._before_call = 0
        self._calls = 0
        self._tokens = 0

    def upto(self, tokens: int) -> int:
        """Of so many tokens, which are all that its text was spelt by, the first that have been
        given out; of those that are held for now perhaps fewer than could be said."""
        if self._text.released and not (self._calls or self._is_holding()):
            self._tokens = tokens
        return self._tokens

    def note(self, tokens: int) -> None:
        """The same, where calls are read: to be told after each piece of text, for a call counts
        whole, and with what comes behind it. Not every dialect writes it in pieces."""
        if self._output.calls > self._calls:
            self._calls, self._tokens = self._output.calls, self._before_call
        if not self._is_holding():
            self._before_call = tokens

    def _is_holding(self) -> bool:
        return self._text.is_holding or self._output.is_holding
