"""OpenAI's chat completions: bytes to a `Call`, deltas to bytes. Pure.

A unary answer is the fold of the stream: the same deltas, gathered.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from gateway.dialects import openai_wire as wire
from gateway.dialects import sse
from gateway.dialects.canonical import (
    NOTHING_ELSE,
    Asked,
    Begin,
    Call,
    ChoiceEnd,
    Delta,
    End,
    Prompt,
    Reply,
    Segment,
    Text,
    TokenText,
)
from gateway.errors import Kind, Refusal

MESSAGES_MAX = 10_000

TOOLS = "Tools are not supported by this server yet."
FUNCTIONS = "Functions are not supported; they were replaced by tools."
TEMPLATES = "Templates come from the model, never from a request."
REFUSED = {
    **wire.REFUSED,
    "tools": TOOLS,
    "tool_choice": TOOLS,
    "parallel_tool_calls": TOOLS,
    "functions": FUNCTIONS,
    "function_call": FUNCTIONS,
    "audio": "This is a text model: it has no audio.",
    "prediction": "Predicted outputs are not supported.",
    "web_search_options": "Web search is not supported.",
    "moderation": "Nothing is moderated here.",
    "chat_template": TEMPLATES,
    "chat_template_kwargs": TEMPLATES,
    "documents": TEMPLATES,
    "continue_final_message": "The answer is always a message of its own.",
    "reasoning_effort": "This model does not reason in steps of its own.",
    "verbosity": "This model has no verbosity setting.",
    "best_of": "It belongs to /v1/completions; here there is n.",
    "echo": "It belongs to /v1/completions.",
    "suffix": "This model continues text; it cannot fill in between.",
}
NEUTRAL = {
    **wire.NEUTRAL,
    "tools": [],
    "tool_choice": "none",
    "parallel_tool_calls": False,
    "continue_final_message": False,
    "echo": False,
}
IGNORED = frozenset({"metadata", "safety_identifier"})


class TextPart(Struct, frozen=True, tag="text", tag_field="type", forbid_unknown_fields=True):
    text: wire.Text


class Message(Struct, frozen=True, forbid_unknown_fields=True):
    """One message. `refusal`, `audio`, `tool_calls` and `function_call` may be there as null."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: wire.Text | list[TextPart] | None = None
    name: wire.Short | None = None
    tool_call_id: wire.Short | None = None
    tool_calls: None = None
    function_call: None = None
    audio: None = None
    annotations: list[Any] | None = None
    refusal: wire.Text | None = None


class ResponseFormat(Struct, frozen=True):
    type: Literal["text"]


