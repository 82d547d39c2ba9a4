"""Functions, tool choice and output format of OpenAI's dialects.

Chat wraps a function in an object and responses does not; both pass the inner fields. This module
knows no messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta, Struct

from gateway.dialects.canonical import OutputFormat, Tool, ToolCall, ToolChoice
from gateway.dialects.openai.cache import CompatCacheControl
from gateway.dialects.validation import decode_json, invalid_field, json_text, shown

TOOLS_MAX = 128
"""Most tools of a list, as in OpenAI's API, and most calls of one message."""

Name = Annotated[str, Meta(min_length=1, max_length=64, pattern=r"^[a-zA-Z0-9_-]+\Z")]
Described = Annotated[str, Meta(max_length=100_000)]
CallId = Annotated[str, Meta(min_length=1, max_length=65_536)]
"""Proxies write what their provider wants back, such as a signature, into the id of a call."""
Arguments = Annotated[str, Meta(max_length=10_000_000)]

CUSTOM = "custom"
"""The type of a tool that takes a text under a grammar. Its client runs it and relies on it."""

TEXT_ONLY = "the model reads only text; expected a text part."


class Function(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The declaration of a function, with a breakpoint after it in the compatible spelling."""

    name: Name
    description: Described | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    cache_control: CompatCacheControl | None = None


class JsonSchema(Struct, frozen=True, forbid_unknown_fields=True):
    """The schema that an answer must satisfy."""

    name: Name
    schema: dict[str, Any]
    strict: bool | None = None
    description: Described | None = None


def tool(declared: Function, path: str, control: CompatCacheControl | None = None) -> Tool:
    """Return the function declared at `path`. `control`: a breakpoint beside the declaration.

    Raises Refusal if its schema is not of an object.
    """
    schema = declared.parameters or {"type": "object", "properties": {}}
    if (schema.get("type") or "object") != "object":
        problem = f"unsupported schema type {shown(schema['type'])}; expected 'object'."
        raise invalid_field(f"{path}.parameters", problem, "invalid_function_parameters")
    control = control or declared.cache_control
    return Tool(
        declared.name,
        declared.description or "",
        json_text(schema),
        path,
        bool(declared.strict),
        None if control is None else control.retention,
    )


def joined_name(namespace: str | None, name: str) -> str:
    """Return the name of a function in a namespace, as the model reads it."""
    return f"{namespace}.{name}" if namespace else name


def split_name(name: str) -> tuple[str, str]:
    """Return the namespace, or "" for none, and the function of a joined name."""
    namespace, _, own = name.rpartition(".")
    return namespace, own


def check_names(tools: Sequence[Tool]) -> None:
    """Raise Refusal if two functions have one name."""
    seen: set[str] = set()
    for declared in tools:
        if declared.name in seen:
            problem = f"the function {declared.name!r} is declared twice; use unique names."
            raise invalid_field(declared.path, problem)
        seen.add(declared.name)


def is_auto(choice: object) -> bool:
    """Return whether a tool choice leaves it to the model to call a tool."""
    return choice in (None, "auto", "none")


def unsupported_type(kind: object) -> str:
    """Return the problem of a tool that is not a function."""
    if kind == CUSTOM:
        return (
            "unsupported tool type 'custom'; expected a 'function', which may take the text as its"
            " argument, or a key with the tolerance 'lenient', which leaves such tools out."
        )
    return f"unsupported tool type {shown(kind)}; expected a complete 'function'."


def choice(
    mode: Literal["none", "auto", "required"],
    names: Sequence[str],
    tools: Sequence[Tool],
    parallel: bool | None,
) -> ToolChoice:
    """Return which functions may be called. Raises Refusal for an undeclared one."""
    known = {declared.name for declared in tools}
    for name in names:
        if name not in known:
            problem = f"unknown function {name[:64]!r}; expected the name of a function in tools."
            raise invalid_field("tool_choice", problem)
    if mode == "required" and not tools:
        problem = "'required' needs a tool, and the request declares none in tools."
        raise invalid_field("tool_choice", problem)
    return ToolChoice(mode, tuple(dict.fromkeys(names)), parallel is not False)


def call(call_id: str, name: str, arguments: str) -> ToolCall:
    """Return a call of the history, with its arguments as compact JSON in the client's key order.

    Empty arguments become `{}`. A text that is no object stays as it is: a model wrote it, or was
    cut off, and its client sends the answer back.
    """
    try:
        value = decode_json(arguments or "{}")
        text = json_text(value) if isinstance(value, dict) else arguments
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        text = arguments
    return ToolCall(call_id, name, text)


def schema_format(schema: JsonSchema, path: str) -> OutputFormat:
    """Return the format of answers that satisfy a schema, whose field is `path`."""
    return OutputFormat("json_schema", json_text(schema.schema), path, bool(schema.strict))


class HistoryPlace(NamedTuple):
    """What a message or item is in the order of calls and results: the ids of its `calls`, the id
    that it `answers`, and whether it `continues` an assistant's turn."""

    calls: tuple[str, ...] = ()
    answers: str | None = None
    continues: bool = False


def with_results_behind_calls(places: Sequence[HistoryPlace]) -> Sequence[int]:
    """Return the indices of a history in an order in which the results of a turn's calls follow the
    turn, in the order of its calls.

    Clients let their users write while a tool runs, and results come in any order; a template knows
    results only there, and often only by their order. No message that comes later changes the
    order, so the prompt of the next request begins with that of this one. Calls without results,
    and results without calls, stay where they are. Cost: O(messages).
    """
    if not any(place.calls for place in places):
        return range(len(places))
    open_calls: dict[str, tuple[int, int]] = {}
    results: dict[tuple[int, int], int] = {}
    for at, place in enumerate(places):
        if place.answers is not None and place.answers in open_calls:
            results[open_calls.pop(place.answers)] = at
        open_calls.update((call_id, (at, number)) for number, call_id in enumerate(place.calls))
    moved = set(results.values())
    order: list[int] = []
    waiting: list[int] = []
    for at, place in enumerate(places):
        if waiting and not place.continues:
            order += waiting
            waiting = []
        if at not in moved:
            order.append(at)
        calls = ((at, number) for number in range(len(place.calls)))
        waiting += (results[call] for call in calls if call in results)
    return order


class PendingCalls:
    """The calls of a history that have no result yet. Each call takes one result."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}

    @property
    def any_pending(self) -> bool:
        """Whether a call has no result yet."""
        return bool(self._names)

    def add(self, call: ToolCall, path: str) -> None:
        """Add a call. Raises Refusal if a call with its id is pending."""
        if call.call_id in self._names:
            problem = f"the call id {call.call_id[:64]!r} is already pending; use unique ids."
            raise invalid_field(path, problem)
        self._names[call.call_id] = call.name

    def answer(self, call_id: str, path: str) -> str:
        """Remove a call and return its function's name. Raises Refusal for an unknown id."""
        name = self._names.pop(call_id, None)
        if name is None:
            problem = f"unknown call id {call_id[:64]!r}; expected the id of a pending call."
            raise invalid_field(path, problem)
        return name

    def check_answered(self, path: str) -> None:
        """Raise Refusal if a call has no result. Call it before any message but a result."""
        if self._names:
            missing = ", ".join(repr(call_id[:64]) for call_id in list(self._names)[:8])
            problem = f"these calls have no result yet: {missing}; expected their results first."
            raise invalid_field(path, problem)


class AnyCalls(PendingCalls):
    """Calls of a list that other items will surround: a result may lack its call, and the other
    way round."""

    def answer(self, call_id: str, path: str) -> str:
        """Return no name: the call may be elsewhere."""
        return ""

    def add(self, call: ToolCall, path: str) -> None:
        """Take any call."""
