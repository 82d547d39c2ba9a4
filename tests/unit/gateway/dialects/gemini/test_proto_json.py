"""Gemini's bodies as protobuf's JSON mapping reads them, and the order of properties."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.dialects.gemini.cached_contents import parse_create
from tests.tables import each_row
from tests.unit.gateway.dialects.requests import GEMINI

parse, refused = GEMINI.parse, GEMINI.refused

PART = {"text": "hi"}
USER = {"role": "user", "parts": [PART]}
DECLARED = {"name": "f", "parameters": {"type": "OBJECT", "properties": {"a": {"type": "STRING"}}}}
CALL = {"functionCall": {"name": "f", "args": {"n": "1"}}}
RESULT = {"functionResponse": {"name": "f", "response": {"n": 1.0}}}


CALLED = {"role": "model", "parts": [CALL]}


def answered(**fields: Any) -> dict[str, Any]:
    return {"parts": [{"functionResponse": {**RESULT["functionResponse"], **fields}}]}


def hosted_call(kind: Any) -> dict[str, Any]:
    return {"role": "model", "parts": [{"toolCall": {"toolType": kind, "args": {}}}]}


def hosted_response(kind: Any) -> dict[str, Any]:
    return {"role": "model", "parts": [{"toolResponse": {"toolType": kind, "response": {}}}]}


def config(**settings: Any) -> dict[str, Any]:
    return {"generationConfig": settings}


def answer_schema(**schema: Any) -> dict[str, Any]:
    return config(responseMimeType="application/json", responseSchema=schema)


@each_row(
    ("loose", "plain"),
    [
        ({"contents": {"role": "user", "parts": [PART]}}, {"contents": [USER]}),
        ({"contents": [{"role": "user", "parts": PART}]}, {"contents": [USER]}),
        ({"contents": {"parts": PART}}, {"contents": [USER]}),
        ({"system_instruction": {"parts": PART}}, {"systemInstruction": {"parts": [PART]}}),
        (
            {"tools": {"functionDeclarations": DECLARED}},
            {"tools": [{"functionDeclarations": [DECLARED]}]},
        ),
        (
            {"tools": {"function_declarations": [DECLARED]}},
            {"tools": [{"functionDeclarations": [DECLARED]}]},
        ),
        (
            {
                "tools": [{"functionDeclarations": [DECLARED]}],
                "toolConfig": {"functionCallingConfig": {"mode": 2, "allowedFunctionNames": "f"}},
            },
            {
                "tools": [{"functionDeclarations": [DECLARED]}],
                "toolConfig": {
                    "functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["f"]}
                },
            },
        ),
        (
            {"contents": [USER, {"role": "model", "parts": CALL}, {"parts": RESULT}]},
            {"contents": [USER, {"role": "model", "parts": [CALL]}, {"parts": [RESULT]}]},
        ),
        (config(maxOutputTokens="1"), config(maxOutputTokens=1)),
        (config(max_output_tokens=1.0), config(maxOutputTokens=1)),
        (config(maxOutputTokens=1e3), config(maxOutputTokens=1_000)),
        (config(topK="40", candidateCount=2.0), config(topK=40, candidateCount=2)),
        (config(temperature="0.5", topP="1"), config(temperature=0.5, topP=1)),
        (config(seed=str(2**62 + 1)), config(seed=2**62 + 1)),
        (config(responseLogprobs="true", logprobs="3"), config(responseLogprobs=True, logprobs=3)),
        (config(stopSequences="END"), config(stopSequences=["END"])),
        (config(responseModalities="TEXT"), config(responseModalities=["TEXT"])),
        (config(response_modalities=[1]), config(responseModalities=["TEXT"])),
        (
            config(thinkingConfig={"thinkingBudget": "0"}),
            config(thinkingConfig={"thinkingBudget": 0}),
        ),
        *(
            (config(thinkingConfig={"thinkingLevel": n}), config(thinkingConfig=level))
            for n, name in enumerate(("LOW", "MEDIUM", "HIGH", "MINIMAL"), 1)
            for level in ({"thinkingLevel": name}, {"thinking_level": str(n)})
        ),
        (config(thinkingConfig={"thinkingLevel": 0}), {}),
        (config(responseModalities=["Text"]), config(responseModalities=["TEXT"])),
        (
            {"toolConfig": {"functionCallingConfig": {"mode": "none"}}},
            {"toolConfig": {"functionCallingConfig": {"mode": "NONE"}}},
        ),
        (config(mediaResolution=3), config(mediaResolution="MEDIA_RESOLUTION_HIGH")),
        (config(mediaResolution=0), {}),
        ({"serviceTier": 1}, {"serviceTier": "standard"}),
        ({"serviceTier": 3}, {"serviceTier": "priority"}),
        (
            {"tools": [{"functionDeclarations": [{**DECLARED, "behavior": 1}]}]},
            {"tools": [{"functionDeclarations": [DECLARED]}]},
        ),
        (
            {"contents": [USER, hosted_call(3), hosted_response("3")]},
            {"contents": [USER, hosted_call("URL_CONTEXT"), hosted_response("URL_CONTEXT")]},
        ),
        (
            {"contents": [USER, CALLED, answered(scheduling=2, willContinue="false")]},
            {"contents": [USER, CALLED, answered()]},
        ),
        (
            {"contents": [USER, CALLED, answered(scheduling=3)]},
            {"contents": [USER, CALLED, answered(scheduling="INTERRUPT")]},
        ),
        (
            config(responseFormat={"text": {"mimeType": "APPLICATION_JSON"}}),
            config(responseMimeType="application/json"),
        ),
        (config(temperature=None, thinkingConfig=None, stopSequences=None), {}),
        ({"tools": None, "toolConfig": None, "safetySettings": None, "labels": None}, {}),
        (
            answer_schema(type=6, properties={"a": {"type": "1"}}, required="a"),
            answer_schema(type="OBJECT", properties={"a": {"type": "STRING"}}, required=["a"]),
        ),
        (
            answer_schema(type="INTEGER", minimum=str(-(2**63)), maximum=str(2**63 - 1)),
            answer_schema(type="INTEGER", minimum=-(2**63), maximum=2**63 - 1),
        ),
        (
            answer_schema(type="ARRAY", items={"type": "STRING", "enum": "a"}, maxItems=2.0),
            answer_schema(type="ARRAY", items={"type": "STRING", "enum": ["a"]}, maxItems=2),
        ),
        (
            answer_schema(type="OBJECT", properties=None, required=None, nullable="true"),
            answer_schema(type="OBJECT", nullable=True),
        ),
    ],
)
def test_a_value_is_read_as_protobuf_reads_it(loose: Any, plain: Any) -> None:
    """Google's endpoint takes these forms, and Google's own samples have some of them."""
    assert parse(**loose) == parse(**plain)


def test_cached_content_is_read_so_too() -> None:
    """The rule belongs to the decoder, not to an endpoint."""
    loose = {"model": "models/m", "contents": USER, "systemInstruction": {"parts": PART}}
    plain = {"model": "models/m", "contents": [USER], "systemInstruction": {"parts": [PART]}}

    bodies = [json.dumps(body).encode() for body in (loose, plain)]
    assert parse_create(bodies[0], 0) == parse_create(bodies[1], 0)


@each_row(
    ("fields", "param"),
    [
        (config(maxOutputTokens=1.5), "generationConfig.maxOutputTokens"),
        (config(maxOutputTokens="one"), "generationConfig.maxOutputTokens"),
        (config(topK="1.5"), "generationConfig.topK"),
        (config(temperature="warm"), "generationConfig.temperature"),
        (config(responseLogprobs="yes"), "generationConfig.responseLogprobs"),
        (
            {"toolConfig": {"functionCallingConfig": {"mode": 9}}},
            "toolConfig.functionCallingConfig.mode",
        ),
        ({"contents": "hi"}, "contents[0]"),
    ],
)
def test_what_protobuf_does_not_read_is_refused(fields: Any, param: str) -> None:
    """By the client's name of the field."""
    found = refused(**fields)

    assert found.param == param
    assert found.message.startswith(f"{param}: ")


