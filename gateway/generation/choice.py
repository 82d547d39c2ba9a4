"""One choice of an answer: decode its tokens to text, find stop tokens, stop strings and calls.

Text is released as soon as it is certain: a stop token may still become text, and the beginning of
a stop string or of a tool call waits. The module knows no events and no other choices;
`gateway.generation.output_stream` has one `Choice` per sample.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import Literal

from engine.api import FinishReason, SampledToken, TokenLogprob
from gateway.dialects.canonical import (
    Call,
    CallText,
    Delta,
    OutputFormat,
    Prompt,
    Text,
    Thought,
    TokenText,
)
from gateway.prompt import Renderer
from gateway.prompt.detokenizer import Detokenizer
from gateway.structured_output.grammars import callable_tools
from gateway.structured_output.output_check import satisfies
from gateway.structured_output.thinking import HarmonySplitter, ThinkingSplitter
from gateway.structured_output.tool_call_parser import Cut, ParsedPiece, ToolCallParser

_ANY_FORMAT = OutputFormat()


class Choice:
    """One sample's tokens and the text that they decode to."""

    def __init__(
        self, index: int, sample: int, call: Call, renderer: Renderer, output: OutputParser
    ) -> None:
        self.index = index
        self.sample = sample
        self.output = output
        own = () if call.generation.ignore_eos else renderer.card.stop_token_ids
        self._stops = frozenset(own + call.generation.stop_token_ids)
        self._wants_logprobs = call.generation.sampling.logprobs is not None
        is_ranked = call.generation.samples > call.generation.choices
        self._is_plain = not (self._wants_logprobs or call.generation.stop or is_ranked)
        self._renderer = renderer
        self._text = renderer.detokenizer(
            call.generation.stop,
            shows_markers=output.reads_calls,
            shows_thoughts=output.reads_thoughts,
        )
        self.delivered = DeliveredTokens(self._text, output)
        self._last_stop: SampledToken | None = None
        self._waiting: deque[tuple[int, TokenText]] = deque()
        self.tokens = 0
        self.thinking_tokens = 0
        self.is_over = False
        self.logprob = 0.0

    def push(self, tokens: Sequence[SampledToken]) -> Text | None:
        """Return the text that is certain after these tokens; `stopped_by` may be set afterwards.

        A stop token is silent if it ends the sample and is text if the sample continues (before
        `min_tokens`), so the latest stop token waits.
        """
        if self._is_plain and self._last_stop is None:
            ids = [token.token_id for token in tokens]
            if self._stops.isdisjoint(ids):
                return self._push_plain(ids)
        pieces = []
        for token in tokens:
            if self._last_stop is not None:
                pieces.append(self._decode(self._last_stop))
                self._last_stop = None
            if self.stopped_by is not None:
                break
            self.tokens += 1
            self.logprob += token.logprob or 0.0
            if token.token_id in self._stops:
                self._last_stop = token
            else:
                pieces.append(self._decode(token))
        return self._delta("".join(pieces))

    def _push_plain(self, ids: list[int]) -> Text | None:
        """Push tokens that are only text: the usual step."""
        self.tokens += len(ids)
        text = self._text.push_all(ids)
        return Text(self.index, text) if text else None

    def split_steps(self, tokens: Sequence[SampledToken]) -> Iterable[Sequence[SampledToken]]:
        """Split tokens into single ones if the token that ends a call or a thought must be
        known."""
        output = self.output
        is_parsed = output.reads_calls or output.may_think
        if is_parsed and (self._wants_logprobs or not output.parallel or output.may_think):
            return ([token] for token in tokens)
        return (tokens,)

    def finish(self, reason: FinishReason) -> Text | None:
        """Return the text that was held back."""
        piece = ""
        if self._last_stop is not None and reason != "stop":
            piece = self._decode(self._last_stop)
        piece += self._text.finish()
        return self._delta(piece, is_last=True) if piece or self._waiting else None

    @property
    def decoded_tokens(self) -> int:
        """Tokens counted so far, without a stop token that waits."""
        return self.tokens - (self._last_stop is not None)

    @property
    def stopped_by(self) -> str | None:
        """The stop string that was found, or None."""
        return self._text.stopped_by

    def _decode(self, token: SampledToken) -> str:
        if self._wants_logprobs:
            self._waiting.append((self._text.decoded, token_text(token, self._renderer)))
        return self._text.push(token.token_id)

    def _delta(self, text: str, *, is_last: bool = False) -> Text | None:
        """Return a delta: tokens go with the first of their characters; tokens of a stop string are
        dropped."""
        everything = is_last and self.stopped_by is None
        ready = []
        while self._waiting and (everything or self._waiting[0][0] < self._text.released):
            ready.append(self._waiting.popleft()[1])
        return Text(self.index, text, tuple(ready)) if text or ready else None


