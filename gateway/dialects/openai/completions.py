"""OpenAI's legacy completions: raw text or token ids in, text out. Pure.

Several prompts in one call give choices numbered prompt * n + sample, as the original does.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from gateway.dialects import sse
from gateway.dialects.canonical import (
    NO_METADATA,
    Begin,
    Call,
    CallText,
    ChoiceEnd,
    Delta,
    End,
    Prompt,
    Reply,
    RequestMetadata,
    Text,
    TokenText,
)
from gateway.dialects.openai import wire
from gateway.dialects.validation import convert
from gateway.errors import Kind, Refusal

PROMPTS_MAX = 128

REFUSED_FIELDS = {
    **wire.REFUSED_FIELDS,
    "suffix": "This model continues text; it cannot fill in between.",
    "response_format": "It belongs to /v1/chat/completions.",
    "prompt_cache_options": "They belong to /v1/chat/completions and /v1/responses.",
    "prompt_cache_retention": "It belongs to /v1/chat/completions and /v1/responses.",
    "messages": "They belong to /v1/chat/completions; here there is prompt.",
    "max_completion_tokens": "It belongs to /v1/chat/completions; here there is max_tokens.",
    "top_logprobs": "It belongs to /v1/chat/completions; here logprobs is a number.",
}
IGNORED_FIELDS = wire.REQUEST_NAME_FIELDS | frozenset({"metadata", "safety_identifier"})


class CompletionBody(wire.GenerationFields, frozen=True, kw_only=True):
    prompt: Any = "<|endoftext|>"
    best_of: Annotated[int, Meta(ge=1, le=20)] | None = None
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    echo: bool | None = None


class SinglePromptBody(CompletionBody, frozen=True, kw_only=True):
    """Of one prompt: two thousand ids are read and checked in two thirds of the time."""

    prompt: str | wire.TokenIds = "<|endoftext|>"


class CompletionDialect:
    """The dialect of `/v1/completions`."""

    name = "openai_completions"
    stream_content_type = sse.CONTENT_TYPE
    error_body = staticmethod(wire.error_body)

    headers = staticmethod(wire.headers)
    count_body = staticmethod(wire.count_body)

    def parse(self, body: bytes, asked: RequestMetadata = NO_METADATA) -> Call:
        """Bytes to a call. Raises Refusal."""
        fields = wire.decode(
            body,
            CompletionBody,
            REFUSED_FIELDS,
            wire.NEUTRAL_VALUES,
            IGNORED_FIELDS,
            SinglePromptBody,
        )
        wire.check_stream_options(fields)
        choices, samples = fields.n or 1, fields.best_of or fields.n or 1
        if samples < choices:
            message = f"best_of ({samples}) has to be at least n ({choices})."
            raise Refusal(Kind.BAD, "invalid_value", message, param="best_of")
        if samples > choices and fields.stream:
            message = "best_of cannot be streamed: the best is known at the end."
            raise Refusal(Kind.BAD, "invalid_value", message, param="best_of")
        prompts = _prompts(fields.prompt)
        # Ranking needs logprobs; they are reported only if they were asked for.
        reported = fields.logprobs
        logprobs = 0 if reported is None and samples > choices else reported
        max_tokens = 16 if fields.max_tokens is None else fields.max_tokens
        if max_tokens == 0 and not fields.echo:
            message = "max_tokens: it has to be at least 1 (it is 0), unless echo is true."
            raise Refusal(Kind.BAD, "invalid_value", message, param="max_tokens")
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
            partition=wire.partition(fields),
            client_user=fields.user or "",
            priority=fields.priority or 0,
        )

    def encoder(self, call: Call, reply: Reply) -> CompletionEncoder:
        """Makes the answer's bytes."""
        return CompletionEncoder(call, reply)

    def keep_alive(self) -> bytes:
        """Bytes that mean nothing and keep a connection open."""
        return sse.KEEP_ALIVE


