"""OpenAI's responses: parse a body to a `Call`.

A request with `previous_response_id`, a conversation or an `item_reference` is parsed twice: the
second time with the earlier items, which `gateway.generation.stored_responses` loads. Functions are
pure: `openai.responses.events` encodes the answers, and `openai.family` binds the dialect to
paths.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from gateway.dialects.canonical import (
    NO_EARLIER_ITEMS,
    NO_METADATA,
    NO_THREAD,
    CacheDirectives,
    Call,
    GenerationParameters,
    OutputFormat,
    Prompt,
    Reply,
    RequestMetadata,
    ThreadDirectives,
    digest_of,
)
from gateway.dialects.openai import cache, constraints, tools, wire
from gateway.dialects.openai.reasoning import thinking_of
from gateway.dialects.openai.responses import prompt as items
from gateway.dialects.openai.responses import stored_items
from gateway.dialects.openai.responses.events import ResponsesEncoder
from gateway.dialects.tolerance import Tolerance
from gateway.dialects.validation import convert, encode_json, invalid_field, json_text
from gateway.errors import Kind, Refusal

ID_PREFIX = "resp_"
"""Prefix of a response's id."""

LOGPROBS = "message.output_text.logprobs"
"""Entry of `include` that requests logprobs."""

MAX_OUTPUT_TOKENS = f"{wire.CHAT_FIELD} Expected max_output_tokens."
REFUSED_FIELDS = {
    **wire.REFUSED_FIELDS,
    "background": "background responses are not supported; expected false.",
    "prompt": "this server stores no prompts; send instructions and input.",
    "context_management": "this server compacts no contexts; send the items as input.",
    "moderation": "this server has no moderation; omit it.",
    "image": "the model generates only text; omit it.",
    "access_programs": "this server has no access programs; omit it.",
    "messages": f"{wire.CHAT_FIELD} Expected input.",
    "max_tokens": MAX_OUTPUT_TOKENS,
    "max_completion_tokens": MAX_OUTPUT_TOKENS,
    "response_format": f"{wire.CHAT_FIELD} Expected text.format.",
    "n": f"{wire.CHAT_FIELD} Expected 1.",
    "best_of": "this field belongs to /v1/completions. Expected 1.",
    "echo": "this field belongs to /v1/completions. Expected false.",
    "stop": wire.CHAT_FIELD,
    "logprobs": f"{wire.CHAT_FIELD} Expected include with {LOGPROBS!r}.",
}
"""Fields that responses cannot honour, with the reason."""

NEUTRAL_VALUES = {
    **wire.NEUTRAL_VALUES,
    "background": (False,),
    "context_management": ([],),
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "stop": ([],),
    "logprobs": (False,),
}
"""Values at which a refused field has no effect and is accepted."""

RULES = wire.FieldRules(
    refused=REFUSED_FIELDS,
    neutral=NEUTRAL_VALUES,
    records=wire.RECORD_FIELDS | {"max_tool_calls"},
    aliases={
        **wire.ALIASES,
        "max_tokens": "max_output_tokens",
        "max_completion_tokens": "max_output_tokens",
    },
    switches=frozenset({"chat_template_kwargs"}),
)
"""`max_tool_calls` limits server tools, and this server has none."""


class ResponsesCacheOptions(cache.ChatCacheOptions, frozen=True, forbid_unknown_fields=True):
    """`prompt_cache_options` of responses."""

    prewarm: bool | None = None
    comparison_response_id: wire.Short | None = None


class ResponsesTextFormat(
    Struct, frozen=True, tag="text", tag_field="type", forbid_unknown_fields=True
):
    pass


class ResponsesJsonFormat(
    Struct, frozen=True, tag="json_object", tag_field="type", forbid_unknown_fields=True
):
    pass


class ResponsesSchemaFormat(
    tools.JsonSchema, frozen=True, omit_defaults=True, tag="json_schema", tag_field="type"
):
    pass


TextFormat = ResponsesTextFormat | ResponsesJsonFormat | ResponsesSchemaFormat


class TextField(Struct, frozen=True, forbid_unknown_fields=True):
    format: TextFormat | None = None
    verbosity: wire.Short | None = None


class Reasoning(Struct, frozen=True, forbid_unknown_fields=True):
    """Reasoning settings at the values that request none, which the strict mode takes."""

    effort: Literal["none"] | None = None
    summary: None = None
    generate_summary: None = None


class ResponsesStreamOptions(Struct, frozen=True, forbid_unknown_fields=True):
    include_obfuscation: bool = False


class ConversationField(Struct, frozen=True, forbid_unknown_fields=True):
    id: wire.Short


