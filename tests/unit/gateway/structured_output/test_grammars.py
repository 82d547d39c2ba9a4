"""Grammars of answers, tried on the engine's own matcher."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from engine.grammar.grammar import GrammarLimits, Vocabulary, compile_grammar
from engine.model_store import ModelCard
from gateway.dialects.canonical import OutputFormat, Prompt, Tool, ToolChoice
from gateway.errors import Kind, Refusal
from gateway.structured_output.grammars import build_grammar, callable_tools, schema_field
from gateway.structured_output.tool_styles import FALLBACK, HERMES, LLAMA3, MISTRAL, ToolStyle
from tests.tables import each_row
from tests.tiny_tokenizer import byte_tokens

SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    }
)
STRICT, LOOSE = (
    Tool("get", "", SCHEMA, "tools[0]", strict=True),
    Tool("put", "", SCHEMA, "tools[1]"),
)
FORMAT = OutputFormat("json_schema", '{"type": "object", "properties": {"q": {"const": 1}}}', "f")
OPEN, CLOSE = 1, 2

Text = str | list[str | int]
Allows = Callable[..., bool]


@pytest.fixture(scope="session")
def allows(card: ModelCard) -> Allows:
    """Return whether this text, or these tokens, may be a whole answer."""
    path, size = card.tokenizer_path, card.config.vocab
    vocabulary = Vocabulary.load(path, size, [0], GrammarLimits())

    def allowed(text: Text, *tools: Tool, style: ToolStyle = FALLBACK, **more: Any) -> bool:
        markers = {style.opening.strip(): OPEN, style.closing.strip(): CLOSE}
        prompt = Prompt(tools=tools, **more)
        grammar = build_grammar(prompt, style, markers if isinstance(text, list) else {})
        assert grammar is not None
        matcher = compile_grammar(grammar, vocabulary).matcher.fork()
        pieces = [text] if isinstance(text, str) else text
        ids = [i for p in pieces for i in ([p] if isinstance(p, int) else byte_tokens(p))]
        return all(map(matcher.consume, ids)) and matcher.is_accepting

    return allowed


def call(name: str, arguments: str) -> str:
    """Return a call as the fallback style writes it."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


REQUIRED = ToolChoice("required")


def test_no_grammar_without_format_or_tools() -> None:
    assert build_grammar(Prompt(), FALLBACK) is None
    assert build_grammar(Prompt(tools=(LOOSE,)), FALLBACK) is None
    assert build_grammar(Prompt(tools=(STRICT,), tool_choice=ToolChoice("none")), FALLBACK) is None


def test_format_alone_is_passed_on() -> None:
    """The engine compiles JSON formats itself."""
    schema = build_grammar(Prompt(output_format=FORMAT), FALLBACK)
    mode = build_grammar(Prompt(output_format=OutputFormat("json_object")), FALLBACK)

    assert schema is not None
    assert mode is not None
    assert (schema.kind, schema.text) == ("json_schema", FORMAT.schema)
    assert mode.kind == "json_object"


@each_row(
    ("text", "is_allowed"),
    [
        (call("get", '{"a": 1}'), True),
        (call("put", '{"a":1}'), True),
        (call("get", '{"a": 1}') + "\n" + call("put", '{"a": 2}'), True),
        (call("get", '{"a": "x"}'), False),
        (call("get", "{}"), False),
        (call("rm", "{}"), False),
        ("Hello", False),
        ("", False),
        (call("get", '{"a": 1}') + " so", False),
    ],
)
def test_required_call_allows_only_calls(allows: Allows, text: str, is_allowed: bool) -> None:
    """Of any offered tool, with arguments of its schema."""
    assert allows(text, STRICT, LOOSE, tool_choice=REQUIRED) is is_allowed


def test_named_tool_is_called_once(allows: Allows) -> None:
    """Other forced calls only once if calls are not parallel."""
    choice, single = ToolChoice("required", ("put",)), ToolChoice("required", parallel=False)
    one = call("put", '{"a": 1}')

    assert allows(one, STRICT, LOOSE, tool_choice=choice)
    assert not allows(call("get", '{"a": 1}'), STRICT, LOOSE, tool_choice=choice)
    assert not allows(f"{one}\n{one}", STRICT, LOOSE, tool_choice=choice)
    assert allows(one, STRICT, LOOSE, tool_choice=single)
    assert not allows(f"{one}\n{one}", STRICT, LOOSE, tool_choice=single)


def test_limits_white_space_in_json(allows: Allows) -> None:
    """Small models would fill their answer; one space or an indented line is enough."""
    assert allows(call("put", '{\n  "a": 1\n}'), LOOSE, tool_choice=REQUIRED)
    assert not allows(call("put", '{\n\n"a": 1}'), LOOSE, tool_choice=REQUIRED)


