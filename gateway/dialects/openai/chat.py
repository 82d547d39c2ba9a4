"""OpenAI's chat completions: parse a body to a `Call`, encode deltas to bytes.

A unary answer is the fold of the same deltas. Functions are pure: `openai.family` binds the
dialect to paths.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from gateway.dialects.canonical import (
    DEFAULT_THINKING,
    NO_METADATA,
    CacheDirectives,
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
from gateway.dialects.openai import cache, constraints, tools, wire
from gateway.dialects.openai import chat_prompt as chat
from gateway.dialects.openai.reasoning import thinking_of
from gateway.dialects.tolerance import Tolerance
from gateway.dialects.validation import invalid_field, json_text

FUNCTIONS = "functions are not supported; expected tools, which replace them."
REFUSED_FIELDS = {
    **wire.REFUSED_FIELDS,
    "functions": FUNCTIONS,
    "function_call": FUNCTIONS,
    "audio": "the model generates only text; omit it.",
    "web_search_options": "web search is not supported; omit it.",
    "moderation": "this server has no moderation; omit it.",
    "continue_final_message": "the answer is always a new message; expected false.",
    "add_special_tokens": "the chat template writes all special tokens; expected false.",
    "reasoning_effort": "the model has no reasoning; expected 'none'.",
    "verbosity": "the model has no verbosity setting; omit it.",
    "best_of": "this field belongs to /v1/completions; expected n.",
    "echo": "this field belongs to /v1/completions; expected false.",
    "suffix": wire.NO_INFILL,
}
"""Fields that chat cannot honour, with the reason."""

NEUTRAL_VALUES = {
    **wire.NEUTRAL_VALUES,
    "continue_final_message": (False,),
    "add_special_tokens": (False,),
    "reasoning_effort": ("none",),
    "best_of": (1,),
    "functions": ([],),
    "echo": (False,),
}
"""Values at which a refused field has no effect and is accepted."""

RULES = wire.FieldRules(
    refused=REFUSED_FIELDS,
    neutral=NEUTRAL_VALUES,
    records=wire.RECORD_FIELDS | {"metadata"},
    aliases={
        **wire.ALIASES,
        **wire.LIMIT_ALIASES,
        "max_output_tokens": "max_completion_tokens",
    },
    switches=frozenset({"chat_template_kwargs"}),
    cleaned={"messages": chat.clean_history, "tools": chat.clean_tools},
)

_PLACEHOLDER = "\ue000"
_PLACEHOLDER_BYTES = msgspec.json.encode(_PLACEHOLDER)
"""Stand-in for the text in a chunk that is encoded once for all texts of a choice."""


class _Format(Struct, frozen=True, tag_field="type", forbid_unknown_fields=True):
    pass


class ChatSchemaFormat(_Format, frozen=True, tag="json_schema"):
    json_schema: tools.JsonSchema


class ChatJsonFormat(_Format, frozen=True, tag="json_object"):
    """`schema`: as other servers take it; an answer is held to it as to one without `strict`."""

    schema: dict[str, Any] | None = None
    json_schema: None = None


class ChatPatternFormat(_Format, frozen=True, tag="regex"):
    """A regular expression, under the names of several servers."""

    regex: wire.PatternText | None = None
    pattern: wire.PatternText | None = None
    value: wire.PatternText | None = None


class ChatGrammarFormat(_Format, frozen=True, tag="grammar"):
    """A Lark grammar."""

    grammar: wire.GrammarText


class ChatTextFormat(_Format, frozen=True, tag="text"):
    json_schema: None = None


ResponseFormat = (
    ChatTextFormat | ChatJsonFormat | ChatSchemaFormat | ChatPatternFormat | ChatGrammarFormat
)


class PredictedPart(Struct, frozen=True, tag="text", tag_field="type", forbid_unknown_fields=True):
    text: wire.Text


class ChatPrediction(Struct, frozen=True, forbid_unknown_fields=True):
    """Predicted output: what the client expects as the answer, a text or parts of it."""

    type: Literal["content"]
    content: wire.Text | Annotated[list[PredictedPart], Meta(max_length=chat.MESSAGES_MAX)]

    @property
    def text(self) -> str:
        """The whole text."""
        parts = self.content
        return parts if isinstance(parts, str) else "".join(part.text for part in parts)


class ChatBody(wire.GenerationFields, frozen=True, kw_only=True):
    messages: Annotated[list[chat.ChatMessage], Meta(min_length=1, max_length=chat.MESSAGES_MAX)]
    tools: Annotated[list[chat.ChatToolField], Meta(max_length=tools.TOOLS_MAX)] | None = None
    tool_choice: chat.Choice | None = None
    parallel_tool_calls: bool | None = None
    max_completion_tokens: Annotated[int, Meta(ge=1, le=2**31)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    prediction: ChatPrediction | None = None
    modalities: list[Literal["text"]] | None = None
    service_tier: wire.Short | None = None
    store: bool | None = None
    add_generation_prompt: bool | None = None
    prompt_cache_options: cache.ChatCacheOptions | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    cache_control: cache.CompatCacheControl | None = None


class ChatDialect(wire.OpenAIDialect):
    """The dialect of `/v1/chat/completions`."""

    def parse(self, body: bytes, metadata: RequestMetadata = NO_METADATA) -> Call:
        """Return the call of a body. Raises Refusal."""
        tolerance = Tolerance(metadata.tolerance)
        fields = wire.decode(body, ChatBody, RULES, tolerance)
        tolerance.take_hint("service_tier", fields.service_tier, wire.SERVICE_TIERS)
        tolerance.take_hint("store", fields.store, (False,))
        wire.check_stream_options(fields.stream_options, stream=fields.stream)
        limits = {fields.max_tokens, fields.max_completion_tokens} - {None}
        if len(limits) > 1:
            problem = (
                f"the value {fields.max_tokens} differs from max_completion_tokens"
                f" {fields.max_completion_tokens}; expected only one of the two."
            )
            raise invalid_field("max_tokens", problem)
        if fields.top_logprobs and not fields.logprobs:
            problem = "only allowed when logprobs is true."
            raise invalid_field("top_logprobs", problem)
        prompt, directives = prompt_of(fields, tolerance)
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
            continuous_usage=wire.wants_continuous_usage(fields),
            partition=wire.partition(fields, metadata),
            client_user=fields.user or "",
            priority=fields.priority or 0,
            cache=directives,
            ignored=tolerance.ignored,
        )

    def encoder(self, call: Call, reply: Reply) -> ChatEncoder:
        """Return the encoder of one answer."""
        return ChatEncoder(call, reply)


def prompt_of(fields: ChatBody, tolerance: Tolerance) -> tuple[Prompt, CacheDirectives]:
    """Return the prompt of a body and its breakpoints. Raises Refusal."""
    settings = cache.CacheSettings(
        fields.prompt_cache_options,
        fields.prompt_cache_retention,
        fields.cache_control,
        chat.has_native_breakpoint(fields.messages),
    )
    declared = chat.tools_of(fields.tools or (), fields.tool_choice, tolerance)
    unmarked = chat.segments_of(fields.messages, settings)
    segments, directives = cache.apply(declared, unmarked, settings)
    add, form = fields.add_generation_prompt, fields.response_format
    choice = chat.choice_of(fields.tool_choice, declared, fields.parallel_tool_calls)
    prompt = Prompt(
        segments=segments,
        tools=tuple(declared),
        tool_choice=choice,
        output_format=constraints.output_format(
            _ANY_TEXT if form is None else _own_format(form), fields, tolerance, declared, choice
        ),
        add_generation_prompt=add is None or add,
        thinking=thinking_of(tolerance.hints) if tolerance.hints else DEFAULT_THINKING,
        prediction="" if fields.prediction is None else fields.prediction.text,
    )
    return prompt, directives


def _own_format(form: ResponseFormat) -> OutputFormat:
    """Return the format of `response_format`. Raises Refusal for a type without its text."""
    match form:
        case ChatTextFormat():
            return _ANY_TEXT
        case ChatSchemaFormat():
            return tools.schema_format(form.json_schema, "response_format.json_schema.schema")
        case ChatJsonFormat(None):
            return OutputFormat("json_object")
        case ChatJsonFormat(schema):
            path = "response_format.schema"
            return OutputFormat("json_schema", json_text(schema), path, strict=False)
        case ChatPatternFormat():
            pattern = form.regex or form.pattern or form.value
            if not pattern:
                raise invalid_field(
                    "response_format",
                    "the pattern is empty; expected a regular expression in `pattern`.",
                )
            return constraints.of_pattern(pattern, "response_format")
        case ChatGrammarFormat():
            return constraints.of_grammar(form.grammar, "response_format.grammar")


_ANY_TEXT = OutputFormat()


class ChatEncoder(wire.CompletionsEncoder):
    """Encodes the deltas of one answer as stream chunks or as one object."""

    def __init__(self, call: Call, reply: Reply) -> None:
        super().__init__(call, reply)
        self._opened = 0
        self._frames: dict[int, tuple[bytes, bytes]] = {}

    def _piece(self, piece: wire.Piece) -> bytes:
        index = piece.index
        match piece:
            case Text(text=text, tokens=tokens):
                if self._logprobs(tokens) is None and not self._call.continuous_usage:
                    before, after = self._frame(index)
                    return self._open(index) + before + msgspec.json.encode(text) + after
                return self._open(index) + self._chunk(index, {"content": text}, piece)
            case Thought(text=text):
                return self._open(index) + self._chunk(index, {"reasoning_content": text})
            case CallText():
                return self._open(index, None) + self._chunk(index, {"tool_calls": [_call(piece)]})
            case ChoiceEnd(reason=reason):
                return self._open(index) + self._chunk(index, {}, finish=reason)

    def unary(self, deltas: Sequence[Delta]) -> bytes:
        """Return the completion: the fold of the stream."""
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
            }
        )

    def _frame(self, index: int) -> tuple[bytes, bytes]:
        """Return the bytes before and after the text of a chunk, which all texts share."""
        found = self._frames.get(index)
        if found is None:
            chunk = self._chunk(index, {"content": _PLACEHOLDER})
            before, _, after = chunk.rpartition(_PLACEHOLDER_BYTES)
            found = self._frames[index] = before, after
        return found

    def _open(self, index: int, content: str | None = "") -> bytes:
        """Return the opening chunks of all choices up to `index` that are not open yet.

        Choices open in order, because clients break at a stream that begins with another choice
        than 0. `content` is the first content; null if the message begins with a call.
        """
        new = range(self._opened, index + 1)
        self._opened = max(self._opened, index + 1)
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
        return self._event([choice])

    def _encode(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        if "usage" not in more:
            if self._call.continuous_usage:
                more["usage"] = self._running_usage()
            elif self._call.include_usage:
                more["usage"] = None
        return msgspec.json.encode(
            {
                "id": self._reply.response_id,
                "object": "chat.completion.chunk",
                "created": self._reply.created_s,
                "model": self._reply.model,
                "service_tier": "default",
                "choices": choices,
                **more,
            }
        )

    def _logprobs(self, tokens: Sequence[TokenText]) -> dict[str, Any] | None:
        if self._call.generation.sampling.logprobs is None:
            return None
        return {"content": wire.token_entries(tokens), "refusal": None}


def _call(piece: CallText) -> dict[str, Any]:
    """Return the delta of a call; only the first piece carries its id and name."""
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
    """Return the message of a complete choice. Its content is null if it holds only calls."""
    text = choice.text
    message: dict[str, Any] = {
        "role": "assistant",
        "content": text if text or not choice.calls else None,
        "refusal": None,
        "annotations": [],
    }
    if choice.thoughts:
        message["reasoning_content"] = "".join(choice.thoughts)
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


DIALECT = ChatDialect("openai_chat")
