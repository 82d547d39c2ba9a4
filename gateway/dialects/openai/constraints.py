"""Constraints on an answer under other servers' names: JSON, a pattern, a choice or a grammar.

vLLM has `guided_*` and `structured_outputs`, SGLang `regex` and `ebnf`, llama.cpp `json_schema` and
`grammar`, and some chat formats have the types `regex` and `grammar`. Each becomes the canonical
output format, whose path is the field that the client sent. Functions are pure; each of OpenAI's
endpoints calls them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from gateway.dialects.canonical import OutputFormat, Tool, ToolChoice, choice_format
from gateway.dialects.openai import wire
from gateway.dialects.tolerance import Tolerance, asks_nothing
from gateway.dialects.validation import decode_json, invalid_field, json_text

CONSTRAINED = "expected response_format (chat) or text.format (responses), which constrain answers."
NO_CALLS = "not allowed together with tools; expected no tools, or the tool_choice 'none'."


def output_format(
    own: OutputFormat,
    fields: wire.SamplingFields,
    tolerance: Tolerance,
    declared: Sequence[Tool] = (),
    choice: ToolChoice | None = None,
) -> OutputFormat:
    """Return the format that a request asks for, under any of these names.

    `own`: the format of the endpoint's own field. Raises Refusal for two formats that differ, for a
    pattern or a grammar beside tools that may be called, and in the strict mode for another
    server's name.
    """
    if not (
        fields.guided_json
        or fields.json_schema
        or fields.guided_regex
        or fields.regex
        or fields.guided_choice
        or fields.guided_grammar
        or fields.grammar
        or fields.ebnf
        or fields.structured_outputs
        or own.kind in ("regex", "lark")
    ):
        return own  # Without a call more: this is the path of almost every request.
    found = own
    for asked in _constraints(fields, tolerance):
        if tolerance.is_strict:
            name = asked.path.partition(".")[0]
            raise invalid_field(name, CONSTRAINED, "unsupported_parameter")
        if found.kind not in ("text", asked.kind) or (
            found.kind == asked.kind and found.schema != asked.schema
        ):
            first = found.path.partition(".")[0] if found is not own else "response_format"
            problem = f"the constraint differs from {first}; expected only one of the two."
            raise invalid_field(asked.path, problem)
        found = asked if found.kind == "text" else found
    may_call = bool(declared) and (choice is None or choice.mode != "none")
    if may_call and found.kind in ("regex", "lark"):
        raise invalid_field(found.path, NO_CALLS)
    return found


def of_pattern(pattern: str, path: str) -> OutputFormat:
    """Return the format of a regular expression, which the whole answer matches."""
    return OutputFormat("regex", pattern, path)


def of_grammar(grammar: str, path: str) -> OutputFormat:
    """Return the format of a grammar in Lark or GBNF."""
    return OutputFormat("lark", grammar, path)


def _constraints(fields: wire.SamplingFields, tolerance: Tolerance) -> Iterator[OutputFormat]:
    """Yield the constraints that a request has under other servers' names."""
    yield from _schema(fields.guided_json, "guided_json")
    yield from _schema(fields.json_schema, "json_schema")
    yield from _texts(fields.guided_regex, fields.guided_choice, fields.guided_grammar, "guided_")
    yield from _texts(fields.regex, None, fields.grammar, "")
    if fields.ebnf:
        yield of_grammar(fields.ebnf, "ebnf")
    both = fields.structured_outputs
    if both is None:
        return
    path = "structured_outputs."
    yield from _schema(both.json, f"{path}json")
    if both.json_object:
        yield OutputFormat("json_object", path=f"{path}json_object")
    yield from _texts(both.regex, both.choice, both.grammar, path)
    for name in wire.STRUCTURED_HINTS:
        tolerance.take_hint(path + name, getattr(both, name), (False,))


def _schema(value: Any, path: str) -> Iterator[OutputFormat]:
    """Yield the format of a bare schema, an object or its JSON text. Raises Refusal."""
    if isinstance(value, str) and value:
        try:
            value = decode_json(value)
        except (msgspec.DecodeError, RecursionError):
            value = False
    if asks_nothing(value):
        return
    if not isinstance(value, dict):
        raise invalid_field(path, "invalid schema; expected the object of a JSON schema.")
    yield OutputFormat("json_schema", json_text(value), path, strict=False)


def _texts(
    pattern: str | None, choices: list[str] | None, grammar: str | None, prefix: str
) -> Iterator[OutputFormat]:
    if pattern:
        yield of_pattern(pattern, f"{prefix}regex")
    if choices:
        yield choice_format(choices, f"{prefix}choice")
    if grammar:
        yield of_grammar(grammar, f"{prefix}grammar")