def _prompts(value: Any) -> tuple[Prompt, ...]:
    """A text, a list of texts, token ids, or a list of lists of them."""
    if isinstance(value, str):
        return (_text_prompt(value, "prompt"),)
    if isinstance(value, tuple) and value:  # ids, and seen to be
        return (Prompt(token_ids=value),)
    if not isinstance(value, list) or not value:
        message = "prompt: a text, a list of texts, token ids or lists of them, and not empty."
        raise Refusal(Kind.BAD, "invalid_value", message, param="prompt")
    if isinstance(value[0], int):
        return (_id_prompt(value, "prompt"),)
    if len(value) > PROMPTS_MAX:
        message = f"prompt: {len(value)} prompts; at most {PROMPTS_MAX} are taken."
        raise Refusal(Kind.BAD, "invalid_value", message, param="prompt")
    return tuple(
        _text_prompt(item, f"prompt[{index}]")
        if isinstance(item, str)
        else _id_prompt(item, f"prompt[{index}]")
        for index, item in enumerate(value)
    )


def _text_prompt(text: str, path: str) -> Prompt:
    if not text:
        raise Refusal(Kind.BAD, "invalid_value", f"{path}: it is empty.", param=path)
    return Prompt(text=text)


def _id_prompt(ids: Any, path: str) -> Prompt:
    found = convert(ids, wire.TokenIds, path)
    if not found:
        raise Refusal(Kind.BAD, "invalid_value", f"{path}: it is empty.", param=path)
    return Prompt(token_ids=found)


class CompletionEncoder:
    """Deltas of one answer to bytes."""

    def __init__(self, call: Call, reply: Reply) -> None:
        self._call = call
        self._reply = reply
        self._places: dict[int, _Place] = {}

    def stream(self, delta: Delta) -> bytes:
        """The events of one delta; may be none."""
        match delta:
            case Begin() | CallText():
                return b""
            case Text(index=index):
                return sse.event(self._encode([self._choice(index, delta.text, delta.tokens)]))
            case ChoiceEnd(index=index, reason=reason):
                return sse.event(self._encode([self._choice(index, "", (), reason)]))
            case End(usage=usage):
                if not self._call.include_usage:
                    return b""
                return sse.event(self._encode([], usage=wire.usage(usage)))

    def close(self) -> bytes:
        """After the last delta of a whole answer."""
        return sse.event(b"[DONE]")

    def error_event(self, refusal: Refusal) -> bytes:
        """The answer breaks off."""
        return sse.event(msgspec.json.encode(wire.error_object(refusal)))

    def unary(self, deltas: Sequence[Delta]) -> bytes:
        """The fold of the stream."""
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
        if self._call.stream and self._call.include_usage and "usage" not in more:
            more["usage"] = None
        return msgspec.json.encode(
            {
                "id": self._reply.response_id,
                "object": "text_completion",
                "created": self._reply.created_s,
                "model": self._reply.model,
                "system_fingerprint": None,
                "choices": choices,
                **more,
            }
        )

    def _logprobs(self, index: int, tokens: Sequence[TokenText]) -> dict[str, Any] | None:
        if not self._call.generation.report_logprobs:
            return None
        place = self._places.setdefault(index, _Place())
        tops = [
            None if token.logprob is None else {_word(t): t.logprob for t in token.top}
            for token in tokens
        ]
        return {
            "tokens": [_word(token) for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": tops if any(tops) else None,
            "text_offset": [place.advance(token.data) for token in tokens],
        }


class _Place:
    """How many characters of a choice's text came before a token."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._characters = 0

    def advance(self, data: bytes) -> int:
        """Where a token with these bytes begins; the place moves on by its whole characters."""
        before = self._characters
        self._characters += len(self._decoder.decode(data))
        return before


def _word(token: TokenText) -> str:
    """A token as this endpoint writes it: parts of a character are spelt out, and so stay apart."""
    try:
        return token.data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.data)


DIALECT = CompletionDialect()
