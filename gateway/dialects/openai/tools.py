"""Functions, the choice among them and the form of the answer, as OpenAI's dialects have them.

Chat wraps a function in an object of its own and responses does not; each hands over the inner
fields. It knows no message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from gateway.dialects.canonical import OutputFormat, Tool, ToolCall, ToolChoice
from gateway.errors import Kind, Refusal

TOOLS_MAX = 128
Name = Annotated[str, Meta(min_length=1, max_length=64, pattern=r"^[a-zA-Z0-9_-]+\Z")]
Described = Annotated[str, Meta(max_length=100_000)]
CallId = Annotated[str, Meta(min_length=1, max_length=512)]
Arguments = Annotated[str, Meta(max_length=10_000_000)]
ONLY_FUNCTIONS = "only tools of the type 'function' are supported."


class JsonSchema(Struct, frozen=True, forbid_unknown_fields=True):
    """What an answer has to satisfy."""

    name: Name
    schema: dict[str, Any]
    strict: bool | None = None
    description: Described | None = None


def tool(
    name: str,
    description: str | None,
    parameters: Mapping[str, Any] | None,
    strict: bool | None,
    path: str,
    retention: str | None,
) -> Tool:
    """A function at `path`. Raises Refusal where its parameters are no object's schema."""
    schema = dict(parameters or {"type": "object", "properties": {}})
    if schema.get("type", "object") != "object":
        at = f"{path}.parameters"
        message = f"{at}: the schema of a function has to be of the type 'object'."
        raise Refusal(Kind.BAD, "invalid_function_parameters", message, param=at)
    return Tool(name, description or "", json_text(schema), path, bool(strict), retention)


def check_names(tools: Sequence[Tool]) -> None:
    """Two functions of one name could not be told apart. Raises Refusal."""
    seen: set[str] = set()
    for one in tools:
        if one.name in seen:
            message = f"{one.path}: there are two functions {one.name!r}."
            raise Refusal(Kind.BAD, "invalid_value", message, param=one.path)
        seen.add(one.name)


def choice(
    mode: Literal["none", "auto", "required"],
    names: Sequence[str],
    tools: Sequence[Tool],
    parallel: bool | None,
) -> ToolChoice:
    """Which functions may be called. Raises Refusal for one that is not there."""
    known = {one.name for one in tools}
    for name in names:
        if name not in known:
            message = f"tool_choice: there is no function {name[:64]!r} in tools."
            raise Refusal(Kind.BAD, "invalid_value", message, param="tool_choice")
    if mode == "required" and not tools:
        message = "tool_choice: there are no tools to choose from."
        raise Refusal(Kind.BAD, "invalid_value", message, param="tool_choice")
    return ToolChoice(mode, tuple(dict.fromkeys(names)), parallel is not False)


def call(call_id: str, name: str, arguments: str, path: str) -> ToolCall:
    """An earlier call. Its arguments are written anew, in their order; none are an empty object.

    Raises Refusal where they are no JSON object.
    """
    try:
        value = msgspec.json.decode(arguments or "{}")
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        value = None
    if not isinstance(value, dict):
        at = f"{path}.arguments"
        message = f"{at}: it has to be the JSON text of an object."
        raise Refusal(Kind.BAD, "invalid_value", message, param=at)
    return ToolCall(call_id, name, json_text(value))


def output_format(
    kind: Literal["text", "json_object"], schema: JsonSchema | None, path: str
) -> OutputFormat:
    """The canonical form; a schema, which stands at `path`, decides where there is one."""
    if schema is None:
        return OutputFormat(kind)
    return OutputFormat("json_schema", json_text(schema.schema), path, bool(schema.strict))


def json_text(value: object) -> str:
    """The same JSON without spaces, in the order it came."""
    return msgspec.json.encode(value).decode()


class PendingCalls:
    """The calls of a history that wait for their results: each is answered once, before anyone
    else speaks. `field`: whose param the errors name."""

    def __init__(self) -> None:
        self._open: dict[str, str] = {}

    @property
    def are_open(self) -> bool:
        """Does any wait?"""
        return bool(self._open)

    def add(self, made: ToolCall, path: str) -> None:
        """A call is made. Raises Refusal if one of that id is still open."""
        if made.call_id in self._open:
            message = f"{path}: there are two open calls with the id {made.call_id[:64]!r}."
            raise Refusal(Kind.BAD, "invalid_value", message, param=path)
        self._open[made.call_id] = made.name

    def answer(self, call_id: str, path: str) -> str:
        """The name of the function whose result this is. Raises Refusal if none was called."""
        name = self._open.pop(call_id, None)
        if name is None:
            message = f"{path}: no call with the id {call_id[:64]!r} waits for a result before it."
            raise Refusal(Kind.BAD, "invalid_value", message, param=path)
        return name

    def check_done(self, path: str) -> None:
        """Someone else speaks, or the history ends. Raises Refusal if a result is missing."""
        if self._open:
            missing = ", ".join(repr(call_id[:64]) for call_id in list(self._open)[:8])
            message = f"{path}: results of these calls have to come before it: {missing}."
            raise Refusal(Kind.BAD, "invalid_value", message, param=path)
