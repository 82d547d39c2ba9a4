"""Translation of Gemini's contents, system instruction and functions to a prompt.

`gemini.generate_content` calls it for requests and `gemini.cached_contents` for cached content.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence

import msgspec

from gateway.dialects.canonical import (
    TOOLS_MAX,
    Prompt,
    Segment,
    Tool,
    ToolCall,
    ToolChoice,
)
from gateway.dialects.gemini import wire
from gateway.dialects.gemini.hosted_parts import plain_part
from gateway.dialects.gemini.schema import json_schema, lowercase_types
from gateway.dialects.tolerance import Tolerance
from gateway.dialects.validation import invalid_field, json_text, shown

_NO_TEXT = (
    *("inline_data", "file_data", "executable_code", "code_execution_result", "tool_call"),
    "tool_response",
)
"""Fields of a part that are no text of its own."""

_AT_ONCE = ("WHEN_IDLE", "SCHEDULING_UNSPECIFIED")
"""Schedulings of a result that the model reads as it does here: in the next answer."""


def prompt_of(fields: wire.PromptFields, tolerance: Tolerance, *, needs_contents: bool) -> Prompt:
    """Return tools, system instruction and contents in API order.

    Changes: `tolerance` notes hosted tools that are left out. Raises Refusal.
    """
    segments: list[Segment] = []
    system = fields.system_instruction
    if isinstance(system, str):
        segments.append(Segment("system", system, "systemInstruction"))
    elif system is not None:
        for number, part in enumerate(system.parts):
            path = f"systemInstruction.parts[{number}]"
            segments.append(Segment("system", _only_text(part, path), path))
    if needs_contents and not fields.contents:
        problem = "the list is empty or missing; expected at least one content."
        raise invalid_field("contents", problem, "missing_required_parameter")
    reader = _ContentsReader(has_system=len(segments) > 0, tolerance=tolerance)
    segments += reader.read(fields.contents)
    config = (fields.tool_config or wire.ToolConfig()).function_calling_config
    _take_hints(fields, tolerance)
    tools = _tools(fields.tools, is_strict=config.mode == "VALIDATED")
    is_auto = config.mode != "ANY" and not config.allowed_function_names
    tolerance.leave_out_tools(_hosted(fields.tools), may_call_others=bool(tools) and is_auto)
    names = {tool.name for tool in tools}
    for name in config.allowed_function_names:
        if name not in names:
            problem = f"unknown function {name!r}; expected the name of a declared function."
            path = "toolConfig.functionCallingConfig.allowedFunctionNames"
            raise invalid_field(path, problem)
    last = segments[-1] if segments else None
    is_prefill = last is not None and last.role == "assistant" and last.call is None
    return Prompt(
        segments=tuple(segments),
        tools=tools,
        tool_choice=ToolChoice(
            "required" if config.mode == "ANY" else "none" if config.mode == "NONE" else "auto",
            tuple(config.allowed_function_names),
        ),
        continues=is_prefill,
        add_generation_prompt=not is_prefill,
    )


class _ContentsReader:
    """Translates contents to segments and matches results to calls by id, else by name.

    Neighbouring contents with the role `model` become one message and their texts one text, because
    the SDK's chats keep each chunk of a stream as a separate content.
    """

    def __init__(self, *, has_system: bool, tolerance: Tolerance) -> None:
        """If it is strict, parts of Google's own tools, and inline texts, are refused."""
        self._message = int(has_system) - 1
        self._tolerance = tolerance
        self._calls = 0
        self._pending: dict[int, str] = {}
        """The ids of the calls without a result, by number."""
        self._by_id: dict[str, deque[int]] = defaultdict(deque)
        self._by_name: dict[str, deque[int]] = defaultdict(deque)
        """The numbers of calls, in order; some may have a result already."""
        self._answered: dict[str, str] = {}
        """The results of calls by the id that the client gave."""

    def read(self, contents: Sequence[wire.Content]) -> list[Segment]:
        """Return the segments of all contents. Raises Refusal."""
        segments: list[Segment] = []
        texts: list[str] = []  # Texts of neighbouring contents, to be joined into one segment.
        message_role, content_role = "", ""
        for number, content in enumerate(contents):
            path = f"contents[{number}]"
            if not content.parts:
                raise invalid_field(f"{path}.parts", "the list is empty; expected a part.")
            if content.role == "system":
                problem = "unsupported role 'system'; expected 'user' or 'model'. Put instructions"
                raise invalid_field(f"{path}.role", f"{problem} in systemInstruction.")
            is_same_turn = content.role == "model" == content_role
            content_role = content.role or "user"
            if not is_same_turn:
                message_role = ""
            for index, part in enumerate(content.parts):
                segment = self._segment(part, content_role, f"{path}.parts[{index}]")
                if segment is None:
                    continue
                is_text = segment.call is None and not segment.is_thought
                is_answer_text = segment.role == "assistant" and is_text
                if is_answer_text and texts and is_same_turn and index == 0:
                    texts.append(segment.text)
                    continue
                _join_texts(segments, texts)
                texts = [segment.text] if is_answer_text else []
                if segment.role != message_role or segment.role == "tool":
                    self._message += 1
                    message_role = segment.role
                segments.append(msgspec.structs.replace(segment, message=self._message))
        _join_texts(segments, texts)
        return segments

    def _segment(self, part: wire.Part, role: str, path: str) -> Segment | None:
        if not self._tolerance.is_strict:
            part = plain_part(part)
        if part.function_call is not None:
            if role != "model":
                problem = f"the role {role!r} cannot hold a functionCall; expected 'model'."
                raise invalid_field(path, problem)
            return self._call(part.function_call, path)
        if part.function_response is not None:
            return self._result(part.function_response, path)
        if part.thought:
            text = part.text or ""
            return Segment("assistant", text, path, is_thought=True) if text else None
        return Segment("assistant" if role == "model" else "user", _only_text(part, path), path)

    def _call(self, call: wire.FunctionCall, path: str) -> Segment:
        call_id = call.id or f"call_{self._calls}"
        self._pending[self._calls] = call_id
        self._by_id[call_id].append(self._calls)
        self._by_name[call.name].append(self._calls)
        self._calls += 1
        made = ToolCall(call_id, call.name, json_text(call.args))
        return Segment("assistant", "", path, call=made)

    def _result(self, result: wire.FunctionResponse, path: str) -> Segment | None:
        """Match a result to the first pending call of its id or, without one, of its name.

        One that is there twice under its id counts once: so Gemini CLI sends a resumed session.
        """
        above = f"{path}.functionResponse"
        if result.parts:
            problem = "unsupported: the model reads only the text of response."
            raise invalid_field(f"{above}.parts", problem, "unsupported_parameter")
        self._tolerance.take_hint(f"{above}.willContinue", result.will_continue, (False,))
        self._tolerance.take_hint(f"{above}.scheduling", result.scheduling, _AT_ONCE)
        text = json_text(result.response)
        numbers = self._by_id[result.id] if result.id else self._by_name[result.name]
        while numbers:
            call_id = self._pending.pop(numbers.popleft(), None)
            if call_id is not None:
                self._answered[result.id] = text
                return Segment("tool", text, path, result.name, answers=call_id)
        if result.id and self._answered.get(result.id) == text:
            return None
        problem = f"no functionCall of {result.name!r} precedes this functionResponse."
        if result.id in self._answered:
            problem = f"the functionCall {result.id[:64]!r} has another functionResponse already."
        raise invalid_field(path, problem)