ORDERED = {
    "type": "OBJECT",
    "properties": {
        "answer": {"type": "STRING"},
        "reason": {
            "type": "OBJECT",
            "properties": {"x": {"type": "STRING"}, "y": {"type": "STRING"}},
            "property_ordering": ["y", "x"],
        },
        "rest": {"type": "STRING"},
    },
    "propertyOrdering": ["reason", "answer"],
}


@pytest.mark.parametrize("name", ["responseSchema", "responseJsonSchema"])
def test_properties_have_the_order_that_the_schema_asks_for(name: str) -> None:
    """A model that reasons first answers better; nested orders hold too."""
    call = parse(**config(responseMimeType="application/json", **{name: ORDERED}))

    properties = json.loads(call.prompts[0].output_format.schema)["properties"]
    assert list(properties) == ["reason", "answer", "rest"]
    assert list(properties["reason"]["properties"]) == ["y", "x"]


@pytest.mark.parametrize("name", ["parameters", "parametersJsonSchema"])
def test_arguments_have_the_order_that_the_schema_asks_for(name: str) -> None:
    """As answers have."""
    call = parse(tools=[{"functionDeclarations": [{"name": "f", name: ORDERED}]}])

    parameters = json.loads(call.prompts[0].tools[0].parameters)
    assert list(parameters["properties"]) == ["reason", "answer", "rest"]
