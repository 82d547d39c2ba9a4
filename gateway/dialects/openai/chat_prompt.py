"""Translation of chat messages, functions and the tool choice to a prompt with breakpoints.

`openai.chat` calls it. An assistant message becomes its text and then its calls; a tool message is
the result of one call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from gateway.dialects.canonical import Segment, Tool, ToolChoice
from gateway.dialects.openai import cache, tools, wire
from gateway.dialects.tolerance import Tolerance
from gateway.dialects.validation import invalid_field

MESSAGES_MAX = 10_000
"""Most messages of one request."""


class TextPart(Struct, frozen=True, tag="text", tag_field="type", forbid_unknown_fields=True):
    text: wire.Text
    prompt_cache_breakpoint: cache.Breakpoint | None = None
    cache_control: cache.CompatCacheControl | None = None


class RefusalPart(Struct, frozen=True, tag="refusal", tag_field="type", forbid_unknown_fields=True):
    """An assistant's refusal in the history."""

    refusal: wire.Text


class ImagePart(Struct, frozen=True, tag="image_url", tag_field="type"):
    """An unsupported part, which the dialect knows so that it can refuse the part by name."""


class AudioPart(Struct, frozen=True, tag="input_audio", tag_field="type"):
    pass


class FilePart(Struct, frozen=True, tag="file", tag_field="type"):
    pass


class CalledFunction(Struct, frozen=True, forbid_unknown_fields=True):
    """A called function. The SDK sends back the `parsed_arguments` that it added."""

    name: tools.Name
    arguments: tools.Arguments = ""
    parsed_arguments: Any = None


Part = TextPart | RefusalPart | ImagePart | AudioPart | FilePart


class MessageToolCall(Struct, frozen=True, forbid_unknown_fields=True):
    """A tool call of an assistant message. Histories collected from a stream carry its `index`."""

    id: tools.CallId
    function: CalledFunction
    type: Literal["function"] = "function"
    index: int | None = None