def token_text(token: SampledToken, renderer: Renderer) -> TokenText:
    """Return a token with its logprobs, in bytes."""

    def alternative(top: TokenLogprob) -> TokenText:
        return TokenText(top.token_id, _bytes_of(top.token_id, renderer), top.logprob)

    return TokenText(
        token.token_id,
        _bytes_of(token.token_id, renderer),
        token.logprob,
        tuple(alternative(top) for top in token.top),
    )


def _bytes_of(token_id: int, renderer: Renderer) -> bytes:
    own = renderer.tokenizer.token_bytes(token_id)
    return own or renderer.special_text(token_id).encode()


class DeliveredTokens:
    """Counts the tokens of one choice that have all of their text released."""

    __slots__ = ("_before_call", "_calls", "_output", "_text", "_tokens")

    def __init__(self, text: Detokenizer, output: OutputParser) -> None:
        self._text = text
        self._output = output
        self._before_call = 0
        self._calls = 0
        self._tokens = 0

    def count(self, tokens: int) -> int:
        """Return how many of `tokens` decoded tokens have been released; a lower bound while text
        is held back."""
        if self._text.released and not (self._calls or self._is_holding()):
            self._tokens = tokens
        return self._tokens

    def note(self, tokens: int) -> None:
        """Record the count after each piece of text, if calls are parsed: a call counts only when
        it is complete, because not every dialect writes calls in pieces."""
        if self._output.calls > self._calls:
            self._calls, self._tokens = self._output.calls, self._before_call
        if not self._is_holding():
            self._before_call = tokens

    def _is_holding(self) -> bool:
        return self._text.is_holding or self._output.is_holding


def call_id_generator(request_id: str, index: int) -> Callable[[], str]:
    """Return a generator of call ids for one choice: as unguessable as the request's id, and equal
    for streamed and unary answers."""
    numbers = count()

    def made() -> str:
        text = f"{request_id}/{index}/{next(numbers)}"
        return f"call_{hashlib.sha256(text.encode()).hexdigest()[:24]}"

    return made