class ChatBody(wire.GenerationFields, frozen=True, kw_only=True):
    messages: Annotated[list[Message], Meta(min_length=1, max_length=MESSAGES_MAX)]
    max_completion_tokens: Annotated[int, Meta(ge=1, le=2**31)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    modalities: list[Literal["text"]] | None = None
    service_tier: Literal["auto", "default"] | None = None
    store: Literal[False] | None = None
    add_generation_prompt: bool | None = None


class ChatDialect:
    """The dialect of `/v1/chat/completions`."""

    name = "openai_chat"
    stream_content_type = sse.CONTENT_TYPE
    error_body = staticmethod(wire.error_body)

    headers = staticmethod(wire.headers)
    count_body = staticmethod(wire.count_body)

    def parse(self, body: bytes, asked: Asked = NOTHING_ELSE) -> Call:
        """Bytes to a call. Raises Refusal."""
        fields = wire.decode(body, ChatBody, REFUSED, NEUTRAL, IGNORED)
        wire.check_stream_options(fields)
        limits = {fields.max_tokens, fields.max_completion_tokens} - {None}
        if len(limits) > 1:
            message = "max_tokens and max_completion_tokens differ; give one of them."
            raise Refusal(Kind.BAD, "invalid_value", message, param="max_tokens")
        if fields.top_logprobs is not None and not fields.logprobs:
            message = "top_logprobs is only allowed when logprobs is true."
            raise Refusal(Kind.BAD, "invalid_value", message, param="top_logprobs")
        if fields.max_tokens == 0:
            message = "max_tokens: it has to be at least 1 (it is 0)."
            raise Refusal(Kind.BAD, "invalid_value", message, param="max_tokens")
        add = fields.add_generation_prompt
        prompt = Prompt(
            segments=_segments(fields.messages), add_generation_prompt=add is None or add
        )
        logprobs = (fields.top_logprobs or 0) if fields.logprobs else None
        return Call(
            model=fields.model,
            prompts=(prompt,),
            generation=wire.generation(
                fields,
                max_tokens=next(iter(limits), None),
                logprobs=logprobs,
                samples=fields.n or 1,
            ),
            stream=bool(fields.stream),
            include_usage=bool(fields.stream_options and fields.stream_options.include_usage),
            partition=wire.partition(fields),
            client_user=fields.user or "",
            priority=fields.priority or 0,
        )

    def encoder(self, call: Call, reply: Reply) -> ChatEncoder:
        """Makes the answer's bytes."""
        return ChatEncoder(call, reply)

    def keep_alive(self) -> bytes:
        """Bytes that mean nothing and keep a connection open."""
        return sse.KEEP_ALIVE


def _segments(messages: list[Message]) -> tuple[Segment, ...]:
    segments = []
    for index, message in enumerate(messages):
        at = f"messages[{index}]"
        content = message.content
        if content is None:
            if message.role != "assistant":
                text = f"{at}.content: a {message.role} message needs content."
                raise Refusal(Kind.BAD, "invalid_value", text, param=f"{at}.content")
            content = message.refusal or ""
        parts = [content] if isinstance(content, str) else [part.text for part in content]
        if not parts:
            text = f"{at}.content: the list is empty."
            raise Refusal(Kind.BAD, "invalid_value", text, param=f"{at}.content")
        for part, text in enumerate(parts):
            path = f"{at}.content" if isinstance(content, str) else f"{at}.content[{part}]"
            segments.append(Segment(message.role, text, path, message.name, index))
    return tuple(segments)


class ChatEncoder:
    """Deltas of one answer to bytes: chunks as they come, or one object of them all."""

    def __init__(self, call: Call, reply: Reply) -> None:
        self._call = call
        self._reply = reply
        self._begun = 0

    def stream(self, delta: Delta) -> bytes:
        """The events of one delta; may be none."""
        match delta:
            case Begin():
                return b""
            case Text(index=index):
                return self._first(index) + self._chunk(index, {"content": delta.text}, delta)
            case ChoiceEnd(index=index, reason=reason):
                return self._first(index) + self._chunk(index, {}, finish=reason)
            case End(usage=usage):
                if not self._call.include_usage:
                    return b""
                return sse.event(self._encode([], usage=wire.usage(usage)))

    def close(self) -> bytes:
        """After the last delta of a whole answer."""
        return sse.event(b"[DONE]")

    def error_event(self, refusal: Refusal) -> bytes:
        """The answer breaks off: what SDKs raise from inside a stream."""
        return sse.event(msgspec.json.encode(wire.error_object(refusal)))

    def unary(self, deltas: Sequence[Delta]) -> bytes:
        """The fold of the stream."""
        texts: dict[int, list[str]] = {}
        tokens: dict[int, list[TokenText]] = {}
        reasons: dict[int, str] = {}
        usage: dict[str, Any] = {}
        for delta in deltas:
            if isinstance(delta, Text):
                texts.setdefault(delta.index, []).append(delta.text)
                tokens.setdefault(delta.index, []).extend(delta.tokens)
            elif isinstance(delta, ChoiceEnd):
                reasons[delta.index] = delta.reason
            elif isinstance(delta, End):
                usage = wire.usage(delta.usage)
        choices: list[dict[str, Any]] = [
            {
                "index": index,
                "message": {
                    "role": "assistant",
                    "content": "".join(texts.get(index, [])),
                    "refusal": None,
                    "annotations": [],
                },
                "logprobs": self._logprobs(tokens.get(index, [])),
                "finish_reason": reasons[index],
            }
            for index in sorted(reasons)
        ]
        return msgspec.json.encode(
            {
                "id": self._reply.response_id,
                "object": "chat.completion",
                "created": self._reply.created_s,
                "model": self._reply.model,
                "choices": choices,
                "usage": usage,
                "service_tier": "default",
                "system_fingerprint": None,
            }
        )

    def _first(self, index: int) -> bytes:
        """Choices begin in order: a stream whose first chunk is not choice 0 breaks clients."""
        new = range(self._begun, index + 1)
        self._begun = max(self._begun, index + 1)
        opening = {"role": "assistant", "content": "", "refusal": None}
        return b"".join(self._chunk(number, opening) for number in new)

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        text: Text | None = None,
        finish: str | None = None,
    ) -> bytes:
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": self._logprobs(text.tokens) if text is not None else None,
            "finish_reason": finish,
        }
        return sse.event(self._encode([choice]))

    def _encode(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        if self._call.include_usage and "usage" not in more:
            more["usage"] = None
        return msgspec.json.encode(
            {
                "id": self._reply.response_id,
                "object": "chat.completion.chunk",
                "created": self._reply.created_s,
                "model": self._reply.model,
                "service_tier": "default",
                "system_fingerprint": None,
                "choices": choices,
                **more,
            }
        )

    def _logprobs(self, tokens: Sequence[TokenText]) -> dict[str, Any] | None:
        if self._call.generation.sampling.logprobs is None:
            return None
        entries = [
            {**_token(token), "top_logprobs": [_token(top) for top in token.top]}
            for token in tokens
        ]
        return {"content": entries, "refusal": None}


def _token(token: TokenText) -> dict[str, Any]:
    text = token.data.decode("utf-8", "replace")
    return {"token": text, "logprob": token.logprob, "bytes": list(token.data)}


DIALECT = ChatDialect()
