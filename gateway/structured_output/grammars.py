"""Build the grammar that constrains an answer: its format, or tool calls in the model's style.

An output format without tools is passed on unchanged. Forced calls and calls of strict tools become
a Lark grammar around each tool's schema. The module compiles nothing: the engine does. The renderer
(`gateway.prompt.renderer`) calls it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from engine.api import Grammar
from gateway.dialects.canonical import OutputFormat, Prompt, Thinking, Tool
from gateway.errors import Kind, Refusal
from gateway.structured_output.gbnf import GbnfError, is_gbnf, translate_gbnf
from gateway.structured_output.json_text import parse_schema
from gateway.structured_output.schemas.keywords import (
    find_fault,
    is_unsatisfiable,
    keyword_refusal,
    prepared_schema,
    without_inexact_numbers,
)
from gateway.structured_output.schemas.lark import InexactNumber, lark_of_schema
from gateway.structured_output.schemas.patterns import (
    UnsupportedPattern,
    find_patterns,
    translate_pattern,
    translate_schema,
)
from gateway.structured_output.thinking import ThinkingFormat
from gateway.structured_output.tool_styles import ToolStyle

_OPTIONS = {
    "lenient": False,
    "coerce_one_of": False,
    "whitespace_pattern": r" |\r?\n[ \t]{0,40}",
}
"""Options that a schema inside a grammar may not set for itself, equal to those of a schema by
itself: whether unsupported keywords are ignored, and how much white space JSON may have."""

_LENIENT_OPTIONS = {**_OPTIONS, "lenient": True, "coerce_one_of": True}
"""Options for callable tools and formats that are not strict: keywords that cannot be enforced
during decoding are ignored."""

_SPACE = r"/[ \t\r\n]{0,8}/"
"""White space around a thought: what the splitter drops, and no more than templates write."""


def build_grammar(
    prompt: Prompt, style: ToolStyle, marker_ids: Mapping[str, int] | None = None
) -> Grammar | None:
    """Return the grammar of the answer; None if any text is allowed. O(schemas).

    `marker_ids`: the style's markers that are single special tokens. Raises Refusal for a schema
    that is too big, too deep or not an object, and for a tool choice that names an unknown tool.
    """
    wanted = prompt.output_format
    answer = answer_grammar(wanted)
    choice = prompt.tool_choice
    if not prompt.tools or choice.mode == "none":
        return answer
    tools = callable_tools(prompt)
    is_forced = choice.mode == "required"
    if not is_forced and answer is None and not any(tool.strict for tool in tools):
        return None
    lark = _LarkGrammar(style, marker_ids or {}, tools, is_forced=is_forced)
    # A single tool that is forced by name is called exactly once.
    parallel = choice.parallel and not (is_forced and len(choice.names) == 1)
    return Grammar("lark", lark.text(answer, parallel=parallel))


def behind_thought(
    grammar: Grammar | None,
    style: ThinkingFormat,
    thought: Literal["", "possible", "open"],
    marker_ids: Mapping[str, int],
    wanted: Thinking,
) -> Grammar | None:
    """Return the grammar of an answer that may think first: it begins behind the thought, and a
    budget forces the thought's end. None if any text is allowed. `thought`: see `Rendered`.
    """
    budget = style.budget(wanted)
    if not thought or style.kind != "tags" or (grammar is None and not budget):
        return grammar
    closing = marker(style.closing, marker_ids)
    rules = [
        text_rule("thought", style.closing, marker_ids, budget),
        f"answer: {_SPACE} wanted",
        f"wanted: {nested(grammar)}",
    ]
    start = f"thought {closing} answer"
    if thought == "possible":
        space = "" if style.opening in marker_ids else f"{_SPACE} "
        rules.append(f"opened: {space}{marker(style.opening, marker_ids)} thought {closing}")
        start = "opened? answer"
    return Grammar("lark", "\n".join((f"start: {start}", *rules, "")))


def marker(text: str, marker_ids: Mapping[str, int]) -> str:
    """Return a marker as Lark writes it: as a special token, or as its text."""
    token_id = marker_ids.get(text)
    return literal(text) if token_id is None else f"<[{token_id}]>"


def text_rule(name: str, end: str, marker_ids: Mapping[str, int], tokens_max: int | None) -> str:
    """Return the rule of any text up to the marker `end`, of at most so many tokens."""
    options = [] if end in marker_ids else [f"stop={literal(end)}"]
    options += [f"max_tokens={tokens_max}"] if tokens_max else []
    attributes = f"[{', '.join(options)}]" if options else ""
    return f"{name}{attributes}: /(?s:.*)/"


def nested(grammar: Grammar | None) -> str:
    """Return a grammar as the right side of a rule."""
    if grammar is None:
        return "/(?s:.*)/"
    match grammar.kind:
        case "lark":
            return f"%lark {{\n{grammar.text}\n}}"
        case "regex":
            return f"/{_between_slashes(grammar.text)}/"
        case "json_object":
            return f"%json {_schema_text({'type': 'object', 'x-guidance': _OPTIONS})}"
        case _:
            options = _OPTIONS if grammar.kind == "json_schema" else _LENIENT_OPTIONS
            return f"%json {_schema_text({**json.loads(grammar.text), 'x-guidance': options})}"


def _between_slashes(pattern: str) -> str:
    """Escape the slashes of a pattern that are not escaped. O(characters)."""
    return re.sub(r"(\\.)|/", lambda found: found[1] or r"\/", pattern, flags=re.DOTALL)


def schema_field(prompt: Prompt) -> str | None:
    """Return the request field of the schema that constrains the answer; for several schemas, the
    list that contains them; None if they share no field. O(tools)."""
    wanted, choice = prompt.output_format, prompt.tool_choice
    is_forced = bool(prompt.tools) and choice.mode == "required"
    has_source = wanted.kind not in ("text", "json_object")
    fields = [wanted.path] if has_source and not is_forced else []
    if choice.mode != "none":
        fields += [tool.path for tool in callable_tools(prompt) if tool.strict or is_forced]
    if len(fields) == 1:
        return fields[0]
    lists = {field.partition("[")[0] for field in fields}
    return lists.pop() if len(lists) == 1 else None


def locate_fault(prompt: Prompt, code: str, message: str) -> tuple[str | None, str]:
    """Return the field that an engine's refusal is about, if it is one of a grammar, and the
    message for it, which is unchanged where no keyword is found. O(schemas)."""
    field = schema_field(prompt)
    if code != "grammar_invalid":
        return field, message
    schemas = list(_schemas(prompt))
    for path, schema in schemas:
        if (fault := find_fault(schema, message)) is not None:
            where = ".".join((path, *fault[0]))
            return where, f"{where}: {fault[1]}."
    if schemas and field is not None and is_unsatisfiable(message):
        message = f"{field}: no value satisfies all keywords of its schema."
    return field, message


def _schemas(prompt: Prompt) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the fields and schemas that constrain the answer. Arguments are an object."""
    choice, wanted = prompt.tool_choice, prompt.output_format
    is_forced = bool(prompt.tools) and choice.mode == "required"
    if wanted.kind == "json_schema" and not is_forced:
        yield wanted.path, parse_schema(wanted.schema, wanted.path)
    if choice.mode != "none":
        for tool in callable_tools(prompt):
            if tool.strict or is_forced:
                schema = parse_schema(tool.parameters, tool.path)
                yield tool.schema_path, {**schema, "type": "object"}


