"""Translation of input items, functions and the tool choice to a prompt with breakpoints.

Clients may send the output items of an answer back unchanged: a message, the calls after it and the
text behind them are one assistant turn; reasoning items before it are its thoughts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

from msgspec import Meta, Struct, field
from msgspec.structs import replace

from gateway.dialects.canonical import TOOLS_MAX, Segment, Tool, ToolCall, ToolChoice
from gateway.dialects.openai import cache, tools, wire
from gateway.dialects.openai.responses.hosted_items import plain_items, unsupported_item
from gateway.dialects.openai.responses.stored_items import kind_of
from gateway.dialects.tolerance import Tolerance
from gateway.dialects.validation import convert, invalid_field, json_type, shown

ITEMS_MAX = 10_000
"""Most input items of one request, with those of earlier responses."""

Status = Literal["in_progress", "completed", "incomplete"]
Role = Literal["system", "developer", "user", "assistant", "tool"]
T = TypeVar("T", bound=Struct)
Given = str | Sequence[dict[str, Any]]
"""The input of a request: a text, or items; none, if it only continues stored ones."""


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
    namespace: tools.Name | None = None
    caller: dict[str, Any] | None = None


class ResultItem(Struct, frozen=True, forbid_unknown_fields=True):
    type: str
    call_id: tools.CallId
    output: wire.Text | list[dict[str, Any]]
    id: wire.Short | None = None
    status: Status | None = None
    name: wire.Short | None = None
    namespace: wire.Short | None = None
    caller: dict[str, Any] | None = None


class FunctionField(tools.Function, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A function declaration with its fields beside its type."""

    type: str
    allowed_callers: list[Any] | None = None
    is_async: bool | None = field(name="async", default=None)
    defer_loading: bool | None = None
    output_schema: dict[str, Any] | None = None


