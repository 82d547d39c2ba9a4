"""OpenAI's chat completions: bytes to a `Call`, deltas to bytes. Pure.

A unary answer is the fold of the stream: the same deltas, gathered.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from gateway.dialects import sse
from gateway.dialects.canonical import (
    NO_METADATA,
    Begin,
    CacheDirectives,
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
from gateway.dialects.openai import cache, tools, wire
from gateway.dialects.openai import chat_prompt as chat
from gateway.errors import Kind, Refusal

FUNCTIONS = "Functions are not supported; they were replaced by tools."
TEMPLATES = "Templates come from the model, never from a request."
REFUSED_FIELDS = {
    **wire.REFUSED_FIELDS,
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
NEUTRAL_VALUES = {
    **wire.NEUTRAL_VALUES,
    "continue_final_message": False,
    "reasoning_effort": "none",
    "echo": False,
}
IGNORED_FIELDS = wire.REQUEST_NAME_FIELDS | frozenset({"metadata", "safety_identifier"})

_PLACE = "\ue000"
_PLACE_BYTES = msgspec.json.encode(_PLACE)
"""Where a text stands in a chunk that is written once for all of them."""


class ChatSchemaFormat(Struct, frozen=True, tag="json_schema", tag_field="type"):
    json_schema: tools.JsonSchema


class ChatJsonFormat(Struct, frozen=True, tag="json_object", tag_field="type"):
    pass


class ChatTextFormat(Struct, frozen=True, tag="text", tag_field="type"):
    pass


class ChatBody(wire.GenerationFields, frozen=True, kw_only=True):
    messages: Annotated[list[chat.ChatMessage], Meta(min_length=1, max_length=chat.MESSAGES_MAX)]
    tools: Annotated[list[chat.ChatToolField], Meta(max_length=tools.TOOLS_MAX)] | None = None
    tool_choice: chat.Choice | None = None
    parallel_tool_calls: bool | None = None
    max_completion_tokens: Annotated[int, Meta(ge=1, le=2**31)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    response_format: ChatTextFormat | ChatJsonFormat | ChatSchemaFormat | None = None
    modalities: list[Literal["text"]] | None = None
    service_tier: Literal["auto", "default"] | None = None
    store: Literal[False] | None = None
    add_generation_prompt: bool | None = None
    prompt_cache_options: cache.ChatCacheOptions | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    cache_control: cache.CompatCacheControl | None = None


class ChatDialect:
    """The dialect of `/v1/chat/completions`."""

    name = "openai_chat"
    stream_content_type = sse.CONTENT_TYPE
    error_body = staticmethod(wire.error_body)

    headers = staticmethod(wire.headers)
    count_body = staticmethod(wire.count_body)

    def parse(self, body: bytes, asked: RequestMetadata = NO_METADATA) -> Call:
        """Bytes to a call. Raises Refusal."""
        fields = wire.decode(body, ChatBody, REFUSED_FIELDS, NEUTRAL_VALUES, IGNORED_FIELDS)
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
        prompt, ask = _prompt(fields)
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
            cache=ask,
        )

    def encoder(self, call: Call, reply: Reply) -> ChatEncoder:
        """Makes the answer's bytes."""
        return ChatEncoder(call, reply)

    def keep_alive(self) -> bytes:
        """Bytes that mean nothing and keep a connection open."""
        return sse.KEEP_ALIVE


def _prompt(fields: ChatBody) -> tuple[Prompt, CacheDirectives]:
    settings = cache.CacheSettings(
        fields.prompt_cache_options,
        fields.prompt_cache_retention,
        fields.cache_control,
        chat.has_native_breakpoint(fields.messages),
    )
    declared = chat.tools_of(fields.tools or ())
    segments = chat.segments_of(fields.messages, settings)
    kept, ask = cache.apply(declared, segments, settings)
    form = fields.response_format
    add = fields.add_generation_prompt
    prompt = Prompt(
        segments=kept,
        tools=tuple(declared),
        tool_choice=chat.choice_of(fields.tool_choice, declared, fields.parallel_tool_calls),
        output_format=tools.output_format(
            "json_object" if isinstance(form, ChatJsonFormat) else "text",
            form.json_schema if isinstance(form, ChatSchemaFormat) else None,
            "response_format.json_schema.schema",
        ),
        add_generation_prompt=add is None or add,
    )
    return prompt, ask


class ChatEncoder:
    """Deltas of one answer to bytes: chunks as they come, or one object of them all."""

    def __init__(self, call: Call, reply: Reply) -> None:
        self._call = call
        self._reply = reply
        self._begun = 0
        self._shells: dict[int, tuple[bytes, bytes]] = {}

    def stream(self, delta: Delta) -> bytes:
        """The events of one delta; may be none."""
        match delta:
            case Begin():
                return b""
            case Text(index=index, text=text, tokens=tokens):
                if self._logprobs(tokens) is None:
                    before, after = self._around(index)
                    return self._first(index) + before + msgspec.json.encode(text) + after
                return self._first(index) + self._chunk(index, {"content": text}, delta)
            case CallText(index=index):
                return self._first(index, None) + self._chunk(index, {"tool_calls": [_call(delta)]})
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
        found, usage = wire.gather(deltas)
        choices: list[dict[str, Any]] = [
            {
                "index": index,
                "message": _message(choice),
                "logprobs": self._logprobs(choice.tokens),
                "finish_reason": choice.reason,
            }
            for index, choice in found.items()
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

    def _around(self, index: int) -> tuple[bytes, bytes]:
        """A text's chunk without the text: all chunks of a choice are alike but for it."""
        found = self._shells.get(index)
        if found is None:
            before, _, after = self._chunk(index, {"content": _PLACE}).rpartition(_PLACE_BYTES)
            found = self._shells[index] = before, after
        return found

    def _first(self, index: int, content: str | None = "") -> bytes:
        """Choices begin in order: a stream whose first chunk is not choice 0 breaks clients.

        `content`: how it begins; null where the first thing is a call.
        """
        new = range(self._begun, index + 1)
        self._begun = max(self._begun, index + 1)
        opening = {"role": "assistant", "content": content, "refusal": None}
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


def _call(piece: CallText) -> dict[str, Any]:
    """More of a call: the first piece names it, the others only go on."""
    function: dict[str, Any] = {"arguments": piece.arguments}
    if not piece.call_id:
        return {"index": piece.call, "function": function}
    return {
        "index": piece.call,
        "id": piece.call_id,
        "type": "function",
        "function": {"name": piece.name, **function},
    }


def _message(choice: wire.JoinedChoice) -> dict[str, Any]:
    """A whole one. Its content is null where it only calls."""
    message: dict[str, Any] = {
        "role": "assistant",
        "content": choice.text if choice.text or not choice.calls else None,
        "refusal": None,
        "annotations": [],
    }
    if choice.calls:
        message["tool_calls"] = [
            {
                "id": call.call_id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for _, call in sorted(choice.calls.items())
        ]
    return message


def _token(token: TokenText) -> dict[str, Any]:
    text = token.data.decode("utf-8", "replace")
    return {"token": text, "logprob": token.logprob, "bytes": list(token.data)}


DIALECT = ChatDialect()
