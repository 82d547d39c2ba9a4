"""Gemini's dialect: requests and refusals."""

from __future__ import annotations

import json
from typing import Any

import pytest
from msgspec import structs

from engine.api import Sampling
from gateway.dialects.canonical import (
    Call,
    OutputFormat,
    ToolChoice,
)
from gateway.errors import Kind, Refusal
from tests.tables import each_row
from tests.unit.gateway.dialects.requests import GEMINI

WEATHER = {
    "functionDeclarations": [
        {
            "name": "weather",
            "description": "Of a city",
            "parameters": {
                "type": "OBJECT",
                "properties": {"city": {"type": "STRING", "nullable": True}},
                "required": ["city"],
            },
        }
    ]
}


parse, refused = GEMINI.parse, GEMINI.refused

FORMAT = "generationConfig.responseFormat"


def test_contents_become_messages_in_order() -> None:
    """The system instruction comes first."""
    call = parse(
        systemInstruction={"parts": [{"text": "Be brief"}], "role": "user"},
        contents=[
            {"role": "user", "parts": [{"text": "a"}, {"text": "b"}]},
            {"role": "model", "parts": [{"text": "c"}]},
            {"parts": [{"text": "d"}]},
        ],
    )

    found = [(part.role, part.text, part.message) for part in call.prompts[0].segments]
    assert found == [
        ("system", "Be brief", 0),
        ("user", "a", 1),
        ("user", "b", 1),
        ("assistant", "c", 2),
        ("user", "d", 3),
    ]
    assert call.prompts[0].segments[2].path == "contents[0].parts[1]"