class ResponsesBody(wire.SamplingFields, frozen=True, kw_only=True):
    input: (
        Annotated[str, Meta(min_length=1, max_length=10_000_000)]
        | Annotated[list[dict[str, Any]], Meta(max_length=items.ITEMS_MAX)]
        | None
    ) = None
    instructions: wire.Text | None = None
    max_output_tokens: Annotated[int, Meta(ge=1, le=2**31)] | None = None
    tools: Annotated[list[dict[str, Any]], Meta(max_length=tools.TOOLS_MAX)] | None = None
    tool_choice: items.Choice | None = None
    parallel_tool_calls: bool | None = None
    text: TextField | None = None
    reasoning: dict[str, Any] | None = None
    previous_response_id: wire.Short | None = None
    conversation: wire.Short | ConversationField | None = None
    store: bool | None = None
    include: Annotated[list[wire.Short], Meta(max_length=32)] | None = None
    truncation: Literal["disabled", "auto"] | None = None
    metadata: wire.Metadata | None = None
    service_tier: wire.Short | None = None
    stream_options: ResponsesStreamOptions | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    prompt_cache_options: ResponsesCacheOptions | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    cache_control: cache.CompatCacheControl | None = None

    @property
    def text_format(self) -> TextFormat | None:
        """The format of the answer's text; None if the request has none."""
        return None if self.text is None else self.text.format


class ResponsesDialect(wire.OpenAIDialect):
    """The dialect of `/v1/responses` and, for counting, of `/v1/responses/input_tokens`."""

    def __init__(self, *, counts: bool = False) -> None:
        super().__init__("openai_responses")
        self._counts = counts

    def parse(self, body: bytes, metadata: RequestMetadata = NO_METADATA) -> Call:
        """Return the call of a body. Raises Refusal."""
        tolerance = Tolerance(metadata.tolerance)
        fields = wire.decode(body, ResponsesBody, RULES, tolerance)
        _check(fields)
        given: items.Given = () if fields.input is None else fields.input
        references = stored_items.references_in(given)
        thread = ThreadDirectives(
            fields.previous_response_id or "", _conversation_id(fields), references
        )
        if metadata.earlier is None and thread != NO_THREAD:
            return self._pending(fields, thread)
        earlier = metadata.earlier or NO_EARLIER_ITEMS
        if references:
            given = stored_items.resolve(given, earlier.referenced)
        _take_hints(fields, tolerance)
        prompt, directives = _prompt(fields, given, tolerance, earlier.history)
        options = fields.prompt_cache_options or ResponsesCacheOptions()
        operation: Literal["generate", "prewarm", "count"] = "generate"
        if self._counts:
            operation = "count"
        elif options.prewarm:
            operation = "prewarm"
        return Call(
            model=fields.model,
            prompts=(prompt,),
            generation=_generation(fields, is_prewarm=operation == "prewarm"),
            operation=operation,
            stream=bool(fields.stream),
            include_usage=True,
            partition=wire.partition(fields, metadata),
            client_user=fields.user or (fields.metadata or {}).get("user_id", ""),
            priority=fields.priority or 0,
            digests=_digests(fields),
            ignored=tolerance.ignored,
            thread=_with_input(thread, fields, given, is_generated=operation == "generate"),
            cache=msgspec.structs.replace(
                directives,
                compare_with=options.comparison_response_id or "",
                remember=operation != "count",
                echo=(("response", json_text(_echo(fields, prompt))),),
            ),
        )

    def _pending(self, fields: ResponsesBody, thread: ThreadDirectives) -> Call:
        """Return the call of a request before its earlier items are loaded."""
        return Call(
            model=fields.model,
            prompts=(),
            generation=GenerationParameters(),
            operation="count" if self._counts else "generate",
            stream=bool(fields.stream),
            thread=msgspec.structs.replace(thread, is_pending=True),
        )

    def encoder(self, call: Call, reply: Reply) -> ResponsesEncoder:
        """Return the encoder of one answer."""
        return ResponsesEncoder(call, reply)


def not_found(response_id: str) -> Refusal:
    """Return the refusal of a request for a response that is not stored."""
    message = (
        f"Response with id {response_id[:64]!r} not found: it was not stored, has expired or was"
        " deleted."
    )
    return Refusal(Kind.NOT_FOUND, "response_not_found", message, param="response_id")


def _check(fields: ResponsesBody) -> None:
    """Raise Refusal for fields that contradict each other."""
    wire.check_stream_options(fields.stream_options, stream=fields.stream)
    if LOGPROBS not in (fields.include or ()) and fields.top_logprobs:
        problem = f"only allowed when include has {LOGPROBS!r}."
        raise invalid_field("top_logprobs", problem)
    if fields.conversation is not None and fields.previous_response_id:
        problem = "not allowed together with previous_response_id; expected only one of the two."
        raise invalid_field("conversation", problem)


def _take_hints(fields: ResponsesBody, tolerance: Tolerance) -> None:
    """Note the hints that have no effect here. Raises Refusal in the strict mode."""
    reasoning = fields.reasoning or {}
    if tolerance.is_strict:
        convert(reasoning, Reasoning, "reasoning")
    for name, value in reasoning.items():
        tolerance.take_hint(f"reasoning.{name}", value, ("none",))
    if fields.text is not None:
        tolerance.take_hint("text.verbosity", fields.text.verbosity)
    tolerance.take_hint("truncation", fields.truncation, ("disabled",))
    tolerance.take_hint("service_tier", fields.service_tier, wire.SERVICE_TIERS)


