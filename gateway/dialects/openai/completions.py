"""OpenAI's legacy completions: raw text or token ids in, text out.

The choices of several prompts in one call are numbered prompt * n + sample, as OpenAI numbers
them. Functions are pure: `openai.family` binds the dialect to paths.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from gateway.dialects.canonical import (
    NO_METADATA,
    Call,
    CallText,
    ChoiceEnd,
    Delta,
    OutputFormat,
    Prompt,
    Reply,
    RequestMetadata,
    Text,
    Thought,
    TokenText,
)
from gateway.dialects.openai import constraints, wire
from gateway.dialects.tolerance import Tolerance
from gateway.dialects.validation import invalid_field

PROMPTS_MAX = 128
"""Most prompts of one request."""

REFUSED_FIELDS = {
    **wire.REFUSED_FIELDS,
    "suffix": wire.NO_INFILL,
    "response_format": wire.CHAT_FIELD,
    "prompt_cache_options": "this field belongs to /v1/chat/completions and /v1/responses.",
    "prompt_cache_retention": "this field belongs to /v1/chat/completions and /v1/responses.",
    "messages": f"{wire.CHAT_FIELD} Expected prompt.",
    "max_completion_tokens": f"{wire.CHAT_FIELD} Expected max_tokens.",
    "top_logprobs": f"{wire.CHAT_FIELD} Expected logprobs, which is a number here.",
}
"""Fields that completions cannot honour, with the reason."""

RULES = wire.FieldRules(
    refused=REFUSED_FIELDS,
    neutral=wire.NEUTRAL_VALUES,
    records=wire.RECORD_FIELDS | {"metadata"},
    aliases={
        **wire.ALIASES,
        **wire.LIMIT_ALIASES,
        "max_completion_tokens": "max_tokens",
        "max_output_tokens": "max_tokens",
    },
)


class CompletionBody(wire.GenerationFields, frozen=True, kw_only=True):
    prompt: Any = "<|endoftext|>"
    max_tokens: Annotated[int, Meta(le=2**31)] | None = None
    best_of: Annotated[int, Meta(ge=1, le=20)] | None = None
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    echo: bool | None = None


class SinglePromptBody(CompletionBody, frozen=True, kw_only=True):
    """A body of one prompt, whose exact type decodes 2,000 token ids in two thirds of the time."""

    prompt: str | wire.TokenIds = "<|endoftext|>"


class CompletionDialect(wire.OpenAIDialect):
    """The dialect of `/v1/completions`."""

    def parse(self, body: bytes, metadata: RequestMetadata = NO_METADATA) -> Call:
        """Return the call of a body. Raises Refusal."""
        tolerance = Tolerance(metadata.tolerance)
        fields = wire.decode(body, CompletionBody, RULES, tolerance, SinglePromptBody)
        wire.check_stream_options(fields.stream_options, stream=fields.stream)
        choices, samples = fields.n or 1, fields.best_of or fields.n or 1
        if samples < choices:
            problem = f"Expected `int` >= n, which is {choices}; received {samples}."
            raise invalid_field("best_of", problem)
        if samples > choices and fields.stream:
            problem = "a stream cannot rank samples; expected best_of equal to n, or no stream."
            raise invalid_field("best_of", problem)
        form = constraints.output_format(OutputFormat(), fields, tolerance)
        prompts = _prompts(fields.prompt)
        if form.kind != "text":
            prompts = tuple(msgspec.structs.replace(one, output_format=form) for one in prompts)
        # Ranking needs logprobs; the answer reports them only if the client asks for them.
        reported = fields.logprobs
        logprobs = 0 if reported is None and samples > choices else reported
        max_tokens = 16 if fields.max_tokens is None else fields.max_tokens
        if max_tokens < (0 if fields.echo else 1):
            least = "0" if fields.echo else "1 unless echo is true"
            problem = f"Expected `int` >= {least}; received {max_tokens}."
            raise invalid_field("max_tokens", problem)
        base = wire.generation(fields, max_tokens=max_tokens, logprobs=logprobs, samples=samples)
        return Call(
            model=fields.model,
            prompts=prompts,
            generation=msgspec.structs.replace(
                base,
                echo=bool(fields.echo),
                prompt_logprobs=reported if fields.echo else None,
                report_logprobs=reported is not None,
            ),
            stream=bool(fields.stream),
            include_usage=bool(fields.stream_options and fields.stream_options.include_usage),
            continuous_usage=wire.wants_continuous_usage(fields),
            partition=wire.partition(fields, metadata),
            client_user=fields.user or "",
            priority=fields.priority or 0,
            ignored=tolerance.ignored,
        )

    def encoder(self, call: Call, reply: Reply) -> CompletionEncoder:
        """Return the encoder of one answer."""
        return CompletionEncoder(call, reply)


def _prompts(value: Any) -> tuple[Prompt, ...]:
    """Return the prompts of a text, a list of texts, token ids, or a list of either."""
    if isinstance(value, tuple) and value:  # Token ids, already checked by `SinglePromptBody`.
        return (Prompt(token_ids=value),)
    return tuple(
        Prompt(text=one) if isinstance(one, str) else Prompt(token_ids=one)
        for one in wire.texts_or_ids(value, "prompt", "prompt", PROMPTS_MAX)
    )


class CompletionEncoder(wire.CompletionsEncoder):
    """Encodes the deltas of one answer as stream events or as one object."""

    def __init__(self, call: Call, reply: Reply) -> None:
        super().__init__(call, reply)
        self._offsets: dict[int, _TextOffset] = {}

    def _piece(self, piece: wire.Piece) -> bytes:
        match piece:
            case Thought() | CallText():
                return b""  # a raw prompt has no thoughts and no tools
            case Text(index=index):
                return self._event([self._choice(index, piece.text, piece.tokens)])
            case ChoiceEnd(index=index, reason=reason):
                return self._event([self._choice(index, "", (), reason)])

    def unary(self, deltas: Sequence[Delta]) -> bytes:
        """Return the completion: the fold of the stream."""
        found, usage = wire.gather(deltas)
        choices = [
            self._choice(index, choice.text, choice.tokens, choice.reason)
            for index, choice in found.items()
        ]
        return self._encode(choices, usage=usage)

    def _choice(
        self, index: int, text: str, tokens: Sequence[TokenText], reason: str | None = None
    ) -> dict[str, Any]:
        return {
            "index": index,
            "text": text,
            "logprobs": self._logprobs(index, tokens),
            "finish_reason": reason,
        }

    def _encode(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        if self._call.continuous_usage and "usage" not in more:
            running = self._running_usage()
            more |= {} if running is None else {"usage": running}
        return msgspec.json.encode(
            {
                "id": self._reply.response_id,
                "object": "text_completion",
                "created": self._reply.created_s,
                "model": self._reply.model,
                "choices": choices,
                **more,
            }
        )

    def _logprobs(self, index: int, tokens: Sequence[TokenText]) -> dict[str, Any] | None:
        if not self._call.generation.report_logprobs:
            return None
        offset = self._offsets.setdefault(index, _TextOffset())
        tops = [
            None if token.logprob is None else {_token_text(t): t.logprob for t in token.top}
            for token in tokens
        ]
        return {
            "tokens": [_token_text(token) for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": tops if any(tops) else None,
            "text_offset": [offset.advance(token.data) for token in tokens],
        }


class _TextOffset:
    """Counts the characters of a choice's text before a token."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._characters = 0

    def advance(self, data: bytes) -> int:
        """Return the offset of a token with these bytes, then add its complete characters."""
        before = self._characters
        self._characters += len(self._decoder.decode(data))
        return before


def _token_text(token: TokenText) -> str:
    r"""Return a token's text, or `bytes:\x..` if it is a part of a character."""
    try:
        return token.data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.data)


DIALECT = CompletionDialect("openai_completions", "text_completion")