def test_joins_neighbouring_model_contents() -> None:
    """The SDK's chats send each chunk of an earlier stream back as a content; apart, their tokens
    would differ from the cached ones.
    """
    question = {"role": "user", "parts": [{"text": "?"}]}
    called = {"functionCall": {"name": "weather", "args": {}}}
    result = {"functionResponse": {"name": "weather", "response": {}}}

    def contents(*turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [question, *({"role": "model", "parts": parts} for parts in turns)]

    joined, chunks, apart = (
        parse(contents=[*made, {"role": "user", "parts": [result]}, question, question])
        for made in (
            contents([{"text": "Let me see."}, called]),
            contents([{"text": "Let me "}], [{"text": "see"}], [{"text": "."}], [called]),
            contents([{"text": "Let me "}, {"text": "see."}], [called]),
        )
    )

    def segments_of(call: Call) -> list[tuple[str, str, int]]:
        return [(part.role, part.text, part.message) for part in call.prompts[0].segments]

    assert segments_of(chunks) == segments_of(joined)
    assert [part[1:] for part in segments_of(apart)][1:3] == [("Let me ", 1), ("see.", 1)]
    assert [part[2] for part in segments_of(joined)] == [0, 1, 1, 2, 3, 4]


def test_accepts_one_content_per_streamed_chunk() -> None:
    """A chat of a few pages sends 10,000 contents."""
    chunk = {"role": "model", "parts": [{"text": "x"}]}
    call = parse(contents=[chunk] * 12_000)
    many = refused(contents=[chunk] * 25_001)
    odd = refused(contents=[chunk, {"role": "user", "parts": [{"text": "x", "texts": "y"}]}])

    assert call.prompts[0].segments[0].text == "x" * 12_000
    assert (many.param, "25000" in many.message) == ("contents", True)
    assert odd.param == "contents[1].parts[0].texts"


def test_camel_case_and_snake_case_are_equal() -> None:
    """The SDK mixes both in one body."""
    camel = parse(
        generationConfig={"maxOutputTokens": 5, "topP": 0.5, "responseMimeType": "text/plain"},
        toolConfig={"functionCallingConfig": {"allowedFunctionNames": ["weather"]}},
        tools=[WEATHER],
    )
    snake = parse(
        generation_config={
            "max_output_tokens": 5,
            "top_p": 0.5,
            "response_mime_type": "text/plain",
        },
        tool_config={"function_calling_config": {"allowed_function_names": ["weather"]}},
        tools=[{"function_declarations": WEATHER["functionDeclarations"]}],
    )

    assert camel == snake
    assert camel.generation.max_tokens == 5
    assert camel.prompts[0].tool_choice == ToolChoice("auto", ("weather",))


def test_null_in_one_spelling_keeps_the_other() -> None:
    """Null equals an omitted field, in either order."""
    first = parse(systemInstruction=None, system_instruction="Be brief")
    last = parse(system_instruction="Be brief", systemInstruction=None)

    assert first == last
    assert first.prompts[0].segments[0].text == "Be brief"


def test_client_data_keeps_its_spelling() -> None:
    """Keys of arguments, responses and schemas are data."""
    call = parse(
        contents=[
            {"parts": [{"text": "?"}]},
            {
                "role": "model",
                "parts": [{"functionCall": {"name": "weather", "args": {"cityName": "B"}}}],
            },
            {
                "role": "user",
                "parts": [{"functionResponse": {"name": "weather", "response": {"tempC": 3}}}],
            },
        ],
        tools=[{"functionDeclarations": [{"name": "weather", "parametersJsonSchema": {"aB": 1}}]}],
    )

    _, asks, tells = call.prompts[0].segments
    assert asks.call is not None
    assert asks.call.arguments == '{"cityName":"B"}'
    assert (tells.role, tells.text, tells.answers) == ("tool", '{"tempC":3}', asks.call.call_id)
    assert call.prompts[0].tools[0].parameters == '{"aB":1}'


@each_row("role", ["user", "function", "tool", ""])
def test_accepts_function_responses_in_any_role(role: str) -> None:
    """The SDK's manual example sends `tool`, its automatic calling `user`."""
    call = parse(
        contents=[
            {"role": "user", "parts": [{"text": "?"}]},
            {"role": "model", "parts": [{"functionCall": {"name": "weather"}}]},
            {"role": role, "parts": [{"functionResponse": {"name": "weather"}}]},
        ],
        generationConfig={
            "responseMimeType": "application/json",
            "responseJsonSchema": {"type": "OBJECT"},
        },
    )

    assert [part.role for part in call.prompts[0].segments] == ["user", "assistant", "tool"]
    assert call.prompts[0].output_format.schema == '{"type":"object"}'


def test_a_result_that_is_repeated_counts_once() -> None:
    """Gemini CLI sends each response of a resumed session twice, under the same id."""
    ask = {"role": "model", "parts": [{"functionCall": {"name": "weather", "id": "one"}}]}
    tell, other = (
        {"functionResponse": {"name": "weather", "id": "one", "response": {"n": n}}} for n in (1, 2)
    )
    contents = [{"parts": [{"text": "?"}]}, ask]

    resumed = parse(contents=[*contents, {"role": "user", "parts": [tell, tell]}])
    with pytest.raises(Refusal, match="has another functionResponse already") as refused:
        parse(contents=[*contents, {"role": "user", "parts": [tell, other]}])

    assert resumed == parse(contents=[*contents, {"role": "user", "parts": [tell]}])
    assert refused.value.param == "contents[2].parts[1]"


def test_generation_config_reaches_the_call() -> None:
    streaming = structs.replace(GEMINI, model="org/m", action="streamGenerateContent")
    call = streaming.parse(
        generationConfig={
            "temperature": 0.5,
            "topK": 40.0,
            "seed": 3,
            "candidateCount": 2,
            "stopSequences": ["END"],
            "responseLogprobs": True,
            "logprobs": 2,
        }
    )

    assert call.model == "org/m"
    assert call.stream
    assert call.generation.sampling == Sampling(temperature=0.5, top_k=40, seed=3, logprobs=2)
    assert (call.generation.choices, call.generation.stop) == (2, ("END",))
    assert call.generation.choices_field == "generationConfig.candidateCount"


@pytest.mark.parametrize("name", ["responseSchema", "responseJsonSchema"])
def test_an_enum_is_answered_as_plain_text(name: str) -> None:
    """`text/x.enum` of the SDKs' examples: one of the values, without quotes."""
    schema = {"type": "STRING", "enum": ["a.b", "c d"]}
    call = parse(generationConfig={"responseMimeType": "text/x.enum", name: schema})
    wanted = call.prompts[0].output_format

    assert (wanted.kind, wanted.schema) == ("regex", r"a\.b|c d")
    assert wanted.path == f"generationConfig.{name}"


@pytest.mark.parametrize("schema", [None, {"type": "STRING"}, {"type": "INTEGER", "enum": [1]}])
def test_an_enum_without_values_is_refused(schema: Any) -> None:
    """No text would satisfy it."""
    with pytest.raises(Refusal, match=r"text/x\.enum"):
        parse(generationConfig={"responseMimeType": "text/x.enum", "responseSchema": schema})


def test_mime_type_and_schema_set_the_output_format() -> None:
    plain = parse(generationConfig={"responseMimeType": "application/json"})
    schema = parse(
        generationConfig={
            "responseMimeType": "application/json",
            "responseSchema": {"type": "ARRAY", "items": {"type": "INTEGER"}},
        }
    )
    newer = parse(
        generationConfig={
            "responseMimeType": "application/json",
            "responseJsonSchema": {"type": "array"},
        }
    )

    assert plain.prompts[0].output_format == OutputFormat("json_object")
    assert (newer.prompts[0].output_format.strict, newer.prompts[0].output_format.path) == (
        False,
        "generationConfig.responseJsonSchema",
    )
    assert schema.prompts[0].output_format == OutputFormat(
        "json_schema",
        '{"type":"array","items":{"type":"integer"}}',
        "generationConfig.responseSchema",
    )


def test_response_format_is_the_new_name_of_mime_type_and_schema() -> None:
    """A list with one text format, or that format itself, in either case."""
    schema = {"type": "OBJECT", "properties": {"a": {"type": "STRING"}}}
    text = {"mimeType": "application/json", "schema": schema}
    old = parse(
        generationConfig={"responseMimeType": "application/json", "responseJsonSchema": schema}
    ).prompts[0]

    for sent in ([{"text": text}], {"text": text}, [{"text": {"schema": schema}}]):
        found = parse(generationConfig={"responseFormat": sent}).prompts[0].output_format
        path = "generationConfig.responseFormat[0].text.schema"
        assert found == structs.replace(old.output_format, path=path)
    plain = parse(generationConfig={"response_format": [{"text": {"mime_type": "text/plain"}}]})
    assert plain.prompts[0].output_format == OutputFormat()


CALLED = {"role": "model", "parts": [{"functionCall": {"name": "weather", "args": {}}}]}


def result_with(**fields: Any) -> dict[str, Any]:
    """Return contents with a result that has more fields."""
    result = {"functionResponse": {"name": "weather", "response": {}, **fields}}
    question = {"role": "user", "parts": [{"text": "?"}]}
    return {"contents": [question, CALLED, {"role": "user", "parts": [result]}]}


@each_row(
    ("fields", "named"),
    [
        (result_with(willContinue=False, scheduling="WHEN_IDLE", parts=[]), ()),
        (result_with(willContinue=True), ("contents[].parts[].functionResponse.willContinue",)),
        (result_with(scheduling="SILENT"), ("contents[].parts[].functionResponse.scheduling",)),
        ({"toolConfig": {"includeServerSideToolInvocations": False}}, ()),
        (
            {"toolConfig": {"include_server_side_tool_invocations": True}},
            ("toolConfig.includeServerSideToolInvocations",),
        ),
        (
            {"toolConfig": {"retrievalConfig": {"languageCode": "de"}}},
            ("toolConfig.retrievalConfig",),
        ),
        (
            {
                "toolConfig": {"functionCallingConfig": {"streamFunctionCallArguments": True}},
                "tools": [{"functionDeclarations": [{"name": "f", "behavior": "NON_BLOCKING"}]}],
            },
            (
                "toolConfig.functionCallingConfig.streamFunctionCallArguments"[:48],
                "tools[].functionDeclarations[].behavior",
            ),
        ),
    ],
)
def test_how_live_sessions_run_tools_is_a_hint(fields: Any, named: Any) -> None:
    """Google ignores it outside of them, and what asks for nothing is not named. Google's clients
    send it in every mode but the strict one, which refuses it."""
    assert parse(**fields).ignored == named
    if named:
        assert refused("strict", **fields).code in ("unsupported_parameter", "invalid_value")


def test_last_model_content_is_a_prefill() -> None:
    """The answer continues its text."""
    call = parse(contents=[{"parts": [{"text": "a"}]}, {"role": "model", "parts": [{"text": "b"}]}])

    assert call.prompts[0].continues
    assert not call.prompts[0].add_generation_prompt


def test_accepts_cached_content_name_without_collection() -> None:
    """The SDK sends both forms."""
    names = [parse(cachedContent=name).prompts[0].resource for name in ("x", "cachedContents/x")]

    assert names == ["cachedContents/x"] * 2


@each_row(
    ("fields", "param"),
    [
        ({"contents": []}, "contents"),
        ({"contents": [{"parts": []}]}, "contents[0].parts"),
        ({"contents": [{"parts": [{}]}]}, "contents[0].parts[0]"),
        ({"contents": [{"parts": [{"inlineData": {}}]}]}, "contents[0].parts[0]"),
        ({"contents": [{"parts": [{"functionResponse": {"name": "f"}}]}]}, "contents[0].parts[0]"),
        ({"contents": [{"parts": [{"functionCall": {"name": "f"}}]}]}, "contents[0].parts[0]"),
        ({"contents": [{"role": "bot", "parts": [{"text": "a"}]}]}, "contents[0].role"),
        ({"contents": [{"role": "system", "parts": [{"text": "a"}]}]}, "contents[0].role"),
        ({"generationConfig": {"topP": 0.1, "top_p": 0.1}}, "generationConfig.top_p"),
        ({"generationConfig": {"topQ": 0.1}}, "generationConfig.topQ"),
        ({"generationConfig": {"temperature": 3}}, "generationConfig.temperature"),
        ({"generation_config": {"candidateCount": 0}}, "generation_config.candidateCount"),
        ({"generationConfig": {"candidate_count": 0}}, "generationConfig.candidate_count"),
        ({"contents": [{"role": "user"}]}, "contents[0].parts"),
        ({"generationConfig": {"logprobs": 3}}, "generationConfig.logprobs"),
        (
            {"generationConfig": {"responseSchema": {"type": "STRING"}}},
            "generationConfig.responseMimeType",
        ),
        ({"generationConfig": {"responseFormat": [{"audio": {}}]}}, FORMAT + "[0].audio"),
        ({"generationConfig": {"responseFormat": [{}, {}]}}, FORMAT),
        (
            {
                "generationConfig": {
                    "responseFormat": [{"text": {}}],
                    "responseMimeType": "application/json",
                }
            },
            FORMAT,
        ),
        (
            {
                "generationConfig": {
                    "responseFormat": [{"text": {"mimeType": "text/plain", "schema": {}}}]
                }
            },
            FORMAT + "[0].text.mimeType",
        ),
        (
            result_with(parts=[{"inlineData": {}}]),
            "contents[2].parts[0].functionResponse.parts",
        ),
        ({"tools": [{"googleSearch": {}}]}, "tools[0].googleSearch"),
        (
            {
                "tools": [
                    {"functionDeclarations": [{"name": f"{half}{one}"} for one in range(257)]}
                    for half in "ab"
                ]
            },
            "tools",
        ),
        (
            {"tools": [{"functionDeclarations": [{"name": "f\n"}]}]},
            "tools[0].functionDeclarations[0].name",
        ),
        (
            {
                "tools": [
                    {"functionDeclarations": [{"name": "f", "parameters": {"type": "STRING"}}]}
                ]
            },
            "tools[0].functionDeclarations[0].parameters",
        ),
        (
            {"tools": [WEATHER, WEATHER]},
            "tools[1].functionDeclarations[0]",
        ),
        (
            {"toolConfig": {"functionCallingConfig": {"allowedFunctionNames": ["f"]}}},
            "toolConfig.functionCallingConfig.allowedFunctionNames",
        ),
        ({"cachedContent": "x", "tools": [WEATHER]}, "cachedContent"),
        ({"cachedContent": "x", "systemInstruction": "Be brief"}, "cachedContent"),
        ({"nonsense": 1}, "nonsense"),
    ],
)
def test_refuses_unsupported_field_with_path(fields: dict[str, Any], param: str) -> None:
    """An ignored field would look honoured."""
    assert refused(**fields).param == param


@pytest.mark.parametrize(
    ("action", "code", "says"),
    [
        ("embedContent", "not_served", "POST /v1/embeddings"),
        ("batchEmbedContents", "not_served", "POST /v1/embeddings"),
        ("batchGenerateContent", "not_served", "one by one"),
        ("predict", "not_served", "generates text"),
        ("generate", "not_found", "expected generateContent"),
    ],
)
def test_a_method_that_is_not_served_says_so(action: str, code: str, says: str) -> None:
    """Google's own are no typing errors: the message names what serves instead."""
    with pytest.raises(Refusal, match=says) as raised:
        structs.replace(GEMINI, action=action).parse()

    assert (raised.value.kind, raised.value.code) == (Kind.NOT_FOUND, code)


def test_counting_accepts_contents_or_a_full_request() -> None:
    """The SDK sends contents, REST clients a full request."""
    counting = structs.replace(GEMINI, action="countTokens")
    short = counting.parse()
    body = {"generateContentRequest": {"model": "models/m", **GEMINI.smallest}}
    long = counting.parse_body(json.dumps(body).encode())

    assert short.operation == long.operation == "count"
    assert short.prompts == long.prompts
    assert json.loads(GEMINI.dialect.count_body(7, 0)) == {"totalTokens": 7}
    assert json.loads(GEMINI.dialect.count_body(7, 3)) == {
        "totalTokens": 7,
        "cachedContentTokenCount": 3,
    }
