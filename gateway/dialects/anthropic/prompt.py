"""Anthropic's tools, system and messages as a prompt with breakpoints.

`anthropic` calls it. What a text model cannot use is refused by name; thinking in a history is left
out, because it is no part of what was said.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from gateway.dialects import validation
from gateway.dialects.anthropic import wire
from gateway.dialects.anthropic.breakpoints import Breakpoints
from gateway.dialects.canonical import Prompt, Segment, Tool, ToolCall, ToolChoice
from gateway.errors import Kind, Refusal

BILLING_HEADER = "x-anthropic-billing-header:"
"""How a line begins that a popular coding agent puts before its system prompt. It is another one in
every request and says nothing to a model; kept, it would make every prefix new."""

TEXT_ONLY = "this is a text model; send text."
SERVER_TOOL = "this server runs no tools of its own, so there are no results of them either."
REFUSED_BLOCKS: Mapping[str, str] = {
    "image": TEXT_ONLY,
    "document": TEXT_ONLY,
    "search_result": "search results are not supported; send their text.",
    "container_upload": SERVER_TOOL,
    "server_tool_use": SERVER_TOOL,
    "web_search_tool_result": SERVER_TOOL,
    "web_fetch_tool_result": SERVER_TOOL,
    "code_execution_tool_result": SERVER_TOOL,
    "bash_code_execution_tool_result": SERVER_TOOL,
    "text_editor_code_execution_tool_result": SERVER_TOOL,
    "tool_search_tool_result": SERVER_TOOL,
    "tool_reference": SERVER_TOOL,
    "mcp_tool_use": SERVER_TOOL,
    "mcp_tool_result": SERVER_TOOL,
    "browser_state": SERVER_TOOL,
    "compaction": "nothing is compacted here; send the messages.",
    "tool_addition": "tools are declared in tools.",
    "tool_removal": "tools are declared in tools.",
}
NO_BREAKPOINT = "it cannot have cache_control; it is only cached as part of what surrounds it."

_BLOCKS: Mapping[str, type[wire.Block]] = {
    "text": wire.TextBlock,
    "tool_use": wire.ToolUseBlock,
    "tool_result": wire.ToolResultBlock,
    "thinking": wire.ThinkingBlock,
    "redacted_thinking": wire.RedactedThinkingBlock,
}
_OF_ROLE: Mapping[str, frozenset[str]] = {
    "user": frozenset({"text", "tool_result"}),
    "assistant": frozenset({"text", "tool_use", "thinking", "redacted_thinking"}),
    "system": frozenset({"text"}),
    "a system prompt": frozenset({"text"}),
    "a tool result": frozenset({"text"}),
}


def prompt_of(body: wire.Body, version: str) -> Prompt:
    """Everything a model is shown, in API order. Raises Refusal."""
    return _Reader(body, version).read()


def bad(path: str, what: str, code: str = "invalid_value") -> Refusal:
    """A refusal of what stands at `path`."""
    return Refusal(Kind.BAD, code, f"{path}: {what}", param=path[:300])


class _Reader:
    """One request's way to a prompt. A place is the number of tools and segments before its end."""

    def __init__(self, body: wire.Body, version: str) -> None:
        self._body = body
        self._version = version
        self._marks = Breakpoints()
        self._tools: list[Tool] = []
        self._segments: list[Segment] = []
        self._message = -1
        self._role = ""
        self._open: dict[str, str] = {}
        self._names: dict[str, str] = {}

    def read(self) -> Prompt:
        """All of it, in the order in which breakpoints are looked at."""
        for number, field in enumerate(self._body.tools or ()):
            self._tool(field, f"tools[{number}]")
        self._system()
        prefilled = self._messages()
        self._marks.automatic(self._body.cache_control)
        kept = self._marks.kept()
        tools = [
            msgspec.structs.replace(tool, retention=kept.get(place))
            for place, tool in enumerate(self._tools)
        ]
        segments = [
            msgspec.structs.replace(segment, retention=kept[place]) if place in kept else segment
            for place, segment in enumerate(self._segments, len(tools))
        ]
        return Prompt(
            segments=tuple(segments),
            tools=tuple(tools),
            tool_choice=self._choice(),
            continues=prefilled,
            add_generation_prompt=not prefilled,
        )

    @property
    def _place(self) -> int:
        """Where the latest tool or segment ends."""
        return len(self._tools) + len(self._segments) - 1

    # -- tools ----------------------------------------------------------------------------------

    def _tool(self, field: dict[str, Any], path: str) -> None:
        kind = field.get("type")
        if isinstance(kind, str) and kind != "custom":
            what = f"{kind[:64]!r} is not a tool of the client's; only custom tools are supported."
            raise bad(f"{path}.type", what, "unsupported_parameter")
        found = validation.convert(field, wire.MessagesToolField, path)
        if found.input_schema.get("type") != "object":
            raise bad(f"{path}.input_schema.type", "it has to be 'object'.")
        if any(tool.name == found.name for tool in self._tools):
            what = f"Tool names must be unique; there are two {found.name!r}."
            raise bad(f"{path}.name", what, "tool_name_conflict")
        schema = wire.json_text(found.input_schema)
        self._tools.append(
            Tool(found.name, found.description or "", schema, path, bool(found.strict))
        )
        self._marks.add(self._place, path, found.cache_control)

    def _choice(self) -> ToolChoice:
        field = self._body.tool_choice
        if field is None:
            return ToolChoice()
        names: tuple[str, ...] = ()
        if field.type == "tool":
            if field.name is None:
                raise bad("tool_choice.name", "which tool?", "missing_required_parameter")
            if all(tool.name != field.name for tool in self._tools):
                raise bad("tool_choice.name", f"there is no tool {field.name!r} in tools.")
            names = (field.name,)
        elif field.name is not None:
            raise bad("tool_choice.name", "it belongs to the type 'tool'.")
        if field.type == "any" and not self._tools:
            raise bad("tool_choice", "there are no tools to choose from.")
        mode: dict[str, Literal["auto", "none", "required"]] = {
            "auto": "auto",
            "any": "required",
            "tool": "required",
            "none": "none",
        }
        return ToolChoice(mode[field.type], names, not field.disable_parallel_tool_use)

    # -- system -----------------------------------------------------------------------------------

    def _system(self) -> None:
        system = self._body.system
        if not system:
            return
        self._message += 1
        if isinstance(system, str):
            self._segments.append(Segment("system", system, "system", None, self._message))
            self._marks.add(self._place, "system", None)
            return
        for number, block in enumerate(system):
            path = f"system[{number}]"
            found = _block(block, path, "a system prompt")
            assert isinstance(found, wire.TextBlock), "only text is taken here"
            if number == 0 and found.text.startswith(BILLING_HEADER):
                self._marks.add(self._place, path, found.cache_control, is_eligible=False)
                continue
            self._text(found, path, "system")

    # -- messages ---------------------------------------------------------------------------------

    def _messages(self) -> bool:
        """All turns. Is the last one the assistant's, to be continued?"""
        messages = self._body.messages
        for number, message in enumerate(messages):
            path = f"messages[{number}]"
            is_last = number == len(messages) - 1
            if message.role != self._role:
                self._turn(message.role, path)
            if not message.content and not (is_last and message.role == "assistant"):
                what = "messages need content; only a last one of the assistant's may be empty."
                raise bad(f"{path}.content", what)
            before, at = len(self._segments), f"{path}.content"
            self._content(message, at)
            if len(self._segments) == before and not is_last:
                # A turn of nothing but thinking was a turn all the same.
                self._segments.append(Segment("assistant", "", at, None, self._message))
        self._all_answered(f"messages[{len(messages) - 1}]")
        last = self._segments[-1] if self._segments else None
        if last is None or not last.path.startswith("messages"):
            raise bad("messages", "there is nothing to answer in them.")
        if self._role != "assistant" or last.role != "assistant" or not last.text:
            return False
        if last.text != last.text.rstrip():
            raise bad(last.path, "final assistant content cannot end with trailing whitespace.")
        return True

    def _turn(self, role: str, path: str) -> None:
        """Another one speaks."""
        if role == "system" and self._role != "user":
            raise bad(f"{path}.role", "a system message has to follow a user's.")
        if self._role == "system" and role != "assistant":
            what = "a system message has to be the last, or be followed by an assistant's."
            raise bad(f"{path}.role", what)
        if role != "user":
            self._all_answered(path)
        self._role = role
        self._message += 1

    def _all_answered(self, path: str) -> None:
        if self._open:
            call_id, at = next(iter(self._open.items()))
            what = (
                f"`tool_use` ids were found without `tool_result` blocks immediately after: {at}"
                f" ({call_id[:64]}). Each `tool_use` block must have a corresponding `tool_result`"
                " block in the next message."
            )
            raise bad(path, what)

    def _content(self, message: wire.MessageField, path: str) -> None:
        content = message.content
        if isinstance(content, str):
            if content:
                self._text(wire.TextBlock(content), path, message.role)
            return
        for number, block in enumerate(content):
            at = f"{path}[{number}]"
            found = _block(block, at, message.role)
            match found:
                case wire.TextBlock():
                    self._text(found, at, message.role)
                case wire.ToolUseBlock():
                    self._call(found, at)
                case wire.ToolResultBlock():
                    self._result(found, at)
                case wire.ThinkingBlock() | wire.RedactedThinkingBlock():
                    pass

    def _text(self, block: wire.TextBlock, path: str, role: str) -> None:
        if not block.text:
            if block.cache_control is not None:
                raise bad(path, "cache_control cannot be set for empty text blocks.")
            raise bad(path, "text content blocks must be non-empty.")
        if block.citations and role == "user" and self._version == wire.VERSION_WITHOUT_SAMPLING:
            raise bad(f"{path}.citations", "a user's text has no citations.")
        if role == "user":
            if self._open:
                self._all_answered(path)
            if self._segments and self._segments[-1].role == "tool":
                self._message += 1  # results are messages of their own
        self._segments.append(Segment(_ROLES[role], block.text, path, None, self._message))
        self._marks.add(self._place, path, block.cache_control)

    def _call(self, block: wire.ToolUseBlock, path: str) -> None:
        if block.id in self._names:
            raise bad(f"{path}.id", f"`tool_use` ids must be unique ({block.id[:64]}).")
        self._names[block.id] = block.name
        self._open[block.id] = path
        arguments = wire.json_text(block.input)
        call = ToolCall(block.id, block.name, arguments)
        self._segments.append(Segment("assistant", "", path, None, self._message, call=call))
        self._marks.add(self._place, path, block.cache_control)

    def _result(self, block: wire.ToolResultBlock, path: str) -> None:
        at = f"{path}.tool_use_id"
        if self._open.pop(block.tool_use_id, None) is None:
            what = (
                f"unexpected `tool_use_id` found in `tool_result` blocks: {block.tool_use_id[:64]}."
                " Each `tool_result` block must have a corresponding `tool_use` block in the"
                " previous message, and there is one for each."
            )
            raise bad(at, what)
        if self._segments[-1].role == "tool":
            self._message += 1
        content = block.content
        parts: list[tuple[wire.TextBlock, str]] = []
        if isinstance(content, list):
            for number, part in enumerate(content):
                inner = f"{path}.content[{number}]"
                found = _block(part, inner, "a tool result")
                assert isinstance(found, wire.TextBlock), "only text is taken here"
                if not found.text and found.cache_control is not None:
                    raise bad(inner, "cache_control cannot be set for empty text blocks.")
                parts.append((found, inner))
        else:
            parts.append((wire.TextBlock(content or ""), path))
        self._texts_of_result(block, path, parts or [(wire.TextBlock(""), path)])

    def _texts_of_result(
        self, block: wire.ToolResultBlock, path: str, parts: Sequence[tuple[wire.TextBlock, str]]
    ) -> None:
        failed = "Error: " if block.is_error else ""
        name = self._names[block.tool_use_id]
        for part, at in parts:
            text = failed + part.text
            self._segments.append(
                Segment("tool", text, at, name, self._message, answers=block.tool_use_id)
            )
            failed = ""
            if at != path:
                self._marks.add(self._place, at, part.cache_control, is_eligible=bool(part.text))
        self._marks.add(self._place, path, block.cache_control)


