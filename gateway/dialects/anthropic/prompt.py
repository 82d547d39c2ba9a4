"""Translation of Anthropic's tools, system prompt and messages to a prompt with breakpoints.

`anthropic.messages` calls it. Blocks that a text model cannot use are refused by name, and
`anthropic.hosted_blocks` tells what other servers' tools did. Thinking blocks of a history become
thoughts; the model reads those that its template keeps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from gateway.dialects.anthropic import hosted_blocks, wire
from gateway.dialects.anthropic.breakpoints import Breakpoints
from gateway.dialects.anthropic.hosted_blocks import TEXT_ONLY, HostedResult, HostedUse
from gateway.dialects.canonical import Prompt, Segment, Tool, ToolCall, ToolChoice
from gateway.dialects.tolerance import Tolerance
from gateway.dialects.validation import convert, invalid_field, json_text, shown

BILLING_HEADER = "x-anthropic-billing-header:"
"""Start of a line that a popular coding agent puts before its system prompt. The line differs in
every request and tells a model nothing; in the prompt it would make every prefix new."""

SERVER_TOOL = (
    "this server runs no server tools; expected client tools and their tool_result blocks."
)
REFUSED_BLOCKS: Mapping[str, str] = {
    "image": TEXT_ONLY,
    "tool_reference": "expected in the content of a tool_result, and not in the strict mode.",
    "browser_state": SERVER_TOOL,
    "compaction": "this server compacts no conversations; expected the messages themselves.",
    "tool_addition": "tools cannot change within messages; declare them in tools.",
    "tool_removal": "tools cannot change within messages; declare them in tools.",
}
"""Known block types that are refused, with the message's problem."""

NO_BREAKPOINT = "a thinking block cannot have cache_control; put it on a text or tool block."

Block = wire.Block | HostedUse | HostedResult
_BLOCKS: Mapping[str, type[Block]] = {
    "text": wire.TextBlock,
    "tool_use": wire.ToolUseBlock,
    "tool_result": wire.ToolResultBlock,
    "thinking": wire.ThinkingBlock,
    "redacted_thinking": wire.RedactedThinkingBlock,
}
_HOSTED: Mapping[str, type[Block]] = {
    **dict.fromkeys(hosted_blocks.USES, HostedUse),
    **dict.fromkeys(hosted_blocks.RESULTS, HostedResult),
}
"""Blocks of an assistant's turn that the strict mode refuses."""
_BLOCKS_OF: Mapping[str, frozenset[str]] = {
    "user": frozenset({"text", "tool_result"}),
    "assistant": frozenset({"text", "tool_use", "thinking", "redacted_thinking"}),
    "system": frozenset({"text"}),
    "a system prompt": frozenset({"text"}),
    "a tool result": frozenset({"text"}),
}
_TAKES_SOURCED = frozenset({"user", "a tool result"})


def prompt_of(body: wire.Body, version: str, tolerance: Tolerance) -> Prompt:
    """Return the request's prompt with its breakpoints, in API order.

    Changes: `tolerance` notes the ignored fields. Raises Refusal.
    """
    return _MessagesReader(body, version, tolerance).read()