class ChatMessage(Struct, frozen=True, forbid_unknown_fields=True):
    """One message.

    Answers that clients send back carry `refusal`, `audio` and `function_call` as null, and the
    SDK's `parsed`. `reasoning_content` (or `reasoning`), a text, is what the assistant thought.
    `cache_control` places a breakpoint after the message.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: wire.Text | list[Part] | None = None
    name: wire.Short | None = None
    tool_call_id: tools.CallId | None = None
    tool_calls: Annotated[list[MessageToolCall], Meta(max_length=tools.TOOLS_MAX)] | None = None
    function_call: None = None
    audio: None = None
    annotations: list[Any] | None = None
    refusal: wire.Text | None = None
    parsed: Any = None
    reasoning: Any = None
    reasoning_content: Any = None
    cache_control: cache.CompatCacheControl | None = None


class ChatToolField(Struct, frozen=True, forbid_unknown_fields=True):
    """A function and, in the compatible spelling, a breakpoint after it."""

    type: str
    function: tools.Function | None = None
    cache_control: cache.CompatCacheControl | None = None
    custom: Any = UNSET


class NamedFunction(Struct, frozen=True, forbid_unknown_fields=True):
    name: tools.Name


class ToolReference(Struct, frozen=True, forbid_unknown_fields=True):
    type: str
    function: NamedFunction | None = None


class AllowedTools(Struct, frozen=True, forbid_unknown_fields=True):
    mode: Literal["auto", "required"]
    tools: Annotated[list[ToolReference], Meta(min_length=1, max_length=tools.TOOLS_MAX)]


class ChoiceField(Struct, frozen=True, forbid_unknown_fields=True):
    type: str
    function: NamedFunction | None = None
    allowed_tools: AllowedTools | None = None


Choice = Literal["none", "auto", "required"] | ChoiceField


# --- tools -------------------------------------------------------------------------------------


def clean_tools(declared: Any, tolerance: Tolerance) -> Any:
    """Return tools of which those that are no functions have only their type: it says whether they
    may be left out. Cost: O(tools)."""
    if not isinstance(declared, list):
        return declared
    return [
        {"type": kind}
        if isinstance(tool, dict)
        and isinstance(kind := tool.get("type"), str)
        and kind not in ("function", tools.CUSTOM)
        else tool
        for tool in declared
    ]


def tools_of(
    fields: Sequence[ChatToolField], choice: Choice | None, tolerance: Tolerance
) -> tuple[Tool, ...]:
    """Return the declared functions in order. Changes: `tolerance` notes tools that are left out.
    Raises Refusal."""
    if not fields:
        return ()
    found, others = [], {}
    for number, field in enumerate(fields):
        path = f"tools[{number}]"
        is_custom = field.type == tools.CUSTOM or not isinstance(field.custom, UnsetType)
        if is_custom and not tolerance.is_lenient:
            problem = tools.unsupported_type(tools.CUSTOM)
            raise invalid_field(f"{path}.type", problem, "unsupported_parameter")
        if is_custom or field.type != "function":
            others[f"{path}.type"] = field.type
            continue
        if field.function is None:
            problem = "this field is required; expected the declaration of a function."
            raise invalid_field(f"{path}.function", problem, "missing_required_parameter")
        found.append(tools.tool(field.function, f"{path}.function", field.cache_control))
    is_auto = tools.is_auto(choice)
    tolerance.leave_out_tools(others, may_call_others=bool(found) and is_auto)
    tools.check_names(found)
    return tuple(found)


_ANY_CHOICE = ToolChoice()


def choice_of(choice: Choice | None, declared: Sequence[Tool], parallel: bool | None) -> ToolChoice:
    """Return which tools may be called. Raises Refusal."""
    if choice is None and not declared and parallel is None:
        return _ANY_CHOICE
    if choice is None or isinstance(choice, str):
        return tools.choice(choice or "auto", (), declared, parallel)
    if choice.type == "function" and choice.function is not None:
        return tools.choice("required", (choice.function.name,), declared, parallel)
    if choice.type == "allowed_tools" and choice.allowed_tools is not None:
        allowed = choice.allowed_tools
        names = []
        for number, reference in enumerate(allowed.tools):
            if reference.type != "function" or reference.function is None:
                path = f"tool_choice.allowed_tools.tools[{number}]"
                problem = tools.unsupported_type(reference.type)
                raise invalid_field(path, problem, "unsupported_parameter")
            names.append(reference.function.name)
        return tools.choice(allowed.mode, names, declared, parallel)
    problem = (
        f"unsupported or incomplete type {choice.type[:64]!r}; expected 'function' or"
        " 'allowed_tools', with an object of that name."
    )
    raise invalid_field("tool_choice", problem)


# --- messages ------------------------------------------------------------------------------------

_REASONING_PARTS = frozenset({"thinking", "redacted_thinking", "reasoning"})
"""Parts of answers of other servers, which are left out of the prompt."""


def clean_history(messages: Any, tolerance: Tolerance) -> Any:
    """Return messages; assistant turns have only known fields and no parts of reasoning.

    Assistant turns are answers that come back, with the fields that a client added to them.
    Cost: O(messages).
    """
    if not isinstance(messages, list):
        return messages
    return [
        _clean_answer(message, tolerance)
        if isinstance(message, dict) and message.get("role") == "assistant"
        else message
        for message in messages
    ]


def _clean_answer(message: dict[str, Any], tolerance: Tolerance) -> dict[str, Any]:
    found: dict[str, Any] = tolerance.prune(message, ChatMessage, "messages[]")
    parts = found.get("content")
    if isinstance(parts, list):
        kept = [part for part in parts if not _is_reasoning(part)]
        if len(kept) < len(parts):
            tolerance.ignore("messages[].content[].thinking")
            found["content"] = kept or None
    return found


def _is_reasoning(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") in _REASONING_PARTS


def has_native_breakpoint(messages: Sequence[ChatMessage]) -> bool:
    """Return whether any part has OpenAI's own breakpoint."""
    for message in messages:
        if isinstance(message.content, list):
            for part in message.content:
                if isinstance(part, TextPart) and part.prompt_cache_breakpoint is not None:
                    return True
    return False


def segments_of(messages: Sequence[ChatMessage], settings: cache.CacheSettings) -> list[Segment]:
    """Return the segments of all messages in order. Raises Refusal for an invalid message."""
    reader = _ChatReader(settings)
    for index in tools.with_results_behind_calls([_place(message) for message in messages]):
        reader.read(messages[index], index)
    reader.calls.check_answered(f"messages[{len(messages) - 1}]")
    return reader.segments


