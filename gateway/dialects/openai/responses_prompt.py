"""Translation of input items, functions and the tool choice to a prompt with breakpoints.

`openai.responses` calls it. Clients may send the output items of an answer back unchanged: a
message and the calls after it are one assistant turn, and reasoning items are left out of the
prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

from msgspec import Meta, Struct

from gateway.dialects.canonical import Segment, Tool, ToolCall, ToolChoice
from gateway.dialects.openai import cache, tools, wire
from gateway.dialects.tolerance import Tolerance
from gateway.dialects.validation import convert, invalid_field, json_type

ITEMS_MAX = 10_000
"""Most input items of one request, with those of earlier responses."""

HISTORY = "previous_response_id"
"""What a path of a stored item begins with, as `input` does for a sent one."""

Status = Literal["in_progress", "completed", "incomplete"]
Role = Literal["system", "developer", "user", "assistant", "tool"]
T = TypeVar("T", bound=Struct)


class InputText(Struct, frozen=True, forbid_unknown_fields=True):
    type: str
    text: wire.Text
    prompt_cache_breakpoint: cache.Breakpoint | None = None
    cache_control: cache.CompatCacheControl | None = None


class OutputText(InputText, frozen=True, forbid_unknown_fields=True):
    """A text of an earlier answer. Its annotations and logprobs are left out of the prompt."""

    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class RefusalText(Struct, frozen=True, forbid_unknown_fields=True):
    type: str
    refusal: wire.Text


class MessageItem(Struct, frozen=True, forbid_unknown_fields=True):
    role: Literal["system", "developer", "user", "assistant"]
    content: wire.Text | list[dict[str, Any]]
    type: str = "message"
    id: wire.Short | None = None
    status: Status | None = None
    phase: Literal["commentary", "final_answer"] | None = None


class CallItem(Struct, frozen=True, forbid_unknown_fields=True):
    type: str
    call_id: tools.CallId
    name: tools.Name
    arguments: tools.Arguments
    id: wire.Short | None = None
    status: Status | None = None
    namespace: None = None
    caller: dict[str, Any] | None = None


class ResultItem(Struct, frozen=True, forbid_unknown_fields=True):
    type: str
    call_id: tools.CallId
    output: wire.Text | list[dict[str, Any]]
    id: wire.Short | None = None
    status: Status | None = None
    caller: dict[str, Any] | None = None


class FunctionField(Struct, frozen=True, forbid_unknown_fields=True):
    """A function declaration, whose fields stand beside its type."""

    type: str
    name: tools.Name
    description: tools.Described | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    cache_control: cache.CompatCacheControl | None = None


class ChosenFunction(Struct, frozen=True, omit_defaults=True):
    type: str
    name: tools.Name | None = None
    mode: Literal["auto", "required"] | None = None
    tools: Annotated[list[dict[str, Any]], Meta(max_length=tools.TOOLS_MAX)] = []


Choice = Literal["none", "auto", "required"] | ChosenFunction

_PARTS: Mapping[str, type[InputText]] = {
    "input_text": InputText,
    "output_text": OutputText,
    "text": InputText,
}
_UNSUPPORTED_PARTS = {"input_image", "input_file", "input_audio", "input_video", "image", "file"}


# --- tools -------------------------------------------------------------------------------------


def tools_of(fields: Sequence[dict[str, Any]], tolerance: Tolerance) -> tuple[Tool, ...]:
    """Return the declared functions in order. Raises Refusal."""
    found = []
    for number, field in enumerate(fields):
        path = f"tools[{number}]"
        if field.get("type") != "function":
            problem = tools.unsupported_type(field.get("type"))
            raise invalid_field(f"{path}.type", problem, "unsupported_parameter")
        if tolerance.is_lenient:
            field = tolerance.prune(field, FunctionField, "tools[]")
        function = convert(field, FunctionField, path)
        control = function.cache_control
        found.append(
            tools.tool(
                function.name,
                function.description,
                function.parameters,
                function.strict,
                path,
                None if control is None else control.ttl or "5m",
            )
        )
    tools.check_names(found)
    return tuple(found)


def choice_of(choice: Choice | None, declared: Sequence[Tool], parallel: bool | None) -> ToolChoice:
    """Return which tools may be called. Raises Refusal."""
    if choice is None or isinstance(choice, str):
        return tools.choice(choice or "auto", (), declared, parallel)
    if choice.type == "function" and choice.name is not None:
        return tools.choice("required", (choice.name,), declared, parallel)
    if choice.type == "allowed_tools" and choice.mode is not None and choice.tools:
        names = []
        for number, reference in enumerate(choice.tools):
            path = f"tool_choice.tools[{number}]"
            if reference.get("type") != "function":
                problem = tools.unsupported_type(reference.get("type"))
                raise invalid_field(path, problem, "unsupported_parameter")
            names.append(convert(reference.get("name"), tools.Name, f"{path}.name"))
        return tools.choice(choice.mode, names, declared, parallel)
    problem = (
        f"unsupported or incomplete type {choice.type[:64]!r}; expected 'function' with a name, or"
        " 'allowed_tools' with a mode and tools."
    )
    raise invalid_field("tool_choice", problem)


# --- items ---------------------------------------------------------------------------------------


def has_native_breakpoint(items: str | Sequence[dict[str, Any]]) -> bool:
    """Return whether any part has OpenAI's own breakpoint."""
    if isinstance(items, str):
        return False
    return any(
        isinstance(part, dict) and part.get("prompt_cache_breakpoint") is not None
        for item in items
        for parts in (item.get("content"), item.get("output"))
        if isinstance(parts, list)
        for part in parts
    )