@each_row(
    ("text", "is_allowed"),
    [
        ("Hello <b>", True),
        ("", True),
        ("Hm.\n" + call("get", '{"a": 1}'), True),
        (call("get", '{"a": 1}') + "\n" + call("put", '{"z": 1}') + " so", True),
        (call("get", '{"z": 1}'), False),
        (call("put", "[]"), False),
        ("<tool_call>x", False),
        ("<tool_", True),
    ],
)
def test_strict_tools_allow_free_text(allows: Allows, text: str, is_allowed: bool) -> None:
    """A call's arguments must satisfy the schema if the tool is strict."""
    assert allows(text, STRICT, LOOSE) is is_allowed


def test_format_with_tools_allows_calls(allows: Allows) -> None:
    """Unless a call is required."""
    assert allows('{"q": 1}', LOOSE, output_format=FORMAT)
    assert allows(call("put", '{"z": 1}'), LOOSE, output_format=FORMAT)
    assert not allows("Hello", LOOSE, output_format=FORMAT)
    assert not allows('{"q": 1}', LOOSE, output_format=FORMAT, tool_choice=REQUIRED)


@pytest.mark.parametrize(
    ("style", "text"),
    [
        (HERMES, [OPEN, '\n{"name": "get", "arguments": {"a": 1}}\n', CLOSE]),
        (LLAMA3, [OPEN, '{"name": "get", "parameters": {"a": 1}}']),
        (LLAMA3, '{"name": "get", "parameters": {"a": 1}}; {"name": "put", "parameters": {"a":1}}'),
        (MISTRAL, [OPEN, '[{"name": "get", "arguments": {"a": 1}}]']),
        (MISTRAL, '[TOOL_CALLS][{"name": "get", "arguments": {"a": 1}}, {"name": "put",'
         ' "arguments": {"a": 2}}]'),
    ],
)  # fmt: skip
def test_forces_calls_in_every_style(allows: Allows, style: ToolStyle, text: Text) -> None:
    """Markers that are single special tokens are matched as tokens, not as text."""
    wrong = [part.replace("1", '"x"', 1) if isinstance(part, str) else part for part in text]
    broken = "".join(map(str, wrong)) if isinstance(text, str) else wrong

    for choice in (REQUIRED, ToolChoice()):
        assert allows(text, STRICT, LOOSE, style=style, tool_choice=choice)
        assert not allows(broken, STRICT, LOOSE, style=style, tool_choice=choice)
    empty: Text = "Hi" if isinstance(text, str) else ["Hi"]
    assert allows(empty, STRICT, style=style)
    assert not allows(empty, STRICT, style=style, tool_choice=REQUIRED)


def test_text_before_a_call_is_free_in_every_style(allows: Allows) -> None:
    """If the text does not contain the marker."""
    text: Text = ["Hm", OPEN, '\n{"name": "get", "arguments": {"a": 1}}\n', CLOSE, " so"]

    assert allows(text, STRICT, style=HERMES)
    assert allows('Hm [TOOL_CALLS][{"name": "get", "arguments": {"a": 1}}]', STRICT, style=MISTRAL)
    assert not allows('{"x": 1}', STRICT, style=LLAMA3)


def test_tool_names_are_quoted(allows: Allows) -> None:
    """A name is never grammar syntax."""
    tool = Tool('a"b\\ | é', "", "{}")

    assert allows(call(json.dumps(tool.name)[1:-1].replace("\\u00e9", "é"), "{}"), tool,
                  tool_choice=REQUIRED)  # fmt: skip


def test_schema_cannot_set_grammar_options(allows: Allows) -> None:
    """A schema could otherwise disable itself."""
    schema = json.dumps({"type": "object", "x-guidance": {"lenient": True}, "maxProperties": 0})

    assert allows(call("get", "{}"), Tool("get", "", schema), tool_choice=REQUIRED)
    unknown = json.dumps({"x-guidance": {"lenient": True}, "not": {"type": "string"}})
    with pytest.raises(Exception, match="not"):
        allows(call("get", "{}"), Tool("get", "", unknown, strict=True), tool_choice=REQUIRED)


@each_row("is_strict", [False, True])
@each_row(
    "schema",
    [
        {"properties": {"a": {"type": "integer"}}},
        {"description": "anything"},
        {"anyOf": [{"type": "object"}, {"type": "string"}]},
        {"allOf": [{"properties": {"a": {"type": "integer"}}}]},
    ],
)
def test_arguments_are_an_object_also_without_a_type(
    allows: Allows, schema: dict[str, Any], *, is_strict: bool
) -> None:
    """Other values are no call: a forced one would end as text."""
    tool = Tool("put", "", json.dumps(schema), strict=is_strict)

    assert allows(call("put", '{"a": 1}'), tool, tool_choice=REQUIRED)
    assert not allows(call("put", '"x"'), tool, tool_choice=REQUIRED)