class NamespaceField(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A group of functions, whose calls name the group beside the function."""

    type: str
    name: tools.Name
    description: tools.Described | None = None
    tools: Annotated[list[dict[str, Any]], Meta(max_length=tools.TOOLS_MAX)]


class ChosenFunction(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    type: str
    name: tools.Name | None = None
    namespace: tools.Name | None = None
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


def tools_of(
    fields: Sequence[dict[str, Any]], choice: Choice | None, tolerance: Tolerance
) -> tuple[Tool, ...]:
    """Return the declared functions in order, with those of namespaces. Raises Refusal.

    A function of a namespace gets the joined name `namespace.function`, which the model reads and
    calls; no name of a function alone has a dot. Changes: `tolerance` notes ignored fields, and
    tools that are left out.
    """
    found: list[Tool] = []
    others: dict[str, str] = {}
    for number, declared in enumerate(fields):
        path, kind = f"tools[{number}]", declared.get("type")
        if kind == "function":
            found.append(_function(declared, path, tolerance))
        elif kind == "namespace":
            found += _namespace(declared, path, tolerance)
        elif isinstance(kind, str) and (kind != tools.CUSTOM or tolerance.is_lenient):
            others[f"{path}.type"] = kind
        else:
            problem = tools.unsupported_type(kind)
            raise invalid_field(f"{path}.type", problem, "unsupported_parameter")
    is_auto = tools.is_auto(choice)
    tolerance.leave_out_tools(others, may_call_others=bool(found) and is_auto)
    if len(found) > TOOLS_MAX:
        problem = f"{len(found)} functions with those of namespaces; expected at most {TOOLS_MAX}."
        raise invalid_field("tools", problem)
    tools.check_names(found)
    return tuple(found)


def _function(declared: dict[str, Any], path: str, tolerance: Tolerance) -> Tool:
    if tolerance.is_lenient:
        declared = tolerance.prune(declared, FunctionField, "tools")
    function = convert(declared, FunctionField, path)
    tolerance.take_hint("tools.allowed_callers", function.allowed_callers)
    tolerance.take_hint("tools.async", function.is_async, (False,))
    tolerance.take_hint("tools.defer_loading", function.defer_loading, (False,))
    tolerance.take_hint("tools.output_schema", function.output_schema)
    return tools.tool(function, path)


def _namespace(declared: dict[str, Any], path: str, tolerance: Tolerance) -> list[Tool]:
    """Return the functions of a namespace; the first one begins with the group's description,
    because no template has another place for that."""
    if tolerance.is_lenient:
        declared = tolerance.prune(declared, NamespaceField, "tools")
    group = convert(declared, NamespaceField, path)
    found: list[Tool] = []
    for number, inner in enumerate(group.tools):
        inner_path, kind = f"{path}.tools[{number}]", inner.get("type")
        if kind != "function":
            if tolerance.is_strict or not isinstance(kind, str):
                problem = tools.unsupported_type(kind)
                raise invalid_field(f"{inner_path}.type", problem, "unsupported_parameter")
            tolerance.ignore(f"tools.{kind}")
            continue
        function = _function(inner, inner_path, tolerance)
        texts = [function.description] if found else [group.description, function.description]
        found.append(
            replace(
                function,
                name=tools.joined_name(group.name, function.name),
                description="\n\n".join(filter(None, texts)),
            )
        )
    return found


def choice_of(choice: Choice | None, declared: Sequence[Tool], parallel: bool | None) -> ToolChoice:
    """Return which tools may be called. Raises Refusal."""
    if choice is None or isinstance(choice, str):
        return tools.choice(choice or "auto", (), declared, parallel)
    if choice.type == "function" and choice.name is not None:
        name = tools.joined_name(choice.namespace, choice.name)
        return tools.choice("required", (name,), declared, parallel)
    if choice.type == "allowed_tools" and choice.mode is not None and choice.tools:
        names: list[str] = []
        for number, reference in enumerate(choice.tools):
            names += _allowed_names(reference, f"tool_choice.tools[{number}]", declared)
        return tools.choice(choice.mode, names, declared, parallel)
    problem = (
        f"unsupported or incomplete type {choice.type[:64]!r}; expected 'function' with a name, or"
        " 'allowed_tools' with a mode and tools."
    )
    raise invalid_field("tool_choice", problem)


def _allowed_names(reference: dict[str, Any], path: str, declared: Sequence[Tool]) -> list[str]:
    """Return the functions that an entry of `allowed_tools` names: one, or those of a namespace."""
    kind = reference.get("type")
    if kind not in ("function", "namespace"):
        raise invalid_field(path, tools.unsupported_type(kind), "unsupported_parameter")
    named = convert(reference, ChosenFunction, path)
    name = convert(named.name, tools.Name, f"{path}.name")
    if kind == "namespace":
        found = [tool.name for tool in declared if tools.split_name(tool.name)[0] == name]
        return found or [tools.joined_name(name, "*")]
    return [tools.joined_name(named.namespace, name)]


# --- items ---------------------------------------------------------------------------------------


def has_native_breakpoint(items: Given) -> bool:
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


def items_of(items: Given) -> Sequence[dict[str, Any]]:
    """Return the input as items: a text is a user's message."""
    if not isinstance(items, str):
        return items
    part = {"type": "input_text", "text": items}
    return [{"type": "message", "role": "user", "content": [part]}]


def check_items(items: Sequence[dict[str, Any]], tolerance: Tolerance) -> None:
    """Raise Refusal for an item that no request could send. Calls need no results yet."""
    settings = cache.CacheSettings(None, None, None, has_native_breakpoint(items))
    reader = _ItemsReader(settings, tolerance, tools.AnyCalls())
    placed = [(item, f"items[{number}]") for number, item in enumerate(items)]
    for item, path in plain_items(placed, tolerance, is_part=True):
        reader.read(item, path)


def segments_of(
    instructions: str | None,
    history: Sequence[dict[str, Any]],
    history_field: str,
    items: Given,
    settings: cache.CacheSettings,
    tolerance: Tolerance,
) -> list[Segment]:
    """Return the segments of the instructions, the history and the items in order. Raises Refusal.

    `history`: stored items of earlier responses, without calls that were truncated, whose paths
    begin with `history_field`. Changes: `tolerance` notes ignored fields of the items that are
    earlier output.
    """
    sent = 1 if isinstance(items, str) else len(items)
    if len(history) + sent > ITEMS_MAX:
        problem = f"{sent} items after {len(history)} stored ones; limit {ITEMS_MAX}."
        raise invalid_field("input", problem)
    reader = _ItemsReader(settings, tolerance, tools.PendingCalls())
    if instructions:
        reader.message += 1
        reader.add("system", instructions, "instructions")
    placed = [
        (item, f"{history_field}[{number}]")
        for number, item in enumerate(history)
        if item.get("type") != "function_call" or item.get("status") != "incomplete"
    ]
    if not isinstance(items, str):
        placed += [(item, f"input[{number}]") for number, item in enumerate(items)]
    placed = list(plain_items(placed, tolerance))
    for at in tools.with_results_behind_calls([_place(item) for item, _ in placed]):
        reader.read(*placed[at])
    if isinstance(items, str):
        reader.calls.check_answered("input")
        reader.message += 1
        reader.add("user", items, "input")
        return reader.segments
    if not items and not history:
        problem = "this field is required; expected a text or at least one item."
        raise invalid_field("input", problem, "missing_required_parameter")
    reader.calls.check_answered(f"input[{len(items) - 1}]" if items else "input")
    if not reader.segments or reader.segments[-1].path == "instructions":
        raise invalid_field("input", "no item has content to answer; expected a message.")
    return reader.segments


def _place(item: dict[str, Any]) -> tools.HistoryPlace:
    """Return what an item, which may be invalid, is in the order of calls and results."""
    call_id = item.get("call_id")
    match kind_of(item):
        case "function_call" if isinstance(call_id, str):
            return tools.HistoryPlace((call_id,), continues=True)
        case "function_call_output" if isinstance(call_id, str):
            return tools.HistoryPlace(answers=call_id)
        case kind:
            is_answer = kind == "message" and item.get("role") == "assistant"
            return tools.HistoryPlace(continues=is_answer or kind == "reasoning")


class _ItemsReader:
    """Translates input items to segments. `message` is the index of the latest message."""

    def __init__(
        self, settings: cache.CacheSettings, tolerance: Tolerance, calls: tools.PendingCalls
    ) -> None:
        self._settings = settings
        self._tolerance = tolerance
        self.segments: list[Segment] = []
        self.calls = calls
        self.message = -1
        self._in_assistant_turn = False
        """Whether the latest item is an assistant message, a call or a thought."""
        self._is_turn_open = False
        """Whether the turn has only a thought so far."""

    def read(self, item: dict[str, Any], path: str) -> None:
        """Append the segments of one item. Raises Refusal."""
        match kind_of(item):
            case "message":
                is_answer = item.get("role") == "assistant"
                self._message(self._convert(item, MessageItem, path, is_answer=is_answer), path)
            case "function_call":
                self._call(self._convert(item, CallItem, path, is_answer=True), path)
            case "function_call_output":
                self._result(self._convert(item, ResultItem, path), path)
            case "reasoning":
                self._reasoning(item, path)
            case str(other):
                problem = unsupported_item(other)
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
        is_answer = item.role == "assistant"
        if not is_answer:
            self.calls.check_answered(path)
        if not (is_answer and (self._is_turn_open or self.calls.any_pending)):
            self.message += 1  # text behind a call belongs to the call's turn
        self._in_assistant_turn, self._is_turn_open = is_answer, False
        self._texts(item.role, item.content, f"{path}.content")

    def _reasoning(self, item: dict[str, Any], path: str) -> None:
        """Append the text of a reasoning item, of its content or its summary, as a thought."""
        field = "content" if item.get("content") else "summary"
        parts = item.get(field) or []
        if not isinstance(parts, list):
            raise invalid_field(f"{path}.{field}", f"Expected `array`, got `{json_type(parts)}`.")
        texts = [part.get("text") for part in parts if isinstance(part, dict)]
        thought = "".join(text for text in texts if isinstance(text, str))
        if not thought:
            return
        if not self._in_assistant_turn:
            self.message += 1
            self._in_assistant_turn = True
            self._is_turn_open = True
        self.segments.append(
            Segment("assistant", thought, path, None, self.message, is_thought=True)
        )

    def _call(self, item: CallItem, path: str) -> None:
        name = tools.joined_name(item.namespace, item.name)
        call = tools.call(item.call_id, name, item.arguments)
        self.calls.add(call, f"{path}.call_id")
        if not self._in_assistant_turn:
            self.message += 1
            self._in_assistant_turn = True
        self._is_turn_open = False
        self.add("assistant", "", path, call=call)

    def _result(self, item: ResultItem, path: str) -> None:
        name = self.calls.answer(item.call_id, f"{path}.call_id")
        self.message += 1
        self._in_assistant_turn = self._is_turn_open = False
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
        if isinstance(kind, str) and kind in _UNSUPPORTED_PARTS:
            raise invalid_field(path, f"{kind}: {tools.TEXT_ONLY}", "unsupported_parameter")
        if not isinstance(kind, str) or kind not in _PARTS:
            problem = f"unknown part type {shown(kind)}; expected {' or '.join(_PARTS)}."
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