def items_of(items: str | Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
    """Return the input as items: a text is a user's message."""
    if not isinstance(items, str):
        return items
    part = {"type": "input_text", "text": items}
    return [{"type": "message", "role": "user", "content": [part]}]


def segments_of(
    instructions: str | None,
    history: Sequence[dict[str, Any]],
    items: str | Sequence[dict[str, Any]],
    settings: cache.CacheSettings,
    tolerance: Tolerance,
) -> list[Segment]:
    """Return the segments of the instructions, the history and the items in order. Raises Refusal.

    `history`: stored items of earlier responses, without calls that were truncated. Changes:
    `tolerance` notes ignored fields of the items that are earlier output.
    """
    reader = _ItemsReader(settings, tolerance)
    if instructions:
        reader.message += 1
        reader.add("system", instructions, "instructions")
    for number, item in enumerate(history):
        if item.get("type") != "function_call" or item.get("status") != "incomplete":
            reader.read(item, f"{HISTORY}[{number}]")
    if isinstance(items, str):
        reader.calls.check_answered("input")
        reader.message += 1
        reader.add("user", items, "input")
        return reader.segments
    if not items:
        raise invalid_field("input", "the list is empty; expected a text or at least one item.")
    if len(history) + len(items) > ITEMS_MAX:
        problem = f"{len(items)} items after {len(history)} stored ones; limit {ITEMS_MAX}."
        raise invalid_field("input", problem)
    for number, item in enumerate(items):
        reader.read(item, f"input[{number}]")
    reader.calls.check_answered(f"input[{len(items) - 1}]")
    if not reader.segments or reader.segments[-1].path == "instructions":
        raise invalid_field("input", "no item has content to answer; expected a message.")
    return reader.segments


class _ItemsReader:
    """Translates input items to segments. `message` is the index of the latest message."""

    def __init__(self, settings: cache.CacheSettings, tolerance: Tolerance) -> None:
        self._settings = settings
        self._tolerance = tolerance
        self.segments: list[Segment] = []
        self.calls = tools.PendingCalls()
        self.message = -1
        self._in_assistant_turn = False
        """Whether the latest item is an assistant message or a call."""

    def read(self, item: dict[str, Any], path: str) -> None:
        """Append the segments of one item. Raises Refusal."""
        match item.get("type", "message"):
            case "message":
                is_answer = item.get("role") == "assistant"
                self._message(self._convert(item, MessageItem, path, is_answer=is_answer), path)
            case "function_call":
                self._call(self._convert(item, CallItem, path, is_answer=True), path)
            case "function_call_output":
                self._result(self._convert(item, ResultItem, path), path)
            case "reasoning":
                pass
            case "item_reference":
                problem = "item_reference is not supported; expected the item itself."
                raise invalid_field(path, problem, "unsupported_parameter")
            case str(other):
                problem = (
                    f"unsupported item type {other[:64]!r}; expected 'message', 'function_call',"
                    " 'function_call_output' or 'reasoning'."
                )
                raise invalid_field(f"{path}.type", problem, "unsupported_parameter")
            case other:
                problem = f"Expected `str`, got `{json_type(other)}`."
                raise invalid_field(f"{path}.type", problem)

    def _convert(self, value: Any, kind: type[T], path: str, *, is_answer: bool = False) -> T:
        """Convert an item or a part; earlier output and the lenient mode may have unknown fields.

        Raises Refusal.
        """
        if self._tolerance.is_lenient or (is_answer and not self._tolerance.is_strict):
            value = self._tolerance.prune(value, kind, path)
        return convert(value, kind, path)

    def _message(self, item: MessageItem, path: str) -> None:
        self.calls.check_answered(path)
        self.message += 1
        self._in_assistant_turn = item.role == "assistant"
        self._texts(item.role, item.content, f"{path}.content")

    def _call(self, item: CallItem, path: str) -> None:
        call = tools.call(item.call_id, item.name, item.arguments, path)
        self.calls.add(call, f"{path}.call_id")
        if not self._in_assistant_turn:
            self.message += 1
            self._in_assistant_turn = True
        self.add("assistant", "", path, call=call)

    def _result(self, item: ResultItem, path: str) -> None:
        name = self.calls.answer(item.call_id, f"{path}.call_id")
        self.message += 1
        self._in_assistant_turn = False
        self._texts("tool", item.output, f"{path}.output", name, item.call_id)

    def _texts(
        self,
        role: Role,
        content: str | list[dict[str, Any]],
        path: str,
        name: str | None = None,
        answers: str | None = None,
    ) -> None:
        if isinstance(content, str):
            self.add(role, content, path, name=name, answers=answers)
            return
        if not content:
            raise invalid_field(path, "the list is empty; expected at least one part.")
        for number, part in enumerate(content):
            part_path = f"{path}[{number}]"
            text, retention = self._part(role, part, part_path)
            self.add(role, text, part_path, name=name, answers=answers, retention=retention)

    def _part(self, role: Role, part: dict[str, Any], path: str) -> tuple[str, str | None]:
        """Return the text of a part and the retention class of its breakpoint."""
        kind = part.get("type")
        is_answer = role == "assistant"
        if kind == "refusal" and is_answer:
            return self._convert(part, RefusalText, path, is_answer=True).refusal, None
        if kind in _UNSUPPORTED_PARTS:
            raise invalid_field(path, f"{kind}: {tools.TEXT_ONLY}", "unsupported_parameter")
        if not isinstance(kind, str) or kind not in _PARTS:
            problem = f"unknown part type {str(kind)[:64]!r}; expected {' or '.join(_PARTS)}."
            raise invalid_field(f"{path}.type", problem)
        found = self._convert(part, _PARTS[kind], path, is_answer=is_answer)
        retention = cache.requested_retention(
            found.prompt_cache_breakpoint, found.cache_control, self._settings
        )
        return found.text, retention

    def add(
        self,
        role: Role,
        text: str,
        path: str,
        *,
        name: str | None = None,
        answers: str | None = None,
        call: ToolCall | None = None,
        retention: str | None = None,
    ) -> None:
        """Append a segment of the current message."""
        self.segments.append(
            Segment(role, text, path, name, self.message, retention, call, answers)
        )