def _join_texts(segments: list[Segment], texts: Sequence[str]) -> None:
    """Write the texts of several contents to the last segment, which holds the first of them."""
    if len(texts) > 1:
        segments[-1] = msgspec.structs.replace(segments[-1], text="".join(texts))


def _only_text(part: wire.Part, path: str) -> str:
    for name in _NO_TEXT:
        if getattr(part, name) is not None:
            problem = f"{wire.to_camel_case(name)} is not supported: the model reads only text."
            raise invalid_field(path, problem, "unsupported_parameter")
    if part.text is None:
        problem = "the part has no text; expected text, functionCall or functionResponse."
        raise invalid_field(path, problem)
    return part.text


def _take_hints(fields: wire.PromptFields, tolerance: Tolerance) -> None:
    """Note how Google's own tools and its live sessions would run. Raises Refusal if strict."""
    config = fields.tool_config or wire.ToolConfig()
    shows_hosted = config.include_server_side_tool_invocations
    tolerance.take_hint("toolConfig.includeServerSideToolInvocations", shows_hosted, (False,))
    tolerance.take_hint("toolConfig.retrievalConfig", config.retrieval_config)
    calling, path = config.function_calling_config, "toolConfig.functionCallingConfig"
    streams_arguments = calling.stream_function_call_arguments
    tolerance.take_hint(f"{path}.streamFunctionCallArguments", streams_arguments, (False,))
    for number, tool in enumerate(fields.tools):
        for index, declared in enumerate(tool.function_declarations):
            path = f"tools[{number}].functionDeclarations[{index}].behavior"
            tolerance.take_hint(path, declared.behavior, ("BLOCKING", "UNSPECIFIED"))


def _hosted(fields: Sequence[wire.GeminiToolField]) -> dict[str, str]:
    """Return the types of the tools that Google's servers run, by path."""
    return {
        f"tools[{number}].{kind}": kind
        for number, field in enumerate(fields)
        for name in wire.GeminiToolField.__struct_fields__[1:]
        if getattr(field, name) is not None
        for kind in (wire.to_camel_case(name),)
    }


def _tools(fields: Sequence[wire.GeminiToolField], *, is_strict: bool) -> tuple[Tool, ...]:
    found: dict[str, Tool] = {}
    for number, field in enumerate(fields):
        for index, declared in enumerate(field.function_declarations):
            path = f"tools[{number}].functionDeclarations[{index}]"
            if declared.name in found:
                problem = f"the function {declared.name!r} is declared twice; use unique names."
                raise invalid_field(path, problem)
            if declared.parameters is not None and declared.parameters_json_schema is not None:
                problem = "parameters and parametersJsonSchema are both set; expected only one."
                raise invalid_field(path, problem)
            schema, own = lowercase_types(declared.parameters_json_schema), "parametersJsonSchema"
            if declared.parameters is not None:
                schema, own = json_schema(declared.parameters), "parameters"
            kind = (schema or {}).get("type") or "object"
            if kind != "object" and kind != ["object", "null"]:
                problem = f"unsupported schema type {shown(kind)}; expected 'OBJECT'."
                raise invalid_field(f"{path}.parameters", problem)
            text = json_text(schema or {"type": "object", "properties": {}})
            found[declared.name] = Tool(
                declared.name, declared.description, text, path, is_strict, schema_field=own
            )
    if len(found) > TOOLS_MAX:
        raise invalid_field("tools", f"{len(found)} functions; expected at most {TOOLS_MAX}.")
    return tuple(found.values())
