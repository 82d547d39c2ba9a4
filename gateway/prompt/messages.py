"""A prompt's parts in API order, and the messages a template takes, made of them.

Every segment and tool is a `TemplatePart`: text that stands in some message, a call whose arguments
do, or a tool. For templates that know no tools (`tools.FALLBACK`) tools, calls and results become
text here, and the template sees plain messages. It knows no template and no tokens; `render` calls
it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

from msgspec import Struct

from gateway.dialects.canonical import Boundary, Prompt, Segment, Tool, ToolCall
from gateway.structured_output.json_text import arguments_of, schema_of
from gateway.structured_output.tool_styles import ToolStyle

_INTRO = "You can call functions. Each line between these tags describes one, as JSON:\n<tools>"
_RULES = (
    "\n</tools>\nTo call a function, write its name and its arguments as JSON between these tags,"
    ' once for each call:\n<tool_call>\n{"name": <name>, "arguments": <object>}\n</tool_call>'
    "\nWhat it returned will be given to you between <tool_response> tags."
)


class TemplatePart(Struct, frozen=True):
    """`text`: what stands for it in the rendering, None where the template writes it as a whole (a
    tool). `boundary`: where it ends, without tokens; None for words of our own."""

    text: str | None
    boundary: Boundary | None = None
    is_call: bool = False


TemplateTool = dict[str, Any]
"""A tool as templates expect it."""


class TemplateMessage(Struct, frozen=True):
    """A message for the template. `parts` and the first of each pair in `calls` index
    `TemplatePart`s."""

    role: str
    parts: tuple[int, ...] = ()
    calls: tuple[tuple[int, ToolCall], ...] = ()
    name: str | None = None
    answers: str | None = None


class TemplateInput(Struct, frozen=True):
    """What a template is given: `messages` of `parts`, and `tools` where it writes them; these are
    the first parts then."""

    parts: tuple[TemplatePart, ...]
    messages: tuple[TemplateMessage, ...]
    tools: tuple[TemplateTool, ...] = ()

    def for_template(
        self,
        style: ToolStyle,
        text_of: Callable[[int], str],
        arguments: Callable[[int, ToolCall], object],
    ) -> list[dict[str, object]]:
        """Messages as templates expect them. `arguments`: what stands for a call's."""
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
    """A tool as templates expect it. O(schema). Raises Refusal for the schema."""
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": schema_of(tool.parameters, tool.path),
    }
    return {"type": "function", "function": function}


def arrange(prompt: Prompt, style: ToolStyle) -> TemplateInput:
    """The parts and messages of a chat. O(segments + tools). Raises Refusal for a schema."""
    maker = _Native(prompt) if style.is_native else _InWords(prompt)
    tools = tuple(map(template_tool, prompt.tools))
    maker.tools(prompt.tools, tools)
    for turn in groupby(enumerate(prompt.segments), key=_turn):
        maker.turn(list(turn[1]))
    return TemplateInput(
        tuple(maker.parts), tuple(maker.messages), tools if style.is_native else ()
    )


def _turn(numbered: tuple[int, Segment]) -> tuple[int, str, str | None]:
    """What segments of one template message have in common."""
    segment = numbered[1]
    return segment.message, segment.role, segment.answers


class _Maker:
    """Takes tools, then turns, in API order."""

    def __init__(self, prompt: Prompt) -> None:
        self._segments = prompt.segments
        self.parts: list[TemplatePart] = []
        self.messages: list[TemplateMessage] = []

    def part(
        self, text: str | None, boundary: Boundary | None = None, *, is_call: bool = False
    ) -> int:
        """The number of a new part."""
        self.parts.append(TemplatePart(text, boundary, is_call))
        return len(self.parts) - 1

    def boundary(self, number: int) -> Boundary:
        """Where segment `number` ends, without its tokens."""
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


class _Native(_Maker):
    """For templates that write tools and calls themselves."""

    def __init__(self, prompt: Prompt) -> None:
        super().__init__(prompt)
        calls = (part.call for part in prompt.segments if part.call is not None)
        self._names = {call.call_id: call.name for call in calls}

    def tools(self, tools: Sequence[Tool], _objects: Sequence[TemplateTool]) -> None:
        """Left to the template."""
        for tool in tools:
            self.part(None, _tool_boundary(tool))

    def turn(self, segments: Sequence[tuple[int, Segment]]) -> None:
        """One message."""
        parts, calls = [], []
        for number, segment in segments:
            if segment.call is None:
                parts.append(self.part(segment.text, self.boundary(number)))
            else:
                text = arguments_of(segment.call.arguments)[1]
                part = self.part(text, self.boundary(number), is_call=True)
                calls.append((part, segment.call))
        first = segments[0][1]
        name = first.name or self._names.get(first.answers or "")
        self.messages.append(
            TemplateMessage(_role(first), tuple(parts), tuple(calls), name, first.answers)
        )


class _InWords(_Maker):
    """For templates that know no tools: everything is text in plain messages."""

    _after_result = False
    _has_turns = False

    def tools(self, tools: Sequence[Tool], objects: Sequence[TemplateTool]) -> None:
        """The head of the system message, a line each."""
        if not tools:
            return
        parts = [self.part(_INTRO)]
        for tool, written in zip(tools, objects, strict=True):
            line = "\n" + json.dumps(written, ensure_ascii=False)
            parts.append(self.part(line, _tool_boundary(tool)))
        parts.append(self.part(_RULES))
        self.messages.append(TemplateMessage("system", tuple(parts)))

    def turn(self, segments: Sequence[tuple[int, Segment]]) -> None:
        """A message, or more of the last one: results and what a user adds are one message, as
        some templates take user and assistant only in turns."""
        first = segments[0][1]
        is_result = first.role == "tool"
        role = "user" if is_result else _role(first)
        parts = [self.part("<tool_response>\n")] if is_result else []
        ends_line = True
        for number, segment in segments:
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
        elif len(self.messages) == 1 and role == "system" and not self._has_turns:
            self._join("\n\n", parts)
        else:
            name = None if is_result else first.name
            self.messages.append(TemplateMessage(role, tuple(parts), (), name))
        self._after_result, self._has_turns = is_result, True

    def _join(self, between: str, parts: Sequence[int]) -> None:
        last = self.messages[-1]
        self.messages[-1] = TemplateMessage(
            last.role, (*last.parts, self.part(between), *parts), (), last.name
        )


def _tool_boundary(tool: Tool) -> Boundary:
    return Boundary(0, tool.path, tool.retention, "tools", "system")


def _role(segment: Segment) -> str:
    return "system" if segment.role == "developer" else segment.role


def _call_text(call: ToolCall) -> str:
    return f'{{"name": {_quoted(call.name)}, "arguments": {arguments_of(call.arguments)[1]}}}'


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