_ELSEWHERE = tools.HistoryPlace()


def _place(message: ChatMessage) -> tools.HistoryPlace:
    """Return what a message is in the order of calls and results."""
    if message.role == "tool":
        return tools.HistoryPlace(answers=message.tool_call_id)
    if message.role != "assistant" or not message.tool_calls:
        return _ELSEWHERE
    return tools.HistoryPlace(tuple(call.id for call in message.tool_calls))


def _is_plain(message: ChatMessage) -> bool:
    """Return whether a message is only a text. Most are, and take the reader's fast path."""
    return (
        type(message.content) is str
        and message.role != "tool"
        and not message.tool_calls
        and message.cache_control is None
        and message.reasoning_content is None
        and message.reasoning is None
    )


class _ChatReader:
    """Translates messages to segments."""

    def __init__(self, settings: cache.CacheSettings) -> None:
        self._settings = settings
        self.segments: list[Segment] = []
        self.calls = tools.PendingCalls()

    def read(self, message: ChatMessage, index: int) -> None:
        """Append the segments of one message. Raises Refusal."""
        path = f"messages[{index}]"
        name, answers = message.name, None
        if _is_plain(message) and not self.calls.any_pending:
            assert isinstance(message.content, str), "a plain message is a text"
            segment = Segment(message.role, message.content, f"{path}.content", name, index)
            self.segments.append(segment)
            return
        if message.role == "tool":
            if message.tool_call_id is None:
                problem = "this field is required; expected the id of the call that is answered."
                raise invalid_field(f"{path}.tool_call_id", problem, "missing_required_parameter")
            answers = message.tool_call_id
            name = self.calls.answer(answers, f"{path}.tool_call_id")
        else:
            self.calls.check_answered(path)
        if message.tool_calls and message.role != "assistant":
            problem = f"a {message.role} message has no tool calls; expected role 'assistant'."
            raise invalid_field(f"{path}.tool_calls", problem)
        thought = message.reasoning_content or message.reasoning
        if message.role == "assistant" and isinstance(thought, str) and thought:
            thought_path = f"{path}.reasoning_content"
            self.segments.append(
                Segment("assistant", thought, thought_path, None, index, is_thought=True)
            )
        for text, text_path, retention in self._texts(message, f"{path}.content"):
            self.segments.append(
                Segment(message.role, text, text_path, name, index, retention, answers=answers)
            )
        for number, tool_call in enumerate(message.tool_calls or ()):
            call_path = f"{path}.tool_calls[{number}]"
            function = tool_call.function
            call = tools.call(tool_call.id, function.name, function.arguments)
            self.calls.add(call, f"{call_path}.id")
            self.segments.append(Segment(message.role, "", call_path, None, index, call=call))
        if message.cache_control is not None:
            self.segments[-1] = cache.with_retention(self.segments[-1], message.cache_control)

    def _texts(self, message: ChatMessage, path: str) -> Iterator[tuple[str, str, str | None]]:
        """Yield each text of a message's content, its path and the retention of its breakpoint."""
        content = message.content
        if content is None:
            if message.role != "assistant":
                problem = f"a {message.role} message requires content; expected a text or parts."
                raise invalid_field(path, problem)
            content = message.refusal or ""
        if isinstance(content, str):
            if content or not message.tool_calls:
                yield content, path, None
            return
        if not content and not message.tool_calls:
            raise invalid_field(path, "the list is empty; expected at least one part.")
        for number, part in enumerate(content):
            part_path = f"{path}[{number}]"
            if isinstance(part, RefusalPart):
                if message.role != "assistant":
                    problem = f"a {message.role} message holds no refusal; expected a text part."
                    raise invalid_field(f"{part_path}.type", problem)
                yield part.refusal, part_path, None
            elif isinstance(part, TextPart):
                own, control = part.prompt_cache_breakpoint, part.cache_control
                yield part.text, part_path, cache.requested_retention(own, control, self._settings)
            else:
                problem = f"{part.__struct_config__.tag}: {tools.TEXT_ONLY}"
                raise invalid_field(part_path, problem, "unsupported_parameter")
