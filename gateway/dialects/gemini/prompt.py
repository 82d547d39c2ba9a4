"""Gemini's contents, system instruction and functions as a prompt.

`gemini` calls it for requests and for cached content alike.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from gateway.dialects.canonical import Prompt, Segment, Tool, ToolCall, ToolChoice
from gateway.dialects.gemini import wire
from gateway.dialects.gemini.schema import json_schema, lowercase_types
from gateway.errors import Kind, Refusal


def prompt_of(fields: wire.PromptFields, *, needs_contents: bool) -> Prompt:
    """Tools, system instruction and contents, in API order. Raises Refusal."""
    segments: list[Segment] = []
    system = fields.system_instruction
    if isinstance(system, str):
        segments.append(Segment("system", system, "systemInstruction"))
    elif system is not None:
        for number, part in enumerate(system.parts):
            path = f"systemInstruction.parts[{number}]"
            segments.append(Segment("system", _only_text(part, path), path))
    if needs_contents and not fields.contents:
        message = "contents: there is nothing to answer; give at least one content."
        raise Refusal(Kind.BAD, "missing_required_parameter", message, param="contents")
    segments += _Contents(len(segments) > 0).read(fields.contents)
    config = (fields.tool_config or wire.ToolConfig()).function_calling_config
    tools = _tools(fields.tools, is_strict=config.mode == "VALIDATED")
    names = {tool.name for tool in tools}
    for name in config.allowed_function_names:
        if name not in names:
            message = f"allowedFunctionNames: there is no function {name!r} among the tools."
            param = "toolConfig.functionCallingConfig.allowedFunctionNames"
            raise Refusal(Kind.BAD, "invalid_value", message, param=param)
    last = segments[-1] if segments else None
    return Prompt(
        segments=tuple(segments),
        tools=tools,
        tool_choice=ToolChoice(
            "required" if config.mode == "ANY" else "none" if config.mode == "NONE" else "auto",
            tuple(config.allowed_function_names),
        ),
        continues=last is not None and last.role == "assistant" and last.call is None,
        add_generation_prompt=not (
            last is not None and last.role == "assistant" and last.call is None
        ),
    )


class _Contents:
    """Contents to segments; results find their calls by id, or by name.

    Neighbouring contents of the model's are one message, and their texts one text: the SDK's chats
    keep each chunk of a stream as a content of its own.
    """

    def __init__(self, has_system: bool) -> None:
        self._message = int(has_system) - 1
        self._open: list[tuple[str, str]] = []
        self._calls = 0

    def read(self, contents: Sequence[wire.Content]) -> list[Segment]:
        found: list[Segment] = []
        said: list[str] = []
        role, before = "", ""
        for number, content in enumerate(contents):
            if not content.parts:
                message = f"contents[{number}].parts: the list is empty."
                raise Refusal(Kind.BAD, "invalid_value", message, param=f"contents[{number}].parts")
            if content.role == "system":
                path = f"contents[{number}].role"
                message = f"{path}: 'user' or 'model'; instructions stand in systemInstruction."
                raise Refusal(Kind.BAD, "invalid_value", message, param=path)
            goes_on, before = content.role == "model" == before, content.role or "user"
            if not goes_on:
                role = ""
            for place, part in enumerate(content.parts):
                segment = self._segment(part, before, f"contents[{number}].parts[{place}]")
                if segment is None:
                    continue
                is_said = segment.role == "assistant" and segment.call is None
                if is_said and said and goes_on and place == 0:
                    said.append(segment.text)
                    continue
                _join(found, said)
                said = [segment.text] if is_said else []
                if segment.role != role or segment.role == "tool":
                    self._message += 1
                    role = segment.role
                found.append(msgspec.structs.replace(segment, message=self._message))
        _join(found, said)
        return found

    def _segment(self, part: wire.Part, role: str, path: str) -> Segment | None:
        if part.function_call is not None:
            if role != "model":
                message = f"{path}.functionCall: only the model calls functions."
                raise Refusal(Kind.BAD, "invalid_value", message, param=path)
            return self._call(part.function_call, path)
        if part.function_response is not None:
            return self._result(part.function_response, path)
        if part.thought:
            return None  # how an earlier answer was come by is not part of what was said
        return Segment("assistant" if role == "model" else "user", _only_text(part, path), path)

    def _call(self, call: wire.FunctionCall, path: str) -> Segment:
        call_id = call.id or f"call_{self._calls}"
        self._calls += 1
        self._open.append((call_id, call.name))
        arguments = msgspec.json.encode(call.args).decode()
        return Segment("assistant", "", path, call=ToolCall(call_id, call.name, arguments))

    def _result(self, result: wire.FunctionResponse, path: str) -> Segment:
        for place, (call_id, name) in enumerate(self._open):
            if result.id == call_id or (not result.id and result.name == name):
                del self._open[place]
                text = msgspec.json.encode(result.response).decode()
                return Segment("tool", text, path, result.name, answers=call_id)
        message = f"{path}.functionResponse: no call of {result.name!r} stands before it."
        raise Refusal(Kind.BAD, "invalid_value", message, param=path)


def _join(found: list[Segment], said: Sequence[str]) -> None:
    """The texts of several contents, of which the last segment has the first."""
    if len(said) > 1:
        found[-1] = msgspec.structs.replace(found[-1], text="".join(said))


def _only_text(part: wire.Part, path: str) -> str:
    for name in ("inline_data", "file_data", "executable_code", "code_execution_result"):
        if getattr(part, name) is not None:
            message = (
                f"{path}.{wire.to_camel_case(name)}: this is a text model; only text is supported."
            )
            raise Refusal(Kind.BAD, "unsupported_parameter", message, param=path)
    if part.text is None:
        message = f"{path}: it has no text."
        raise Refusal(Kind.BAD, "invalid_value", message, param=path)
    return part.text


def _tools(fields: Sequence[wire.GeminiToolField], *, is_strict: bool) -> tuple[Tool, ...]:
    found: dict[str, Tool] = {}
    for number, field in enumerate(fields):
        for name in wire.GeminiToolField.__struct_fields__[1:]:
            if getattr(field, name) is not None:
                path = f"tools[{number}].{wire.to_camel_case(name)}"
                message = f"{path}: only function declarations are supported here."
                raise Refusal(Kind.BAD, "unsupported_parameter", message, param=path)
        for place, declared in enumerate(field.function_declarations):
            path = f"tools[{number}].functionDeclarations[{place}]"
            if declared.name in found:
                message = f"{path}.name: there are two functions {declared.name!r}."
                raise Refusal(Kind.BAD, "invalid_value", message, param=path)
            if declared.parameters is not None and declared.parameters_json_schema is not None:
                message = f"{path}: set parameters or parametersJsonSchema, not both."
                raise Refusal(Kind.BAD, "invalid_value", message, param=path)
            schema = lowercase_types(declared.parameters_json_schema)
            if declared.parameters is not None:
                schema = json_schema(declared.parameters)
            text = msgspec.json.encode(schema or {"type": "object", "properties": {}}).decode()
            found[declared.name] = Tool(declared.name, declared.description, text, path, is_strict)
    return tuple(found.values())