UNHELD = json.dumps({"type": "array", "items": {"type": "integer"}, "uniqueItems": True})


def test_lenient_schema_is_enforced_as_far_as_possible(allows: Allows) -> None:
    """A format or a forced function with keywords that no grammar supports."""
    wanted = OutputFormat("json_schema", UNHELD, "f", strict=False)
    schema = json.dumps({"type": "object", "properties": {"a": json.loads(UNHELD)}})
    loose, strict = (Tool("put", "", schema, strict=is_strict) for is_strict in (False, True))

    alone = build_grammar(Prompt(output_format=wanted), FALLBACK)
    assert alone is not None
    assert alone.kind == "lenient_json_schema"
    assert allows("[1,1]", LOOSE, output_format=wanted)
    assert not allows('["a"]', LOOSE, output_format=wanted)
    assert allows(call("put", '{"a": [1,1]}'), loose, tool_choice=REQUIRED)
    assert not allows(call("put", '{"a": ["b"]}'), loose, tool_choice=REQUIRED)
    with pytest.raises(Exception, match="uniqueItems"):
        allows("", strict, tool_choice=REQUIRED)
    with pytest.raises(Exception, match="uniqueItems"):
        allows("", LOOSE, output_format=OutputFormat("json_schema", UNHELD))


def test_lenient_schema_drops_unsupported_patterns(
    allows: Allows,
) -> None:
    """Schema libraries generate them, and hosted APIs treat them as hints."""
    text = json.dumps(
        {
            "type": "object",
            "properties": {
                "a": {"type": "string", "pattern": r"^(?!\s*$).+", "maxLength": 3},
                "b": {"type": "string", "pattern": "^x+$"},
            },
        }
    )
    wanted = OutputFormat("json_schema", text, "f", strict=False)
    loose, strict = (Tool("put", "", text, strict=is_strict) for is_strict in (False, True))

    for answer, is_one in (('{"a": " "}', True), ('{"a": "four"}', False), ('{"b": "y"}', False)):
        assert allows(answer, output_format=wanted) is is_one
        assert allows(answer, LOOSE, output_format=wanted) is is_one
        assert allows(call("put", answer), loose, tool_choice=REQUIRED) is is_one
    for more in ({"output_format": OutputFormat("json_schema", text)}, {"tool_choice": REQUIRED}):
        with pytest.raises(Refusal, match=r"uses lookaround \(\(\?!\); write") as raised:
            allows("", strict, **more)
        assert (raised.value.code, bool(raised.value.param)) == ("invalid_json_schema", True)


@each_row(
    ("prompt", "param"),
    [
        (Prompt(output_format=OutputFormat("json_schema", "[]", "response_format")),
         "response_format"),
        (Prompt(output_format=OutputFormat("json_schema", '{"a":' * 65 + "}" * 65)), "schema"),
        (Prompt(tools=(Tool("a", "", "7", "tools[0]"),), tool_choice=REQUIRED), "tools[0]"),
        (Prompt(tools=(LOOSE,), tool_choice=ToolChoice("required", ("rm",))), "tool_choice"),
    ],
)  # fmt: skip
def test_refuses_unsupported_schemas(prompt: Prompt, param: str) -> None:
    """With the field that contains the schema."""
    with pytest.raises(Refusal) as raised:
        build_grammar(prompt, FALLBACK)

    assert (raised.value.kind, raised.value.param) == (Kind.BAD, param)


def test_tool_choice_restricts_callable_tools() -> None:
    """All tools are in the prompt."""
    prompt = Prompt(tools=(STRICT, LOOSE), tool_choice=ToolChoice("auto", ("put",)))

    assert callable_tools(prompt) == (LOOSE,)


@each_row(
    ("prompt", "field"),
    [
        (Prompt(), None),
        (Prompt(output_format=OutputFormat("json_object")), None),
        (Prompt(output_format=FORMAT), "f"),
        (Prompt(tools=(LOOSE,), output_format=FORMAT), "f"),
        (Prompt(tools=(STRICT, LOOSE)), "tools[0]"),
        (Prompt(tools=(STRICT, LOOSE), tool_choice=REQUIRED), "tools"),
        (Prompt(tools=(STRICT, LOOSE), tool_choice=ToolChoice("required", ("put",))), "tools[1]"),
        (Prompt(tools=(STRICT,), tool_choice=REQUIRED, output_format=FORMAT), "tools[0]"),
        (Prompt(tools=(STRICT,), tool_choice=ToolChoice("none"), output_format=FORMAT), "f"),
        (Prompt(tools=(STRICT,), output_format=FORMAT), None),
    ],
)
def test_an_error_names_the_field_of_the_schema(prompt: Prompt, field: str | None) -> None:
    """For errors that only the engine's compiler finds."""
    assert schema_field(prompt) == field