class _MessagesReader:
    """Builds the prompt of one request. A position is an index into its tools and segments."""

    def __init__(self, body: wire.Body, version: str, tolerance: Tolerance) -> None:
        self._body = body
        self._version = version
        self._tolerance = tolerance
        self._breakpoints = Breakpoints()
        self._tools: list[Tool] = []
        self._tool_names: set[str] = set()
        self._segments: list[Segment] = []
        self._message = -1
        self._role = ""
        self._pending: dict[str, str] = {}
        self._names: dict[str, str] = {}
        self._running: dict[str, str] = {}
        """The paths of uses of another server's tools that have no result yet, by id."""

    def read(self) -> Prompt:
        """Read the body in the order of Anthropic's breakpoint rules, and return the prompt."""
        self._all_tools()
        self._system()
        prefilled = self._messages()
        self._breakpoints.add_automatic(self._body.cache_control)
        marked = self._breakpoints.resolve()
        tools = [
            msgspec.structs.replace(tool, retention=marked.get(position))
            for position, tool in enumerate(self._tools)
        ]
        segments = [
            msgspec.structs.replace(segment, retention=marked[position])
            if position in marked
            else segment
            for position, segment in enumerate(self._segments, len(tools))
        ]
        return Prompt(
            segments=tuple(segments),
            tools=tuple(tools),
            tool_choice=self._choice(),
            continues=prefilled,
            add_generation_prompt=not prefilled,
        )

    @property
    def _position(self) -> int:
        """Position of the latest tool or segment."""
        return len(self._tools) + len(self._segments) - 1

    # -- tools ----------------------------------------------------------------------------------

    def _all_tools(self) -> None:
        """Read the tools, and leave out those of Anthropic's own types; a breakpoint after one of
        them is after the tool before it."""
        others: dict[str, str] = {}
        for number, field in enumerate(self._body.tools or ()):
            path, kind = f"tools[{number}]", field.get("type")
            if not isinstance(kind, str) or kind == "custom":
                self._tool(field, path)
                continue
            others[f"{path}.type"] = kind
            given, path = field.get("cache_control"), f"{path}.cache_control"
            if given is not None and self._tools:
                control = convert(given, wire.CacheControl, path)
                self._breakpoints.add(self._position, path, control)
        choice = self._body.tool_choice
        is_auto = choice is None or choice.type in ("auto", "none")
        self._tolerance.leave_out_tools(others, may_call_others=bool(self._tools) and is_auto)

    def _tool(self, field: dict[str, Any], path: str) -> None:
        if self._tolerance.is_lenient:
            field = self._tolerance.prune(field, wire.MessagesToolField, path)
        found = convert(field, wire.MessagesToolField, path)
        self._tolerance.take_hint(f"{path}.input_examples", found.input_examples)
        self._tolerance.take_hint(f"{path}.defer_loading", found.defer_loading, (False,))
        self._callers(found.allowed_callers, f"{path}.allowed_callers")
        if found.input_schema.get("type") != "object":
            kind = found.input_schema.get("type")
            problem = f"unsupported schema type {shown(kind)}; expected 'object'."
            raise invalid_field(f"{path}.input_schema.type", problem)
        if found.name in self._tool_names:
            problem = f"Tool names must be unique; {found.name!r} is declared twice."
            raise invalid_field(f"{path}.name", problem, "tool_name_conflict")
        self._tool_names.add(found.name)
        schema = json_text(found.input_schema)
        self._tools.append(
            Tool(
                found.name,
                found.description or "",
                schema,
                path,
                bool(found.strict),
                schema_field="input_schema",
            )
        )
        self._breakpoints.add(self._position, path, found.cache_control)

    def _callers(self, callers: Sequence[str] | None, path: str) -> None:
        """Note callers beside the model. Raises Refusal if the model is none of them."""
        if callers and "direct" not in callers:
            problem = (
                f"{shown(callers)} leaves out the model, and this server runs no code that could"
                " call the tool; expected 'direct' among them."
            )
            raise invalid_field(path, problem, "unsupported_parameter")
        for caller in callers or ():
            self._tolerance.take_hint(path, caller, ("direct",))

    def _choice(self) -> ToolChoice:
        field = self._body.tool_choice
        if field is None:
            return ToolChoice()
        names: tuple[str, ...] = ()
        if field.type == "tool":
            if field.name is None:
                problem = "type 'tool' requires a name; expected the name of a declared tool."
                raise invalid_field("tool_choice.name", problem, "missing_required_parameter")
            if field.name not in self._tool_names:
                problem = f"unknown tool {field.name!r}; expected the name of a tool in tools."
                raise invalid_field("tool_choice.name", problem)
            names = (field.name,)
        elif field.name is not None:
            problem = f"type {field.type!r} takes no name; use type 'tool' to name one."
            raise invalid_field("tool_choice.name", problem)
        if field.type == "any" and not self._tools:
            problem = "type 'any' requires a tool, and the request declares none in tools."
            raise invalid_field("tool_choice", problem)
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
            self._breakpoints.add(self._position, "system", None)
            return
        for number, block in enumerate(system):
            path = f"system[{number}]"
            found = _block(block, path, "a system prompt", self._tolerance)
            assert isinstance(found, wire.TextBlock), "a system prompt holds only text blocks"
            if number == 0 and found.text.startswith(BILLING_HEADER):
                self._breakpoints.add(self._position, path, found.cache_control, is_eligible=False)
                continue
            self._text(found, path, "system")

    # -- messages ---------------------------------------------------------------------------------

    def _messages(self) -> bool:
        """Read all turns. Return True if the last one is an assistant prefill."""
        messages = self._body.messages
        for number, message in enumerate(messages):
            path = f"messages[{number}]"
            is_last = number == len(messages) - 1
            if message.role != self._role:
                self._start_turn(message.role, path)
            if not message.content and not (is_last and message.role == "assistant"):
                problem = "content is empty; only a final assistant message may be empty."
                raise invalid_field(f"{path}.content", problem)
            before, content_path = len(self._segments), f"{path}.content"
            self._content(message, content_path)
            has_content = any(not segment.is_thought for segment in self._segments[before:])
            if not has_content and is_last:
                del self._segments[before:]  # a thought alone is nothing to continue
            elif not has_content:
                # An assistant turn that holds only thinking still separates its neighbours.
                self._segments.append(Segment("assistant", "", content_path, None, self._message))
        self._check_calls_answered(f"messages[{len(messages) - 1}]")
        for use_path in self._running.values():
            problem = "this server runs no server tools; expected the block of its result."
            raise invalid_field(use_path, problem, "unsupported_parameter")
        last = self._segments[-1] if self._segments else None
        if last is None or not last.path.startswith("messages"):
            problem = "no message has content to answer; expected at least one user message."
            raise invalid_field("messages", problem)
        if (
            self._role != "assistant"
            or last.role != "assistant"
            or not last.text
            or last.is_thought
        ):
            return False
        if last.text != last.text.rstrip():
            problem = "final assistant content cannot end with trailing whitespace."
            raise invalid_field(last.path, problem)
        return True

    def _start_turn(self, role: str, path: str) -> None:
        """Begin a turn of another role. Raises Refusal if the role may not follow."""
        if role == "system" and self._role != "user":
            raise invalid_field(f"{path}.role", "a system message must follow a user message.")
        if self._role == "system" and role != "assistant":
            problem = "a system message must be the last, or precede an assistant message."
            raise invalid_field(f"{path}.role", problem)
        if role != "user":
            self._check_calls_answered(path)
        self._role = role
        self._message += 1

    def _check_calls_answered(self, path: str) -> None:
        if self._pending:
            call_id, call_path = next(iter(self._pending.items()))
            problem = (
                "`tool_use` ids were found without `tool_result` blocks immediately after:"
                f" {call_path} ({call_id[:64]}). Each `tool_use` block must have a corresponding"
                " `tool_result` block in the next message."
            )
            raise invalid_field(path, problem)

    def _content(self, message: wire.MessageField, path: str) -> None:
        content = message.content
        if isinstance(content, str):
            if content:
                self._text(wire.TextBlock(content), path, message.role)
            return
        for number, block in enumerate(content):
            block_path = f"{path}[{number}]"
            if self._leaves_out(block, block_path, message.role):
                continue
            found = _block(block, block_path, message.role, self._tolerance)
            if not isinstance(found, wire.RedactedThinkingBlock):
                self._part_from_result()
            match found:
                case wire.TextBlock():
                    self._text(found, block_path, message.role)
                case wire.ToolUseBlock():
                    self._call(found, block_path)
                case wire.ToolResultBlock():
                    self._result(found, block_path)
                case wire.ThinkingBlock():
                    if found.thinking:
                        segment = Segment(
                            "assistant",
                            found.thinking,
                            block_path,
                            None,
                            self._message,
                            is_thought=True,
                        )
                        self._segments.append(segment)
                        self._breakpoints.add(self._position, block_path, None, is_eligible=False)
                case wire.RedactedThinkingBlock():
                    pass
                case HostedUse():
                    self._hosted_use(found, block_path)
                case HostedResult():
                    self._hosted_result(found, block_path)

    def _leaves_out(self, block: dict[str, Any], path: str, role: wire.Role) -> bool:
        """Return whether a block of an answer says nothing that a model could use, and note it."""
        kind = block.get("type")
        if role != "assistant" or self._tolerance.is_strict or not isinstance(kind, str):
            return False
        if kind not in hosted_blocks.LEFT_OUT:
            return False
        self._tolerance.ignore(f"{path}.{kind}")
        return True

    def _part_from_result(self) -> None:
        """Begin a message of its own behind a tool's result, as templates show results."""
        last = self._segments[-1] if self._segments else None
        if last is not None and last.role == "tool" and last.message == self._message:
            self._message += 1

    def _text(self, block: wire.TextBlock, path: str, role: wire.Role) -> None:
        if not block.text:
            if block.cache_control is not None:
                raise invalid_field(path, "cache_control cannot be set for empty text blocks.")
            raise invalid_field(path, "text content blocks must be non-empty.")
        if block.citations and role == "user" and self._version == wire.VERSION_WITHOUT_CITATIONS:
            raise invalid_field(f"{path}.citations", "a user text block takes no citations.")
        if role == "user":
            self._check_calls_answered(path)
        self._segments.append(Segment(role, block.text, path, None, self._message))
        self._breakpoints.add(self._position, path, block.cache_control)

    def _call(self, block: wire.ToolUseBlock, path: str) -> None:
        self._add_call(block, block.name, path)
        self._pending[block.id] = path

    def _hosted_use(self, block: HostedUse, path: str) -> None:
        self._add_call(block, block.function, path)
        self._running[block.id] = path

    def _add_call(self, block: wire.ToolUseBlock | HostedUse, name: str, path: str) -> None:
        if block.id in self._names:
            problem = f"`tool_use` ids must be unique; {block.id[:64]!r} is used twice."
            raise invalid_field(f"{path}.id", problem)
        self._names[block.id] = name
        call = ToolCall(block.id, name, json_text(block.input))
        self._segments.append(Segment("assistant", "", path, None, self._message, call=call))
        self._breakpoints.add(self._position, path, block.cache_control)

    def _hosted_result(self, block: HostedResult, path: str) -> None:
        """Add the result of another server's tool. It may stand in a later turn than its use, if
        what ran there called a client's tool."""
        call_id = block.tool_use_id
        if self._running.pop(call_id, None) is None:
            problem = (
                f"unexpected `tool_use_id` {call_id[:64]!r}; expected the id of a server_tool_use"
                " or mcp_tool_use block before it, which takes one result."
            )
            raise invalid_field(f"{path}.tool_use_id", problem)
        self._message += 1
        name, text = self._names[call_id], block.told(path)
        self._segments.append(Segment("tool", text, path, name, self._message, answers=call_id))
        self._breakpoints.add(self._position, path, block.cache_control)

    def _result(self, block: wire.ToolResultBlock, path: str) -> None:
        if self._pending.pop(block.tool_use_id, None) is None:
            problem = (
                f"unexpected `tool_use_id` found in `tool_result` blocks: {block.tool_use_id[:64]}."
                " Each `tool_result` block must have a corresponding `tool_use` block in the"
                " previous message, and each `tool_use` block takes one result."
            )
            raise invalid_field(f"{path}.tool_use_id", problem)
        content = block.content
        parts: list[tuple[wire.TextBlock, str]] = []
        if isinstance(content, list):
            for number, part in enumerate(content):
                part_path = f"{path}.content[{number}]"
                part = self._found_tool(part, part_path)
                found = _block(part, part_path, "a tool result", self._tolerance)
                assert isinstance(found, wire.TextBlock), "a tool result holds only text blocks"
                if not found.text and found.cache_control is not None:
                    problem = "cache_control cannot be set for empty text blocks."
                    raise invalid_field(part_path, problem)
                parts.append((found, part_path))
        else:
            parts.append((wire.TextBlock(content or ""), path))
        self._result_parts(block, path, parts or [(wire.TextBlock(""), path)])

    def _found_tool(self, part: dict[str, Any], path: str) -> dict[str, Any]:
        """Return a reference to a tool, which a client's search found, as a text block: the tool
        is in the prompt already. Other parts stay. Raises Refusal for a tool that is not."""
        if part.get("type") != "tool_reference" or self._tolerance.is_strict:
            return part
        found = convert(part, wire.ToolReferenceBlock, path)
        if found.tool_name not in self._tool_names:
            problem = f"unknown tool {found.tool_name!r}; expected the name of a tool in tools."
            raise invalid_field(f"{path}.tool_name", problem)
        control = part.get("cache_control")
        return {"type": "text", "text": found.tool_name, "cache_control": control}

    def _result_parts(
        self, block: wire.ToolResultBlock, path: str, parts: Sequence[tuple[wire.TextBlock, str]]
    ) -> None:
        prefix = "Error: " if block.is_error else ""
        name = self._names[block.tool_use_id]
        for part, part_path in parts:
            text = prefix + part.text
            self._segments.append(
                Segment("tool", text, part_path, name, self._message, answers=block.tool_use_id)
            )
            prefix = ""
            if part_path != path:
                self._breakpoints.add(
                    self._position, part_path, part.cache_control, is_eligible=bool(part.text)
                )
        self._breakpoints.add(self._position, path, block.cache_control)


