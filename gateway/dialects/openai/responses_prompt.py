"""Items of a response's input, functions and the choice among them as a prompt with breakpoints.

`openai_responses` calls it. What an answer's output holds can be sent back as it came: a message
and the calls behind it are one turn of the assistant's; reasoning is left out, because it is no
part of what was said.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from gateway.dialects.canonical import Segment, Tool, ToolCall, ToolChoice
from gateway.dialects.openai import cache, tools, wire
from gateway.dialects.validation import convert
from gateway.errors import Kind, Refusal

ITEMS_MAX = 10_000
TEXT_ONLY = "this is a text model; send text."
Status = Literal["in_progress", "completed", "incomplete"]
Role = Literal["system", "developer", "user", "assistant", "tool"]


class InputText(Struct, frozen=True, forbid_unknown_fields=True):
    type: str
    text: wire.Text
    prompt_cache_breakpoint: cache.Breakpoint | None = None
    cache_control: cache.CompatCacheControl | None = None


class OutputText(InputText, frozen=True, forbid_unknown_fields=True):
    """An earlier answer's; what it was annotated with is no part of what was said."""

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
    """A function, with its fields beside its type."""

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


def bad(path: str, what: str, code: str = "invalid_value") -> Refusal:
    """A refusal of what stands at `path`."""
    return Refusal(Kind.BAD, code, f"{path}: {what}", param=path)


# --- tools -------------------------------------------------------------------------------------


def tools_of(fields: Sequence[dict[str, Any]]) -> tuple[Tool, ...]:
    """The functions, in their order. Raises Refusal."""
    found = []
    for number, field in enumerate(fields):
        path = f"tools[{number}]"
        if field.get("type") != "function":
            raise bad(f"{path}.type", tools.ONLY_FUNCTIONS, "unsupported_parameter")
        one = convert(field, FunctionField, path)
        mark = None if one.cache_control is None else one.cache_control.ttl or "5m"
        found.append(tools.tool(one.name, one.description, one.parameters, one.strict, path, mark))
    tools.check_names(found)
    return tuple(found)


def choice_of(choice: Choice | None, declared: Sequence[Tool], parallel: bool | None) -> ToolChoice:
    """What may be called. Raises Refusal."""
    if choice is None or isinstance(choice, str):
        return tools.choice(choice or "auto", (), declared, parallel)
    if choice.type == "function" and choice.name is not None:
        return tools.choice("required", (choice.name,), declared, parallel)
    if choice.type == "allowed_tools" and choice.mode is not None and choice.tools:
        names = []
        for number, one in enumerate(choice.tools):
            path = f"tool_choice.tools[{number}]"
            if one.get("type") != "function":
                raise bad(path, tools.ONLY_FUNCTIONS, "unsupported_parameter")
            names.append(convert(one.get("name"), tools.Name, f"{path}.name"))
        return tools.choice(choice.mode, names, declared, parallel)
    what = "its type is 'function', with a name, or 'allowed_tools', with a mode and tools."
    raise bad("tool_choice", what)


# --- items ---------------------------------------------------------------------------------------


def has_native_breakpoint(items: str | Sequence[dict[str, Any]]) -> bool:
    """Has a part OpenAI's own mark?"""
    if isinstance(items, str):
        return False
    return any(
        isinstance(part, dict) and part.get("prompt_cache_breakpoint") is not None
        for item in items
        for parts in (item.get("content"), item.get("output"))
        if isinstance(parts, list)
        for part in parts
    )


def segments_of(
    instructions: str | None, items: str | Sequence[dict[str, Any]], settings: cache.CacheSettings
) -> list[Segment]:
    """Instructions, then all items in order. Raises Refusal."""
    reader = _Reader(settings)
    if instructions:
        reader.message += 1
        reader.add("system", instructions, "instructions")
    if isinstance(items, str):
        reader.message += 1
        reader.add("user", items, "input")
        return reader.segments
    if not items:
        raise bad("input", "it is empty.")
    for number, item in enumerate(items):
        reader.read(item, f"input[{number}]")
    reader.calls.check_done(f"input[{len(items) - 1}]")
    if not reader.segments or reader.segments[-1].path == "instructions":
        raise bad("input", "there is nothing to answer in it.")
    return reader.segments


class _Reader:
    """Items on their way to segments."""

    def __init__(self, settings: cache.CacheSettings) -> None:
        self._settings = settings
        self.segments: list[Segment] = []
        self.calls = tools.PendingCalls()
        self.message = -1
        self._speaks = False
        """Is the latest item an assistant's message, or a call behind one?"""

    def read(self, item: dict[str, Any], path: str) -> None:
        match item.get("type", "message"):
            case "message":
                self._message(convert(item, MessageItem, path), path)
            case "function_call":
                self._call(convert(item, CallItem, path), path)
            case "function_call_output":
                self._result(convert(item, ResultItem, path), path)
            case "reasoning":
                pass
            case "item_reference":
                what = "nothing is stored here, so that no item can be referred to; send it."
                raise bad(path, what, "unsupported_parameter")
            case str(other):
                what = (
                    f"items of the type {other[:64]!r} are not supported; messages, function"
                    " calls and their outputs are."
                )
                raise bad(f"{path}.type", what, "unsupported_parameter")
            case _:
                raise bad(f"{path}.type", "a type is a text.")

    def _message(self, item: MessageItem, path: str) -> None:
        self.calls.check_done(path)
        self.message += 1
        self._speaks = item.role == "assistant"
        self._texts(item.role, item.content, f"{path}.content")

    def _call(self, item: CallItem, path: str) -> None:
        call = tools.call(item.call_id, item.name, item.arguments, path)
        self.calls.add(call, f"{path}.call_id")
        if not self._speaks:
            self.message += 1
            self._speaks = True
        self.add("assistant", "", path, call=call)

    def _result(self, item: ResultItem, path: str) -> None:
        name = self.calls.answer(item.call_id, f"{path}.call_id")
        self.message += 1
        self._speaks = False
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
            raise bad(path, "the list is empty.")
        for number, part in enumerate(content):
            at = f"{path}[{number}]"
            text, mark = self._part(role, part, at)
            self.add(role, text, at, name=name, answers=answers, retention=mark)

    def _part(self, role: Role, part: dict[str, Any], path: str) -> tuple[str, str | None]:
        kind = part.get("type")
        if kind == "refusal" and role == "assistant":
            return convert(part, RefusalText, path).refusal, None
        if kind in _UNSUPPORTED_PARTS:
            raise bad(path, f"{kind}: {TEXT_ONLY}", "unsupported_parameter")
        if not isinstance(kind, str) or kind not in _PARTS:
            shown = str(kind)[:64]
            raise bad(f"{path}.type", f"there is no part of the type {shown!r} in such an item.")
        found = convert(part, _PARTS[kind], path)
        mark = cache.requested_retention(
            found.prompt_cache_breakpoint, found.cache_control, self._settings
        )
        return found.text, mark

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
        self.segments.append(
            Segment(role, text, path, name, self.message, retention, call, answers)
        )