def callable_tools(prompt: Prompt) -> tuple[Tool, ...]:
    """Return the tools that may be called. Raises Refusal if the choice names an unknown tool."""
    names = prompt.tool_choice.names
    known = {tool.name for tool in prompt.tools}
    for name in names:
        if name not in known:
            message = f"tool_choice: unknown tool {name[:64]!r}; expected one of `tools`."
            raise Refusal(Kind.BAD, "invalid_value", message, param="tool_choice")
    return tuple(tool for tool in prompt.tools if not names or tool.name in names)


def answer_grammar(wanted: OutputFormat) -> Grammar | None:
    """Return the grammar of an output format without tools; None for text. Raises Refusal."""
    if wanted.kind == "json_schema":
        schema = parse_schema(wanted.schema, wanted.path, exact=True)
        return _schema_grammar(schema, wanted.path, strict=wanted.strict)
    if wanted.kind == "regex":
        return Grammar("regex", translate_pattern(wanted.schema))
    if wanted.kind == "lark":
        return Grammar("lark", _lark(wanted))
    return Grammar("json_object") if wanted.kind == "json_object" else None


def _lark(wanted: OutputFormat) -> str:
    """Return a client's grammar in Lark. Raises Refusal."""
    if not is_gbnf(wanted.schema):
        return wanted.schema
    try:
        return translate_gbnf(wanted.schema)
    except GbnfError as error:
        message = f"{wanted.path}: the grammar cannot be used: {error}."
        raise Refusal(Kind.BAD, "grammar_invalid", message, param=wanted.path) from error


