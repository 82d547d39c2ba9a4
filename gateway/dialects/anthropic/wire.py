"""Wire types of Anthropic's Messages: request fields, usage, diagnostics and errors.

It knows no prompts and no caching rules. `anthropic.messages`, `anthropic.prompt` and
`anthropic.breakpoints` call it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from gateway.dialects import validation
from gateway.dialects.canonical import TOOLS_MAX, UNNAMED, Diagnosis, UsageRecord
from gateway.dialects.tolerance import HINTS, Tolerance, asks_nothing
from gateway.errors import TOO_LONG, Kind, Refusal

Text = Annotated[str, Meta(max_length=10_000_000)]
Short = Annotated[str, Meta(max_length=512)]
Name = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,128}\Z")]
CallId = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,65536}\Z")]
"""Proxies write what their provider wants back, such as a signature, into the id of a call."""
StopText = Annotated[str, Meta(min_length=1, max_length=1_000)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
MESSAGES_MAX = 10_000
"""Most messages of one request."""

VERSION_WITHOUT_CITATIONS = "2026-10-21"
VERSIONS = (VERSION_WITHOUT_CITATIONS, "2023-06-01")
"""Supported values of `anthropic-version`, the default last. In the newer one a user's text has no
citations. Both have sampling settings here, because local models can sample."""

SERVICE_TIERS = ("auto", "standard_only")
"""Tiers that the server has; any other tier is served as the standard one."""

SERVER_SIDE = "this server stores no conversations and runs no server tools; omit it."
NO_FALLBACK = "this server has no fallback model; omit it."
REFUSED_FIELDS: Mapping[str, str] = {
    "container": SERVER_SIDE,
    "mcp_servers": SERVER_SIDE,
    "compaction": SERVER_SIDE,
    "fallbacks": NO_FALLBACK,
    "fallback_credit_token": NO_FALLBACK,
    "billing_policy": "the operator's rate card sets the prices; omit it.",
    "inference_geo": "inference runs on this server's machine; omit it.",
}
"""Fields that cannot be honoured, with the reason."""

THREAD_CODE = "thread_unsupported_request"
"""Error code after which the SDK's tool runner, which first requests a thread, runs without one."""

NEUTRAL_VALUES: Mapping[str, object] = {"mcp_servers": [], "fallbacks": []}
"""Values at which a refused field has no effect and is accepted."""


