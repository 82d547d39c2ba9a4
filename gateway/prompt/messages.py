"""Split a prompt into parts in API order, and build the messages that a chat template takes.

Every segment and tool is a `TemplatePart`: text of some message, a call's arguments, or a tool. For
templates that support no tools (`tool_styles.FALLBACK`) tools, calls and results become text, and
the template sees plain messages. If it has no system message either, the text of one begins the
first user message. The module knows no template source and no tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from gateway.dialects.canonical import Boundary, Prompt, Segment, Tool, ToolCall
from gateway.structured_output.json_text import parse_arguments, parse_schema
from gateway.structured_output.thinking import NO_THINKING, ThinkingFormat
from gateway.structured_output.tool_styles import ToolStyle

_TOOLS_INTRO = (
    "You can call functions. Each line between these tags describes one, as JSON:\n<tools>"
)
_TOOLS_RULES = (
    "\n</tools>\nTo call a function, write its name and its arguments as JSON between these tags,"
    ' once for each call:\n<tool_call>\n{"name": <name>, "arguments": <object>}\n</tool_call>'
    "\nWhat it returned will be given to you between <tool_response> tags."
)


class TemplatePart(Struct, frozen=True):
    """A part of a prompt."""

    text: str | None
    """The text to find in the rendering, None for a tool that the template writes itself."""
    boundary: Boundary | None = None
    """Where the part ends, tokens not yet set; None for text that the gateway adds."""
    is_call: bool = False


TemplateTool = dict[str, Any]
"""A tool in the form that templates take."""


class TemplateMessage(Struct, frozen=True):
    """A message for the template. `parts`, `thoughts` and the first item of each pair in `calls`
    index `TemplatePart`s."""

    role: str
    parts: tuple[int, ...] = ()
    calls: tuple[tuple[int, ToolCall], ...] = ()
    name: str | None = None
    answers: str | None = None
    thoughts: tuple[int, ...] = ()


class TemplateInput(Struct, frozen=True):
    """The input of a template: `messages` made of `parts`, and `tools` if the template writes them;
    tools are then the first parts."""

    parts: tuple[TemplatePart, ...]
    messages: tuple[TemplateMessage, ...]
    tools: tuple[TemplateTool, ...] = ()
    variables: tuple[tuple[str, object], ...] = ()
    """Further variables."""
    thoughts_key: str = ""
    """The key of a message's thoughts, "" if the template takes none."""

    def for_template(
        self,
        style: ToolStyle,
        text_of: Callable[[int], str],
        arguments: Callable[[int, ToolCall], object],
    ) -> list[dict[str, object]]:
        """Return the messages as templates take them. `arguments`: returns a call's arguments."""
        return [self._message(message, style, text_of, arguments) for message in self.messages]

    def _message(
        self,
        message: TemplateMessage,
        style: ToolStyle,
        text_of: Callable[[int], str],
        arguments: Callable[[int, ToolCall], object],
    ) -> dict[str, object]:
        content = "".join(
            text_of(part) for part in message.parts if self.parts[part].text or not message.calls
        )
        made: dict[str, object] = {"role": message.role, "content": content}
        if message.thoughts and self.thoughts_key:
            made[self.thoughts_key] = "".join(map(text_of, message.thoughts))
        if message.name is not None:
            made["name"] = message.name
        if message.answers is not None:
            made["tool_call_id"] = style.call_id(message.answers)
        if message.calls:
            made["tool_calls"] = [
                {
                    "id": style.call_id(call.call_id),
                    "type": "function",
                    "function": {"name": call.name, "arguments": arguments(part, call)},
                }
                for part, call in message.calls
            ]
        return made


def template_tool(tool: Tool) -> TemplateTool:
    """Return a tool as templates take it. O(schema). Raises Refusal if the schema is invalid."""
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": parse_schema(tool.parameters, tool.path),
    }
    return {"type": "function", "function": function}


def build_template_input(
    prompt: Prompt,
    style: ToolStyle,
    thinking: ThinkingFormat = NO_THINKING,
    *,
    has_system: bool = True,
) -> TemplateInput:
    """Build the template's input from a chat. O(segments + tools). Raises Refusal for a schema.

    `has_system`: whether the template takes a system message; one that writes tools itself has to.
    """
    maker = (
        _NativeToolBuilder(prompt)
        if style.is_native
        else _TextToolBuilder(prompt, has_system=has_system)
    )
    tools = tuple(map(template_tool, prompt.tools))
    maker.tools(prompt.tools, tools)
    for turn in groupby(enumerate(prompt.segments), key=_message_key):
        maker.turn(list(turn[1]))
    return TemplateInput(
        tuple(maker.parts),
        maker.finished(),
        tools if style.is_native else (),
        thinking.variables(prompt.thinking),
        thinking.history,
    )


def _message_key(numbered: tuple[int, Segment]) -> tuple[int, str, str | None]:
    """Return the key that segments of one template message share."""
    segment = numbered[1]
    return segment.message, segment.role, segment.answers


class _InputBuilder:
    """Builds parts and messages: first the tools, then the turns, in API order."""

    def __init__(self, prompt: Prompt) -> None:
        self._segments = prompt.segments
        self.parts: list[TemplatePart] = []
        self.messages: list[TemplateMessage] = []

    def part(
        self, text: str | None, boundary: Boundary | None = None, *, is_call: bool = False
    ) -> int:
        """Add a part and return its index."""
        self.parts.append(TemplatePart(text, boundary, is_call))
        return len(self.parts) - 1

    def finished(self) -> tuple[TemplateMessage, ...]:
        """Return the messages; no turn follows."""
        return tuple(self.messages)

    def boundary(self, number: int) -> Boundary:
        """Return where segment `number` ends, tokens not yet set."""
        segment = self._segments[number]
        after = self._segments[number + 1] if number + 1 < len(self._segments) else None
        return Boundary(
            0,
            segment.path,
            segment.retention,
            segment.tier,
            segment.role,
            after is None or after.message != segment.message,
            "call" if segment.call is not None else "result" if segment.answers is not None else "",
        )