_ROLES: Mapping[str, Literal["system", "user", "assistant"]] = {
    "system": "system",
    "user": "user",
    "assistant": "assistant",
}


def _block(value: dict[str, Any], path: str, whose: str) -> wire.Block:
    """A content block of a kind that may stand there. Raises Refusal."""
    kind = value.get("type")
    if not isinstance(kind, str):
        code = "missing_required_parameter" if kind is None else "invalid_value"
        raise bad(f"{path}.type", "a block has a type.", code)
    if kind in REFUSED_BLOCKS:
        raise bad(path, f"{kind}: {REFUSED_BLOCKS[kind]}", "unsupported_parameter")
    if kind not in _BLOCKS:
        raise bad(f"{path}.type", f"there is no block of type {kind[:64]!r}.")
    if kind not in _OF_ROLE[whose]:
        raise bad(f"{path}.type", f"a {kind} block cannot be part of {_whose(whose)}.")
    if "thinking" in kind and "cache_control" in value:
        if value["cache_control"] is not None:
            raise bad(f"{path}.cache_control", NO_BREAKPOINT)
        value = {name: field for name, field in value.items() if name != "cache_control"}
    return validation.convert(value, _BLOCKS[kind], path)


def _whose(whose: str) -> str:
    return whose if whose.startswith("a ") else f"a message of the {whose}'s"