def _block(value: dict[str, Any], path: str, parent: str, tolerance: Tolerance) -> Block:
    """Decode a content block of `parent`: a role, a system prompt or a tool result.

    An assistant's block and, in the lenient mode, any block may have unknown fields. Raises Refusal
    for a type that `parent` cannot hold.
    """
    kind = value.get("type")
    if not isinstance(kind, str):
        problem = "a content block requires a type; expected a string."
        code = "missing_required_parameter" if kind is None else "invalid_value"
        raise invalid_field(f"{path}.type", problem, code)
    if kind in hosted_blocks.SOURCED and parent in _TAKES_SOURCED:
        value, kind = hosted_blocks.as_text(value, path, tolerance), "text"
    if kind in REFUSED_BLOCKS:
        raise invalid_field(path, f"{kind}: {REFUSED_BLOCKS[kind]}", "unsupported_parameter")
    allowed = _BLOCKS_OF[parent]
    expected = " or ".join(sorted(allowed))
    if kind in _HOSTED and parent == "assistant" and not tolerance.is_strict:
        return convert(tolerance.prune(value, _HOSTED[kind], path), _HOSTED[kind], path)
    if kind in _HOSTED or kind in hosted_blocks.LEFT_OUT:
        where = " in the strict mode" if parent == "assistant" else f" in {parent} messages"
        problem = f"{kind}: a server tool's block is not taken{where}; expected {expected}."
        raise invalid_field(path, problem, "unsupported_parameter")
    if kind not in _BLOCKS and kind not in hosted_blocks.SOURCED:
        problem = f"unknown block type {kind[:64]!r}; expected {expected}."
        raise invalid_field(f"{path}.type", problem)
    if kind not in allowed:
        container = parent if parent.startswith("a ") else f"{parent} messages"
        problem = f"a {kind} block cannot be part of {container}; expected {expected}."
        raise invalid_field(f"{path}.type", problem)
    if "thinking" in kind and "cache_control" in value:
        if value["cache_control"] is not None:
            raise invalid_field(f"{path}.cache_control", NO_BREAKPOINT)
        value = {name: field for name, field in value.items() if name != "cache_control"}
    if tolerance.is_lenient or (parent == "assistant" and not tolerance.is_strict):
        value = tolerance.prune(value, _BLOCKS[kind], path)
    return convert(value, _BLOCKS[kind], path)