class CacheControl(Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """A breakpoint. `scope` has no effect: the widest scope of sharing is the tenant."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None
    scope: Short | None = None

    @property
    def retention(self) -> str:
        """Retention class of the breakpoint; without `ttl` the tenant's default."""
        return self.ttl or f"5m{UNNAMED}"


class TextBlock(Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    text: Text
    type: str = "text"
    cache_control: CacheControl | None = None
    citations: list[Any] | None = None


class ToolUseBlock(Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """A tool use. `caller` and `toolset_name` are accepted because clients send answers back."""

    id: CallId
    name: Name
    input: dict[str, Any]
    type: str = "tool_use"
    cache_control: CacheControl | None = None
    caller: dict[str, Any] | None = None
    toolset_name: None = None


class ToolResultBlock(Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    tool_use_id: CallId
    type: str = "tool_result"
    content: Text | list[dict[str, Any]] | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None
    toolset_name: None = None


class ToolReferenceBlock(Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    tool_name: Name
    type: str = "tool_reference"
    cache_control: CacheControl | None = None


class ThinkingBlock(Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    thinking: Text
    signature: Text = ""
    type: str = "thinking"


class RedactedThinkingBlock(Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    data: Text
    type: str = "redacted_thinking"


Block = TextBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock | RedactedThinkingBlock


Role = Literal["user", "assistant", "system"]


class MessageField(Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    role: Role
    content: Text | list[dict[str, Any]]


class MessagesToolField(Struct, frozen=True, forbid_unknown_fields=True):
    name: Name
    input_schema: dict[str, Any]
    description: Text | None = None
    type: Literal["custom"] | None = None
    cache_control: CacheControl | None = None
    strict: bool | None = None
    defer_loading: bool | None = None
    eager_input_streaming: bool | None = None
    input_examples: list[Any] | None = None
    allowed_callers: Annotated[list[Short], Meta(max_length=64)] | None = None


class ToolChoiceField(Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingField(Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["enabled", "adaptive", "disabled", "between_tools"]
    budget_tokens: Annotated[int, Meta(ge=1024, le=2**31)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class Format(Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class TaskBudget(Struct, frozen=True, forbid_unknown_fields=True):
    """Tokens of a whole task, which the hosted API tells the model."""

    type: Literal["tokens"]
    total: Annotated[int, Meta(ge=0, le=2**53)]
    remaining: Annotated[int, Meta(ge=0, le=2**53)] | None = None


class OutputConfig(Struct, frozen=True, forbid_unknown_fields=True):
    effort: Short | None = None
    format: Format | None = None
    task_budget: TaskBudget | None = None


class Metadata(Struct, frozen=True, forbid_unknown_fields=True):
    user_id: Short | None = None


class Diagnostics(Struct, frozen=True, forbid_unknown_fields=True):
    previous_message_id: Annotated[str, Meta(min_length=1, max_length=512)] | None = None


class Edit(Struct, frozen=True):
    """An edit of the history. Clearing thinking has no effect: the template decides which thoughts
    the model reads. Clearing old tool results saves tokens and can make no answer wrong: a hint."""

    type: Literal["clear_thinking_20251015", "clear_tool_uses_20250919"]


class ContextManagement(Struct, frozen=True, forbid_unknown_fields=True):
    edits: list[Edit] = []


class Body(Struct, frozen=True, kw_only=True):
    """A request. `output_format` is the earlier name of `output_config.format`.

    The last five fields are not Anthropic's: self-hosted engines added them.
    """

    model: Annotated[str, Meta(min_length=1, max_length=512)]
    messages: Annotated[list[MessageField], Meta(min_length=1, max_length=MESSAGES_MAX)]
    max_tokens: Annotated[int, Meta(ge=0, le=2**31)] | None = None
    system: Text | list[dict[str, Any]] | None = None
    tools: Annotated[list[dict[str, Any]], Meta(max_length=TOOLS_MAX)] | None = None
    tool_choice: ToolChoiceField | None = None
    stop_sequences: Annotated[list[StopText], Meta(max_length=64)] | None = None
    stream: bool | None = None
    cache_control: CacheControl | None = None
    diagnostics: Diagnostics | None = None
    thinking: ThinkingField | None = None
    output_config: OutputConfig | None = None
    output_format: Format | None = None
    metadata: Metadata | None = None
    context_management: ContextManagement | None = None
    service_tier: Short | None = None
    speed: Short | None = None
    temperature: Fraction | None = None
    top_p: Fraction | None = None
    top_k: Annotated[int, Meta(ge=0, lt=2**31)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=2**31)] | None = None
    ignore_eos: bool | None = None
    cache_salt: Short | None = None
    priority: Annotated[int, Meta(ge=-100, le=0)] | None = None


_KNOWN = set(Body.__struct_fields__)


def decode(body: bytes, tolerance: Tolerance) -> Body:
    """Decode a request body.

    Cost: O(bytes). Changes: `tolerance` notes the ignored fields. Raises Refusal that names the
    field.
    """
    fields = {}
    for name, value in validation.decode_object(body).items():
        if name in _KNOWN:
            fields[name] = value
        elif name == "thread":
            if value is not None:
                raise validation.invalid_field(name, SERVER_SIDE, THREAD_CODE)
        elif name in REFUSED_FIELDS:
            if value is not None and value != NEUTRAL_VALUES.get(name, ...):
                reason = REFUSED_FIELDS[name]
                raise validation.invalid_field(name, reason, "unsupported_parameter")
        elif tolerance.is_lenient or (name in HINTS and not tolerance.is_strict):
            if not asks_nothing(value):
                tolerance.ignore(name)
        else:
            raise validation.unknown_field(name, _KNOWN)
    if not tolerance.is_strict:
        if isinstance(fields.get("messages"), list):
            fields["messages"] = [_clean_answer(one, tolerance) for one in fields["messages"]]
        fields["metadata"] = tolerance.prune(fields.get("metadata"), Metadata, "metadata")
    if tolerance.is_lenient:
        fields = tolerance.prune(fields, Body, "")
    found = validation.convert(fields, Body, "")
    for edit in found.context_management.edits if found.context_management is not None else ():
        if edit.type != "clear_thinking_20251015":
            tolerance.take_hint("context_management.edits", edit.type)
    return found


def _clean_answer(message: Any, tolerance: Tolerance) -> Any:
    """Return an assistant's message without unknown fields: it is an answer that comes back."""
    if isinstance(message, dict) and message.get("role") == "assistant":
        return tolerance.prune(message, MessageField, "messages[]")
    return message


# --- answers -----------------------------------------------------------------------------------


def usage(record: UsageRecord) -> dict[str, Any]:
    """Return the usage object. `input_tokens` counts tokens neither read nor written."""
    hour = record.write.get("1h", 0)
    return {
        "input_tokens": record.fresh,
        "cache_creation_input_tokens": record.write_tokens(),
        "cache_read_input_tokens": record.read_tokens(),
        "cache_creation": {
            "ephemeral_5m_input_tokens": record.write_tokens() - hour,
            "ephemeral_1h_input_tokens": hour,
        },
        "output_tokens": record.out,
        "service_tier": "standard",
        **record.extras(),
    }


def delta_usage(record: UsageRecord) -> dict[str, Any]:
    """Return the cumulative usage of `message_delta`: no split by class and no service tier."""
    counts = usage(record)
    del counts["cache_creation"], counts["service_tier"]
    return counts


_CHANGED = {"model", "tools", "system", "messages"}


def diagnostics(found: Diagnosis | None) -> dict[str, Any] | None:
    """Return a diagnosis in Anthropic's terms; None if the prompt extends the earlier one.

    Anthropic's reasons compare two requests, so tokens that the engine lost are `unavailable`.
    """
    if found is None or found.outcome == "hit":
        return None
    if found.outcome == "unknown":
        return {"cache_miss_reason": {"type": "previous_message_not_found"}}
    cause = found.cause
    if cause == "system" and found.path.startswith("messages") and not _is_first(found.path):
        cause = "messages"  # A system message in the middle of the conversation.
    if found.outcome == "miss" and cause in _CHANGED:
        reason = {
            "type": f"{cause}_changed",
            "cache_missed_input_tokens": found.missed_tokens,
        }
        return {"cache_miss_reason": reason}
    return {"cache_miss_reason": {"type": "unavailable"}}


def _is_first(path: str) -> bool:
    """Return whether `path` is in the first message: there, a system prompt was removed."""
    return path.startswith("messages[0]")


_ERRORS: dict[Kind, tuple[int, str]] = {
    Kind.AUTH: (401, "authentication_error"),
    Kind.PERMISSION: (403, "permission_error"),
    Kind.NOT_FOUND: (404, "not_found_error"),
    Kind.TIMEOUT: (408, "timeout_error"),
    Kind.CONFLICT: (409, "conflict_error"),
    Kind.TOO_BIG: (413, "request_too_large"),
    Kind.RATE: (429, "rate_limit_error"),
    Kind.QUOTA: (402, "billing_error"),
    Kind.INTERNAL: (500, "api_error"),
    Kind.BUSY: (529, "overloaded_error"),
    Kind.DEADLINE: (504, "timeout_error"),
}
"""Status and error type by kind. Other kinds keep their status and are `invalid_request_error`."""


def _message(refusal: Refusal) -> str:
    """Return the message, for a request that is too long after the words that clients look for."""
    if refusal.code != TOO_LONG:
        return refusal.message
    size = ""
    if refusal.size is not None:
        tokens, limit = refusal.size
        size = f": {tokens} tokens > {limit} maximum"
    return f"prompt is too long{size}. {refusal.message}"


class AnthropicError(Struct, frozen=True):
    """An error as Anthropic's SDKs read it."""

    type: str
    message: str


class AnthropicErrorAnswer(Struct, frozen=True):
    """An error of Anthropic's dialect."""

    error: AnthropicError
    request_id: str
    type: Literal["error"] = "error"


def error_object(refusal: Refusal, request_id: str) -> dict[str, Any]:
    """Return the error object that SDKs raise. `error_code` is Trunkline's stable code."""
    _, kind = _ERRORS.get(refusal.kind, (0, "invalid_request_error"))
    details = {"error_code": refusal.code}
    if refusal.param is not None:
        details["param"] = refusal.param
    return {
        "type": "error",
        "error": {"type": kind, "message": _message(refusal), "details": details},
        "request_id": f"req_{request_id}",
    }


def error_body(refusal: Refusal, request_id: str) -> tuple[int, bytes]:
    """Return the HTTP status and the JSON body of an error."""
    status, _ = _ERRORS.get(refusal.kind, (refusal.kind.status, ""))
    return status, msgspec.json.encode(error_object(refusal, request_id))