class _NativeToolBuilder(_InputBuilder):
    """Builds the input of templates that write tools and calls themselves."""

    def __init__(self, prompt: Prompt) -> None:
        super().__init__(prompt)
        calls = (part.call for part in prompt.segments if part.call is not None)
        self._names = {call.call_id: call.name for call in calls}

    def tools(self, tools: Sequence[Tool], _objects: Sequence[TemplateTool]) -> None:
        """Add a part for each tool; the template writes them."""
        for tool in tools:
            self.part(None, _tool_boundary(tool))

    def turn(self, segments: Sequence[tuple[int, Segment]]) -> None:
        """Add one message."""
        parts, calls, thoughts = [], [], []
        for number, segment in segments:
            if segment.is_thought:
                thoughts.append(self.part(segment.text, self.boundary(number)))
            elif segment.call is None:
                parts.append(self.part(segment.text, self.boundary(number)))
            else:
                text = parse_arguments(segment.call.arguments)[1]
                part = self.part(text, self.boundary(number), is_call=True)
                calls.append((part, segment.call))
        first = segments[0][1]
        name = first.name or self._names.get(first.answers or "")
        self.messages.append(
            TemplateMessage(
                _role(first), tuple(parts), tuple(calls), name, first.answers, tuple(thoughts)
            )
        )


class _TextToolBuilder(_InputBuilder):
    """Builds the input of templates that support no tools: everything is text in messages."""

    def __init__(self, prompt: Prompt, *, has_system: bool) -> None:
        super().__init__(prompt)
        self._system_role = "system" if has_system else "user"
        self._after_result = False
        self._has_turns = False
        self._is_head = True
        """Whether nothing but tools and system messages came so far."""
        self._parts: list[list[int]] = []
        """The parts of each message; those of the last one may still grow."""
        self._thoughts: list[int] = []

    def tools(self, tools: Sequence[Tool], objects: Sequence[TemplateTool]) -> None:
        """Add a system message that lists the tools, one per line."""
        if not tools:
            return
        parts = [self.part(_TOOLS_INTRO)]
        for tool, written in zip(tools, objects, strict=True):
            line = "\n" + json.dumps(written, ensure_ascii=False)
            parts.append(self.part(line, _tool_boundary(tool)))
        parts.append(self.part(_TOOLS_RULES))
        self._append(TemplateMessage(self._system_role), parts)

    def turn(self, segments: Sequence[tuple[int, Segment]]) -> None:
        """Add a message, or extend the last one: a tool result and the user text after it share
        a message, because some templates require user and assistant to alternate."""
        first = segments[0][1]
        is_result = first.role == "tool"
        role = "user" if is_result else _role(first)
        is_system = self._is_head and role == "system"
        role = self._system_role if is_system else role
        parts = [self.part("<tool_response>\n")] if is_result else []
        ends_line, self._thoughts = True, []
        for number, segment in segments:
            if segment.is_thought:
                self._thoughts.append(self.part(segment.text, self.boundary(number)))
                continue
            if segment.call is None:
                parts.append(self.part(segment.text, self.boundary(number)))
                ends_line = segment.text.endswith("\n") if segment.text else ends_line
                continue
            parts.append(self.part("<tool_call>\n" if ends_line else "\n<tool_call>\n"))
            parts.append(self.part(_call_text(segment.call), self.boundary(number)))
            parts.append(self.part("\n</tool_call>"))
            ends_line = False
        if is_result:
            parts.append(self.part("\n</tool_response>"))
        if self._after_result and role == "user":
            self._join("\n", parts)
        elif self._belongs_to_head(role):
            self._join("\n\n", parts)
        else:
            name = None if is_result else first.name
            thoughts = tuple(self._thoughts)
            self._append(TemplateMessage(role, name=name, thoughts=thoughts), parts)
        self._after_result, self._has_turns = is_result, True
        self._is_head = is_system

    def _belongs_to_head(self, role: str) -> bool:
        """Return whether the next message continues the first: the system message that of the
        tools, and the first user message both, if the template takes no system message."""
        if not (self._is_head and self.messages and role == self._system_role):
            return False
        return role == "user" or not self._has_turns

    def finished(self) -> tuple[TemplateMessage, ...]:
        """Return the messages with their parts; no turn follows."""
        return tuple(
            replace(message, parts=tuple(parts))
            for message, parts in zip(self.messages, self._parts, strict=True)
        )

    def _append(self, message: TemplateMessage, parts: list[int]) -> None:
        self.messages.append(message)
        self._parts.append(parts)

    def _join(self, between: str, parts: Sequence[int]) -> None:
        """Add parts to the last message. O(parts): a thousand results in a row are one message."""
        self._parts[-1] += (self.part(between), *parts)


def _tool_boundary(tool: Tool) -> Boundary:
    return Boundary(0, tool.path, tool.retention, "tools", "system")


def _role(segment: Segment) -> str:
    return "system" if segment.role == "developer" else segment.role


def _call_text(call: ToolCall) -> str:
    return f'{{"name": {_quoted(call.name)}, "arguments": {parse_arguments(call.arguments)[1]}}}'


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