class OutputParser:
    """Splits a choice's text into thoughts, text and tool calls and checks its format; it changes
    no text.

    `reads_calls`: tools may be called. `parallel`: more than once. `thought`: whether the prompt
    opened a thought, or the answer may begin with one (`Rendered`). `is_thinking`: the output so
    far ends inside a thought; `may_think`: there, or where one may begin.
    """

    def __init__(
        self,
        index: int,
        prompt: Prompt,
        renderer: Renderer,
        make_id: Callable[[], str],
        thought: Literal["", "possible", "open"] = "",
    ) -> None:
        self._index = index
        self._format = prompt.output_format
        self._is_checked = self._format != _ANY_FORMAT
        self._texts: list[str] = []
        self._tokens: list[TokenText] = []
        self.parallel = prompt.tool_choice.parallel
        # With the choice "none", tools stay in the prompt and calls in the answer are plain text.
        self.reads_calls = bool(prompt.tools) and prompt.tool_choice.mode != "none"
        self._must_call = self.reads_calls and prompt.tool_choice.mode == "required"
        self._thoughts: ThinkingSplitter | HarmonySplitter | None = None
        if thought and renderer.thinking.kind == "harmony":
            style = renderer.tool_style
            self._thoughts = HarmonySplitter(style.opening, style.closing, style.arguments)
        elif thought:
            self._thoughts = ThinkingSplitter(renderer.thinking, is_open=thought == "open")
        self.reads_thoughts = bool(thought)
        self.is_thinking = self._thoughts is not None and self._thoughts.is_thinking
        self.may_think = self._thoughts is not None
        self._shows_thoughts = prompt.thinking.is_shown
        self._undecided: tuple[TokenText, ...] = ()
        """Tokens that may yet become a thought or text."""
        self._parser: ToolCallParser | None = None
        if self.reads_calls:
            self._parser = ToolCallParser(
                renderer.tool_style,
                [tool.name for tool in callable_tools(prompt)],
                make_id,
                parallel=self.parallel,
            )

    @property
    def is_full(self) -> bool:
        """Whether the single requested call is complete, so no more output is needed."""
        return self._parser is not None and self._parser.is_full

    @property
    def calls(self) -> int:
        """Number of calls that have begun."""
        return 0 if self._parser is None else self._parser.calls

    @property
    def has_calls(self) -> bool:
        """Whether any tool was called."""
        return self._parser is not None and self._parser.calls > 0

    @property
    def is_holding(self) -> bool:
        """Whether text is held back that is neither released nor a complete call."""
        if self._thoughts is not None and self._thoughts.is_holding:
            return True
        return self._parser is not None and not self._parser.is_idle

    def push(self, text: Text) -> list[Delta]:
        """Return the deltas that are certain after more text."""
        if self._thoughts is None:
            return self._push_text(text)
        was_answering = self._thoughts.is_answering
        thought, rest = self._thoughts.push(text.text)
        self.is_thinking, self.may_think = self._thoughts.is_thinking, self._thoughts.may_think
        deltas = self._thought(thought)
        tokens, self._undecided = (*self._undecided, *text.tokens), ()
        if rest or (tokens and was_answering and self._thoughts.is_answering):
            deltas += self._push_text(Text(self._index, rest, tokens))
        elif self._thoughts.is_undecided:
            self._undecided = tokens
        return deltas

    def _thought(self, thought: str) -> list[Delta]:
        return [Thought(self._index, thought)] if thought and self._shows_thoughts else []

    def _push_text(self, text: Text) -> list[Delta]:
        if self._parser is None:
            if self._is_checked:
                self._texts.append(text.text)
            return [text]
        self._tokens.extend(text.tokens)
        return self._deltas(self._parser.push(text.text))

    def finish(self, cut: Cut = "") -> list[Delta]:
        """Return the deltas that were held back; no more text follows. `cut`: what ended the output
        before the model did. An answer that must be a call has no text, however it was cut."""
        if cut and self._must_call:
            cut = "limit"
        deltas: list[Delta] = []
        if self._thoughts is not None:
            thought, rest = self._thoughts.finish(cut)
            deltas += self._thought(thought)
            if rest or self._undecided:
                deltas += self._push_text(Text(self._index, rest, self._undecided))
        if self._parser is not None:
            was_idle = self._parser.is_idle
            deltas += self._deltas(self._parser.finish(cut))
            if cut and not was_idle:
                self._tokens.clear()  # these tokens are part of a call that was cut off
        if self._tokens and not self.has_calls:
            deltas.append(Text(self._index, "", self._take_tokens()))
        return deltas

    def satisfies_format(self) -> bool:
        """Whether the whole text satisfies its format; true for tool calls."""
        return self.has_calls or satisfies("".join(self._texts), self._format)

    def _deltas(self, found: list[ParsedPiece]) -> list[Delta]:
        deltas: list[Delta] = []
        for piece in found:
            if isinstance(piece, str):
                if self._is_checked:
                    self._texts.append(piece)
                deltas.append(Text(self._index, piece, self._take_tokens()))
            else:
                self._tokens.clear()  # these tokens are part of a call, not of text
                deltas.append(
                    CallText(self._index, piece.call, piece.call_id, piece.name, piece.arguments)
                )
        return deltas

    def _take_tokens(self) -> tuple[TokenText, ...]:
        tokens, self._tokens = tuple(self._tokens), []
        return tokens
