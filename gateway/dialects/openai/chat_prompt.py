"""Chat messages, functions and the choice among them as a prompt with breakpoints.

`openai_chat` calls it. An assistant's message is its text, then its calls; a tool's message is the
result of one of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from gateway.dialects.canonical import Segment, Tool, ToolCall, ToolChoice
from gateway.dialects.openai import cache, tools, wire
from gateway.errors import Kind, Refusal

MESSAGES_MAX = 10_000


class TextPart(Struct, frozen=True, tag="text", tag_field="type", forbid_unknown_fields=True):
    text: wire.Text
    prompt_cache_breakpoint: cache.Breakpoint | None = None
    cache_control: cache.CompatCacheControl | None = None


class RefusalPart(Struct, frozen=True, tag="refusal", tag_field="type", forbid_unknown_fields=True):
    """How an assistant once declined."""

    refusal: wire.Text


class ImagePart(Struct, frozen=True, tag="image_url", tag_field="type"):
    """What a text model cannot use is known, so that it can be refused by its name."""


class AudioPart(Struct, frozen=True, tag="input_audio", tag_field="type"):
    pass


class FilePart(Struct, frozen=True, tag="file", tag_field="type"):
    pass


class CalledFunction(Struct, frozen=True, forbid_unknown_fields=True):
    """`parsed_arguments`: what the SDK made of the arguments, and sends back with them."""

    name: tools.Name
    arguments: tools.Arguments = ""
    parsed_arguments: Any = None


Part = TextPart | RefusalPart | ImagePart | AudioPart | FilePart


class MessageToolCall(Struct, frozen=True, forbid_unknown_fields=True):
    """`index` is there in histories that were put together from a stream."""

    id: tools.CallId
    function: CalledFunction
    type: Literal["function"] = "function"
    index: int | None = None


class ChatMessage(Struct, frozen=True, forbid_unknown_fields=True):
    """One message. `refusal`, `audio` and `function_call` may be there as null, as answers have
    them. `parsed` is what the SDK made of the content, and sends back with it; reasoning, of
    whichever server, is no part of the prompt. `cache_control` marks the whole of it."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: wire.Text | list[Part] | None = None
    name: wire.Short | None = None
    tool_call_id: wire.Short | None = None
    tool_calls: Annotated[list[MessageToolCall], Meta(max_length=tools.TOOLS_MAX)] | None = None
    function_call: None = None
    audio: None = None
    annotations: list[Any] | None = None
    refusal: wire.Text | None = None
    parsed: Any = None
    reasoning: Any = None
    reasoning_content: Any = None
    cache_control: cache.CompatCacheControl | None = None


class Function(Struct, frozen=True, forbid_unknown_fields=True):
    name: tools.Name
    description: tools.Described | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    cache_control: cache.CompatCacheControl | None = None


class ChatToolField(Struct, frozen=True, forbid_unknown_fields=True):
    """A function and, in the spelling of others, a breakpoint behind it."""

    type: str
    function: Function | None = None
    cache_control: cache.CompatCacheControl | None = None
    custom: Any = UNSET


class NamedFunction(Struct, frozen=True):
    name: tools.Name


class ToolReference(Struct, frozen=True):
    type: str
    function: NamedFunction | None = None


class AllowedTools(Struct, frozen=True):
    mode: Literal["auto", "required"]
    tools: Annotated[list[ToolReference], Meta(min_length=1, max_length=tools.TOOLS_MAX)]


class ChoiceField(Struct, frozen=True):
    type: str
    function: NamedFunction | None = None
    allowed_tools: AllowedTools | None = None


Choice = Literal["none", "auto", "required"] | ChoiceField


def bad(path: str, what: str, code: str = "invalid_value") -> Refusal:
    """A refusal of what stands at `path`."""
    return Refusal(Kind.BAD, code, f"{path}: {what}", param=path)


# --- tools -------------------------------------------------------------------------------------


def tools_of(fields: Sequence[ChatToolField]) -> tuple[Tool, ...]:
    """The functions, in their order. Raises Refusal."""
    if not fields:
        return ()
    found = []
    for number, field in enumerate(fields):
        path = f"tools[{number}]"
        if field.type != "function" or not isinstance(field.custom, UnsetType):
            raise bad(f"{path}.type", tools.ONLY_FUNCTIONS, "unsupported_parameter")
        function = field.function
        if function is None:
            raise bad(f"{path}.function", "which one?", "missing_required_parameter")
        control = field.cache_control or function.cache_control
        found.append(
            tools.tool(
                function.name,
                function.description,
                function.parameters,
                function.strict,
                f"{path}.function",
                None if control is None else control.ttl or "5m",
            )
        )
    tools.check_names(found)
    return tuple(found)


_ANY_CHOICE = ToolChoice()