class _LarkGrammar:
    """Builds the text of a Lark grammar, one rule per line."""

    def __init__(
        self,
        style: ToolStyle,
        marker_ids: Mapping[str, int],
        tools: Sequence[Tool],
        *,
        is_forced: bool,
    ) -> None:
        self._style = style
        self._opening = style.opening.strip()
        self._marker_ids = marker_ids
        self._rules: list[str] = []
        objects = []
        for number, tool in enumerate(tools):
            head = f'{{"name": {json.dumps(tool.name, ensure_ascii=False)}, "{style.arguments}": '
            objects.append(f'{literal(head)} arguments_{number} "}}"')
            arguments = nested(arguments_grammar(tool, is_forced=is_forced))
            self._rules.append(f"arguments_{number}: {arguments}")
        self._rules.append("object: " + " | ".join(f"({text})" for text in objects))
        self._is_forced = is_forced

    def text(self, answer: Grammar | None, *, parallel: bool) -> str:
        """Return the grammar's text. `answer`: the grammar of text without a call."""
        style, opening = self._style, marker(self._opening, self._marker_ids)
        is_free = not self._is_forced and answer is None
        if is_free and not style.bare and self._opening not in self._marker_ids:
            opening = "upto"  # text that ends with the marker
        next_one = "object" if style.listed else "call"
        more = f" ({literal(style.between)} {next_one})*" if parallel else ""
        if style.listed:
            self._rule("call", f'{opening} "[" object{more} "]"')
            calls = "call"
        else:
            self._rule("call", self._call(opening))
            calls = f"call{more}"
        if self._is_forced:
            start = calls
        elif answer is not None:
            self._rule("answer", nested(answer))
            start = f"({calls}) | answer"
        else:
            start = self._free(calls, parallel=parallel)
        return "\n".join((f"start: {start}", *self._rules, ""))

    def _call(self, opening: str) -> str:
        style = self._style
        if style.bare:
            return f"({opening})? object"
        before, after = style.opening.partition(self._opening)[2], style.closing
        closing = after.strip()
        end = f"{literal(after[: len(after) - len(closing)])} {marker(closing, self._marker_ids)}"
        return f"{opening} {literal(before)} object {end}"

    def _free(self, calls: str, *, parallel: bool) -> str:
        """Return a rule for free text with calls; text that begins a call must be a call."""
        if self._style.bare:
            # In bare styles, an answer that begins with a brace is a call.
            self._rule("TEXT", r"/\s*([^\s{](?s:.*))?/")
            return f"({calls}) | TEXT"
        times = "*" if parallel and not self._style.listed else "?"
        if self._opening in self._marker_ids:
            # Text never contains a special token.
            self._rule("TEXT", "/(?s:.+)/")
            return f"(TEXT? call){times} TEXT?"
        opening = _regex(self._opening)
        self._rule("upto[lazy]", f"/(?s:.*){opening}/")
        self._rule("TEXT", f"/(?s:.*)/ & ~/(?s:.*){opening}(?s:.*)/")
        return f"call{times} TEXT"

    def _rule(self, name: str, text: str) -> None:
        self._rules.append(f"{name}: {text}")


def arguments_grammar(tool: Tool, *, is_forced: bool) -> Grammar:
    """Return the grammar of a call's arguments.

    Arguments are an object also where a schema without a type allows other values: a call is
    nothing else. Only strict tools and forced calls are held to the tool's schema. Raises Refusal.
    """
    schema: dict[str, Any] = {}
    if tool.strict or is_forced:
        schema = parse_schema(tool.parameters, tool.path, exact=True)
    return _schema_grammar({**schema, "type": "object"}, tool.schema_path, strict=tool.strict)


def _schema_grammar(schema: dict[str, Any], path: str, *, strict: bool) -> Grammar:
    """Return the grammar of a schema whose field is `path`: in Lark, if it has numbers that the
    engine would round. Raises Refusal."""
    schema = prepared_schema(schema, path, strict=strict)
    try:
        schema = translate_schema(schema, strict=strict)
        text = lark_of_schema(schema, _OPTIONS if strict else _LENIENT_OPTIONS)
    except UnsupportedPattern as error:
        found = (steps for steps, pattern in find_patterns(schema) if pattern == error.pattern)
        problem = f"{error.why}. Only a schema that is not strict may contain it"
        raise keyword_refusal(path, next(found, ()), problem) from error
    except InexactNumber as error:
        if strict:
            problem = f"a number near it has more digits than can be enforced: {error.why}"
            raise keyword_refusal(path, error.steps, problem) from error
        text, schema = None, without_inexact_numbers(schema)
    if text is not None:
        return Grammar("lark", text)
    kind: Literal["json_schema", "lenient_json_schema"]
    kind = "json_schema" if strict else "lenient_json_schema"
    return Grammar(kind, _schema_text(schema))


def _schema_text(schema: Mapping[str, object]) -> str:
    """Return JSON text; a decimal that constrains nothing may lose digits."""
    return json.dumps(schema, ensure_ascii=True, default=float)


def literal(text: str) -> str:
    """Return a text as Lark writes it."""
    return json.dumps(text, ensure_ascii=False)


def _regex(text: str) -> str:
    """Escape `text` for a pattern between slashes."""
    return "".join(char if char.isalnum() or char in "_<>" else f"\\{char}" for char in text)