def _conversation_id(fields: ResponsesBody) -> str:
    """Return the id of the conversation that the request names; "" for none."""
    named = fields.conversation
    return (named.id if isinstance(named, ConversationField) else named) or ""


def _with_input(
    thread: ThreadDirectives, fields: ResponsesBody, given: items.Given, *, is_generated: bool
) -> ThreadDirectives:
    """Return what the request continues with its own items, if any of it is stored: the response
    unless the request says otherwise, and the items in their conversation."""
    store = is_generated and fields.store is not False
    if not store and not (is_generated and thread.conversation_id):
        return msgspec.structs.replace(thread, conversation_id="")
    own = encode_json(items.items_of(given))
    return msgspec.structs.replace(thread, store=store, input=own)


def _prompt(
    fields: ResponsesBody,
    given: items.Given,
    tolerance: Tolerance,
    history: Sequence[dict[str, Any]],
) -> tuple[Prompt, CacheDirectives]:
    options = fields.prompt_cache_options
    settings = cache.CacheSettings(
        options,
        fields.prompt_cache_retention,
        fields.cache_control,
        items.has_native_breakpoint(given) or items.has_native_breakpoint(history),
    )
    declared = items.tools_of(fields.tools or (), fields.tool_choice, tolerance)
    field = "conversation" if fields.conversation else "previous_response_id"
    unmarked = items.segments_of(fields.instructions, history, field, given, settings, tolerance)
    segments, directives = cache.apply(declared, unmarked, settings)
    choice = items.choice_of(fields.tool_choice, declared, fields.parallel_tool_calls)
    own = OutputFormat()
    if isinstance(fields.text_format, ResponsesSchemaFormat):
        own = tools.schema_format(fields.text_format, "text.format.schema")
    elif isinstance(fields.text_format, ResponsesJsonFormat):
        own = OutputFormat("json_object")
    prompt = Prompt(
        segments=segments,
        tools=tuple(declared),
        tool_choice=choice,
        thinking=thinking_of({**tolerance.hints, "reasoning": fields.reasoning}),
        output_format=constraints.output_format(own, fields, tolerance, declared, choice),
    )
    return prompt, directives


def _generation(fields: ResponsesBody, *, is_prewarm: bool) -> GenerationParameters:
    wants_logprobs = LOGPROBS in (fields.include or ())
    return GenerationParameters(
        max_tokens=0 if is_prewarm else fields.max_output_tokens,
        sampling=wire.sampling(fields, (fields.top_logprobs or 0) if wants_logprobs else None),
        stop_token_ids=tuple(fields.stop_token_ids or ()),
        ignore_eos=bool(fields.ignore_eos),
        min_tokens=fields.min_tokens or 0,
    )


def _digests(fields: ResponsesBody) -> tuple[tuple[str, str], ...]:
    """Return digests of the settings that a miss diagnosis compares beside the prompt."""
    form = fields.text_format
    if form is None or isinstance(form, ResponsesTextFormat):
        return ()
    return (("text.format", digest_of(form)),)


def _echo(fields: ResponsesBody, prompt: Prompt) -> dict[str, Any]:
    """Return the request's settings that an answer repeats, with defaults filled in.

    A setting without a default is left out: OpenAI's published schema has no null for it.
    """
    retention = fields.prompt_cache_retention
    found = {
        "instructions": fields.instructions,
        "max_output_tokens": fields.max_output_tokens,
        "metadata": fields.metadata or {},
        "parallel_tool_calls": prompt.tool_choice.parallel,
        "tool_choice": fields.tool_choice or "auto",
        "tools": [_shown_tool(field) for field in fields.tools or ()],
        "text": {"format": fields.text_format or {"type": "text"}},
        "top_logprobs": fields.top_logprobs or 0,
        "temperature": 1.0 if fields.temperature is None else fields.temperature,
        "top_p": 1.0 if fields.top_p is None else fields.top_p,
    }
    sent = {
        "previous_response_id": fields.previous_response_id or None,
        "prompt_cache_key": fields.prompt_cache_key,
        "prompt_cache_options": _shown_options(fields.prompt_cache_options),
        "prompt_cache_retention": None if retention is None else retention.replace("-", "_"),
        "user": fields.user,
    }
    return found | {name: value for name, value in sent.items() if value is not None}


def _shown_options(options: ResponsesCacheOptions | None) -> dict[str, Any] | None:
    if options is None:
        return None
    shown: dict[str, Any] = {
        "mode": options.mode or "implicit",
        "ttl": options.ttl or cache.DEFAULT_TTL,
    }
    if options.comparison_response_id is not None:
        shown["comparison_response_id"] = options.comparison_response_id
    return shown


def _shown_tool(field: dict[str, Any]) -> dict[str, Any]:
    """Return a function with all its fields, as an answer repeats it; a namespace as it came."""
    if field.get("type") != "function":
        return field
    shown = {"description": None, "parameters": None, "strict": None, **field}
    shown.pop("cache_control", None)
    return shown


DIALECT = ResponsesDialect()
COUNT_DIALECT = ResponsesDialect(counts=True)