def choice_of(choice: Choice | None, declared: Sequence[Tool], parallel: bool | None) -> ToolChoice:
    """What may be called. Raises Refusal."""
    if choice is None and not declared and parallel is None:
        return _ANY_CHOICE
    if choice is None or isinstance(choice, str):
        return tools.choice(choice or "auto", (), declared, parallel)
    if choice.type == "function" and choice.function is not None:
        return tools.choice("required", (choice.function.name,), declared, parallel)
    if choice.type == "allowed_tools" and choice.allowed_tools is not None:
        allowed = choice.allowed_tools
        names = []
        for number, one in enumerate(allowed.tools):
            if one.type != "function" or one.function is None:
                path = f"tool_choice.allowed_tools.tools[{number}]"
                raise bad(path, tools.ONLY_FUNCTIONS, "unsupported_parameter")
            names.append(one.function.name)
        return tools.choice(allowed.mode, names, declared, parallel)
    what = "its type is 'function' or 'allowed_tools', with an object of that name."
    raise bad("tool_choice", what)


# --- messages ------------------------------------------------------------------------------------


def has_native_breakpoint(messages: Sequence[ChatMessage]) -> bool:
    """Has a part OpenAI's own mark?"""
    for message in messages:
        if isinstance(message.content, list):
            for part in message.content:
                if isinstance(part, TextPart) and part.prompt_cache_breakpoint is not None:
                    return True
    return False


def segments_of(messages: Sequence[ChatMessage], settings: cache.CacheSettings) -> list[Segment]:
    """All messages in order. Raises Refusal where one is no message of its role."""
    reader = _Reader(settings)
    for index, message in enumerate(messages):
        reader.read(message, index)
    reader.calls.check_done(f"messages[{len(messages) - 1}]")
    return reader.segments


def _is_plain(message: ChatMessage) -> bool:
    """Most messages of a long history are: they are read without looking any closer."""
    return (
        type(message.content) is str
        and message.role != "tool"
        and not message.tool_calls
        and message.cache_control is None
    )


class _Reader:
    """Messages on their way to segments."""

    def __init__(self, settings: cache.CacheSettings) -> None:
        self._settings = settings
        self.segments: list[Segment] = []
        self.calls = tools.PendingCalls()

    def read(self, message: ChatMessage, index: int) -> None:
        at = f"messages[{index}]"
        name, answers = message.name, None
        if _is_plain(message) and not self.calls.are_open:
            assert isinstance(message.content, str), "a plain message is a text"
            segment = Segment(message.role, message.content, f"{at}.content", name, index)
            self.segments.append(segment)
            return
        if message.role == "tool":
            if message.tool_call_id is None:
                path = f"{at}.tool_call_id"
                raise bad(path, "which call does it answer?", "missing_required_parameter")
            answers = message.tool_call_id
            name = self.calls.answer(answers, f"{at}.tool_call_id")
        else:
            self.calls.check_done(at)
        if message.tool_calls and message.role != "assistant":
            raise bad(f"{at}.tool_calls", f"a {message.role} message makes no calls.")
        self._content(message, index, name, answers)
        for number, made in enumerate(message.tool_calls or ()):
            path = f"{at}.tool_calls[{number}]"
            function = made.function
            call = tools.call(made.id, function.name, function.arguments, f"{path}.function")
            self.calls.add(call, f"{path}.id")
            self._add(message, index, "", path, call=call)
        if message.cache_control is not None:
            self._mark_last(message.cache_control)

    def _content(
        self, message: ChatMessage, index: int, name: str | None, answers: str | None
    ) -> None:
        path = f"messages[{index}].content"
        content = message.content
        if content is None:
            if message.role != "assistant":
                raise bad(path, f"a {message.role} message needs content.")
            content = message.refusal or ""
        if isinstance(content, str):
            if content or not message.tool_calls:
                self._add(message, index, content, path, name=name, answers=answers)
            return
        if not content and not message.tool_calls:
            raise bad(path, "the list is empty.")
        for number, part in enumerate(content):
            at = f"{path}[{number}]"
            if isinstance(part, RefusalPart):
                if message.role != "assistant":
                    raise bad(f"{at}.type", "only an assistant refuses.")
                self._add(message, index, part.refusal, at, name=name)
                continue
            if not isinstance(part, TextPart):
                kind = part.__struct_config__.tag
                raise bad(at, f"{kind}: this is a text model; send text.", "unsupported_parameter")
            mark = cache.requested_retention(
                part.prompt_cache_breakpoint, part.cache_control, self._settings
            )
            self._add(message, index, part.text, at, name=name, answers=answers, retention=mark)

    def _add(
        self,
        message: ChatMessage,
        index: int,
        text: str,
        path: str,
        *,
        name: str | None = None,
        answers: str | None = None,
        call: ToolCall | None = None,
        retention: str | None = None,
    ) -> None:
        self.segments.append(
            Segment(message.role, text, path, name, index, retention, call, answers)
        )

    def _mark_last(self, control: cache.CompatCacheControl) -> None:
        last = self.segments[-1]
        self.segments[-1] = cache.with_retention(last, control)
