"""Gemini's dialect: what comes in, what goes out, and what is refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest
from google.genai import types
from hypothesis import given
from hypothesis import strategies as st

from engine.api import Sampling
from gateway.dialects.canonical import (
    Asked,
    Begin,
    Call,
    CallText,
    ChoiceEnd,
    Delta,
    End,
    Generation,
    OutputFormat,
    Prompt,
    Reply,
    Text,
    TokenText,
    ToolChoice,
    UsageRecord,
)
from gateway.dialects.gemini import ARRAY_DIALECT, DIALECT, GeminiDialect
from gateway.errors import Kind, Refusal
from tests.gateway.transcripts import REPLY, SCRIPT, check_golden

GENERATE = Asked("m", "generateContent")
USAGE = UsageRecord(20, {"resource": 8}, {}, 12, 5, 8)
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


def hi(**fields: Any) -> dict[str, Any]:
    return {"contents": [{"parts": [{"text": "hi"}]}], **fields}


def parse(body: dict[str, Any], asked: Asked = GENERATE) -> Call:
    return DIALECT.parse(json.dumps(body).encode(), asked)


def refused(body: dict[str, Any], asked: Asked = GENERATE) -> Refusal:
    with pytest.raises(Refusal) as caught:
        parse(body, asked)
    return caught.value


def encode(deltas: list[Delta], **settings: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """(chunks of the stream, the unary answer) of the same deltas."""
    call = Call("m", (Prompt(),), Generation(**settings))
    reply = Reply("id", "m", 7)
    streamed, folded = DIALECT.encoder(call, reply), DIALECT.encoder(call, reply)
    data = b"".join(map(streamed.stream, deltas)) + streamed.close()
    lines = [line for line in data.split(b"\n") if line]
    assert all(line.startswith(b"data: ") for line in lines)
    return [json.loads(line[6:]) for line in lines], json.loads(folded.unary(deltas))


def test_a_request_is_its_contents_in_order() -> None:
    """The system instruction first, then each content as a message of its own."""
    call = parse(
        hi(
            systemInstruction={"parts": [{"text": "Be brief"}], "role": "user"},
            contents=[
                {"role": "user", "parts": [{"text": "a"}, {"text": "b"}]},
                {"role": "model", "parts": [{"text": "c"}]},
                {"parts": [{"text": "d"}]},
            ],
        )
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


def test_neighbouring_contents_of_the_models_are_one_message() -> None:
    """The SDK's chats send each chunk of an earlier stream back as a content of its own; apart,
    they would be other tokens than those that were cached."""
    asked = {"role": "user", "parts": [{"text": "?"}]}
    called = {"functionCall": {"name": "weather", "args": {}}}
    result = {"functionResponse": {"name": "weather", "response": {}}}

    def contents(*said: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [asked, *({"role": "model", "parts": parts} for parts in said)]

    whole, chunks, apart = (
        parse(hi(contents=[*made, {"role": "user", "parts": [result]}, asked, asked]))
        for made in (
            contents([{"text": "Let me see."}, called]),
            contents([{"text": "Let me "}], [{"text": "see"}], [{"text": "."}], [called]),
            contents([{"text": "Let me "}, {"text": "see."}], [called]),
        )
    )

    def told(call: Call) -> list[tuple[str, str, int]]:
        return [(part.role, part.text, part.message) for part in call.prompts[0].segments]

    assert told(chunks) == told(whole)
    assert [part[1:] for part in told(apart)][1:3] == [("Let me ", 1), ("see.", 1)]
    assert [part[2] for part in told(whole)] == [0, 1, 1, 2, 3, 4]


def test_what_was_streamed_may_come_back_in_as_many_contents_as_tokens() -> None:
    """A chat's history is a content for each chunk: 10,000 of them are a few pages."""
    chunk = {"role": "model", "parts": [{"text": "x"}]}
    call = parse(hi(contents=[chunk] * 12_000))
    many = refused(hi(contents=[chunk] * 25_001))
    odd = refused(hi(contents=[chunk, {"role": "model", "parts": [{"text": "x", "texts": "y"}]}]))

    assert call.prompts[0].segments[0].text == "x" * 12_000
    assert (many.param, "25000" in many.message) == ("contents", True)
    assert odd.param == "contents[1].parts[0].texts"


def test_both_spellings_say_the_same() -> None:
    """The SDK itself mixes them in one body."""
    camel = parse(
        hi(
            generationConfig={"maxOutputTokens": 5, "topP": 0.5, "responseMimeType": "text/plain"},
            toolConfig={"functionCallingConfig": {"allowedFunctionNames": ["weather"]}},
            tools=[WEATHER],
        )
    )
    snake = parse(
        hi(
            generation_config={
                "max_output_tokens": 5,
                "top_p": 0.5,
                "response_mime_type": "text/plain",
            },
            tool_config={"function_calling_config": {"allowed_function_names": ["weather"]}},
            tools=[{"function_declarations": WEATHER["functionDeclarations"]}],
        )
    )

    assert camel == snake
    assert camel.generation.max_tokens == 5
    assert camel.prompts[0].tool_choice == ToolChoice("auto", ("weather",))


def test_null_in_one_spelling_leaves_the_other() -> None:
    """Null is the same as leaving a field out, whichever comes first."""
    first = parse(hi(systemInstruction=None, system_instruction="Be brief"))
    last = parse(hi(system_instruction="Be brief", systemInstruction=None))

    assert first == last
    assert first.prompts[0].segments[0].text == "Be brief"


def test_a_callers_own_data_keeps_its_spelling() -> None:
    """Arguments, responses and schemas are data: their keys are nobody's to change."""
    call = parse(
        hi(
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
            tools=[
                {"functionDeclarations": [{"name": "weather", "parametersJsonSchema": {"aB": 1}}]}
            ],
        )
    )

    _, asks, tells = call.prompts[0].segments
    assert asks.call is not None
    assert asks.call.arguments == '{"cityName":"B"}'
    assert (tells.role, tells.text, tells.answers) == ("tool", '{"tempC":3}', asks.call.call_id)
    assert call.prompts[0].tools[0].parameters == '{"aB":1}'


@pytest.mark.parametrize("role", ["user", "function", "tool", ""])
def test_results_of_calls_come_in_whichever_role(role: str) -> None:
    """The SDK's own example of a call by hand says `tool`, its automatic calling `user`."""
    call = parse(
        hi(
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
    )

    assert [part.role for part in call.prompts[0].segments] == ["user", "assistant", "tool"]
    assert call.prompts[0].output_format.schema == '{"type":"object"}'


def test_settings_become_the_engines() -> None:
    """Each in its own place."""
    call = parse(
        hi(
            generationConfig={
                "temperature": 0.5,
                "topK": 40.0,
                "seed": 3,
                "candidateCount": 2,
                "stopSequences": ["END"],
                "responseLogprobs": True,
                "logprobs": 2,
            }
        ),
        Asked("org/m", "streamGenerateContent"),
    )

    assert call.model == "org/m"
    assert call.stream
    assert call.generation.sampling == Sampling(temperature=0.5, top_k=40, seed=3, logprobs=2)
    assert (call.generation.choices, call.generation.stop) == (2, ("END",))
    assert call.generation.choices_field == "generationConfig.candidateCount"


def test_json_is_asked_for_by_mime_type_and_schema() -> None:
    """With a schema in either form, or without."""
    plain = parse(hi(generationConfig={"responseMimeType": "application/json"}))
    schema = parse(
        hi(
            generationConfig={
                "responseMimeType": "application/json",
                "responseSchema": {"type": "ARRAY", "items": {"type": "INTEGER"}},
            }
        )
    )
    newer = parse(
        hi(
            generationConfig={
                "responseMimeType": "application/json",
                "responseJsonSchema": {"type": "array"},
            }
        )
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


def test_a_begun_answer_is_continued() -> None:
    """The last content is the model's: it goes on where it stops."""
    call = parse(
        hi(contents=[{"parts": [{"text": "a"}]}, {"role": "model", "parts": [{"text": "b"}]}])
    )

    assert call.prompts[0].continues
    assert not call.prompts[0].add_generation_prompt


def test_cached_content_is_named_with_or_without_its_collection() -> None:
    """As the SDK does."""
    names = [
        parse(hi(cachedContent=name)).prompts[0].resource for name in ("x", "cachedContents/x")
    ]

    assert names == ["cachedContents/x"] * 2


@pytest.mark.parametrize(
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
        ({"generationConfig": {"temperature": 3}}, "generation_config.temperature"),
        ({"generationConfig": {"logprobs": 3}}, "generationConfig.logprobs"),
        (
            {"generationConfig": {"responseSchema": {"type": "STRING"}}},
            "generationConfig.responseMimeType",
        ),
        ({"tools": [{"googleSearch": {}}]}, "tools[0].googleSearch"),
        (
            {"tools": [{"functionDeclarations": [{"name": "f\n"}]}]},
            "tools[0].function_declarations[0].name",
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
def test_what_cannot_be_is_refused_by_its_path(fields: dict[str, Any], param: str) -> None:
    """Silence would look like an answer."""
    refusal = refused(hi(**fields))

    assert (refusal.kind, refusal.param) == (Kind.BAD, param)


def test_an_unknown_method_is_not_found() -> None:
    """`:embedContent` and the like are nobody's here."""
    assert refused(hi(), Asked("m", "embedContent")).kind is Kind.NOT_FOUND


def test_counting_takes_the_contents_or_a_whole_request() -> None:
    """The SDK sends the one, REST clients the other."""
    action = Asked("m", "countTokens")
    short = parse(hi(), action)
    long = parse({"generateContentRequest": {"model": "models/m", **hi()}}, action)

    assert short.operation == long.operation == "count"
    assert short.prompts == long.prompts
    assert json.loads(DIALECT.count_body(7, 0)) == {"totalTokens": 7}
    assert json.loads(DIALECT.count_body(7, 3)) == {"totalTokens": 7, "cachedContentTokenCount": 3}


def test_an_error_is_googles_with_its_details() -> None:
    """`error` is the first key, its code a number, and when to try again a detail."""
    status, body = DIALECT.error_body(
        Refusal(Kind.BUSY, "overloaded", "Busy.", retry_after_s=3), "id"
    )
    error = json.loads(body)["error"]

    assert (status, error["code"], error["status"]) == (503, 503, "UNAVAILABLE")
    assert error["details"][-1]["retryDelay"] == "3s"


TEXT: list[Delta] = [
    Begin(USAGE),
    Text(0, "Hel"),
    Text(0, "lo"),
    ChoiceEnd(0, "stop"),
    End(USAGE),
]


def test_text_comes_in_pieces_and_the_last_chunk_says_why_it_ends() -> None:
    """Usage is in every chunk; the last is the truth."""
    chunks, whole = encode(TEXT)

    assert [c["candidates"][0]["content"]["parts"] for c in chunks] == [
        [{"text": "Hel"}],
        [{"text": "lo"}],
        [{"text": ""}],
    ]
    assert [c["candidates"][0].get("finishReason") for c in chunks] == [None, None, "STOP"]
    assert whole["candidates"][0]["content"]["parts"] == [{"text": "Hello"}]
    assert whole["usageMetadata"] == {
        "promptTokenCount": 20,
        "cachedContentTokenCount": 8,
        "candidatesTokenCount": 5,
        "totalTokenCount": 25,
        "promptTokensDetails": [{"modality": "TEXT", "tokenCount": 20}],
        "cacheTokensDetails": [{"modality": "TEXT", "tokenCount": 8}],
    }


def test_calls_come_whole_in_order_and_finish_with_stop() -> None:
    """Pieces of arguments are nothing to this client."""
    deltas: list[Delta] = [
        Begin(USAGE),
        CallText(0, 0, "c0", "weather", '{"city":'),
        CallText(0, 0, arguments='"Bern"}'),
        CallText(0, 1, "c1", "weather", "{}"),
        ChoiceEnd(0, "tool_calls"),
        End(USAGE),
    ]

    chunks, whole = encode(deltas)

    parts = [part for c in chunks for part in c["candidates"][0]["content"]["parts"]]
    assert parts == [
        {"functionCall": {"id": "c0", "name": "weather", "args": {"city": "Bern"}}},
        {"functionCall": {"id": "c1", "name": "weather", "args": {}}},
    ]
    assert whole["candidates"][0]["content"]["parts"] == parts
    assert chunks[-1]["candidates"][0]["finishReason"] == "STOP"


def test_only_an_answer_that_says_nothing_has_a_chunk_without_parts() -> None:
    """The SDK's chats take a turn with such a chunk for invalid, and forget it."""
    calls: list[Delta] = [
        Begin(USAGE),
        Text(0, "Well."),
        CallText(0, 0, "c0", "weather", "{}"),
        ChoiceEnd(0, "tool_calls"),
        End(USAGE),
    ]
    cut: list[Delta] = [
        *calls[:3],
        CallText(0, 1, "c1", "weather", '{"city":'),
        ChoiceEnd(0, "length"),
        End(USAGE),
    ]

    silent = encode([Begin(USAGE), ChoiceEnd(0, "stop"), End(USAGE)])
    found = [encode(deltas) for deltas in (TEXT, calls, cut)]

    assert [_parts_of(chunk) for chunk in silent[0]] == [[]]
    assert all(_parts_of(chunk) for chunks, _ in found for chunk in chunks)
    assert _parts_of(found[1][0][-1])[0]["functionCall"]["id"] == "c0"
    assert [list(part) for part in _parts_of(found[2][1])] == [["text"], ["functionCall"]]


def _parts_of(chunk: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = chunk["candidates"][0]["content"]["parts"]
    return found


def test_a_broken_call_is_said_to_be_one() -> None:
    """Arguments that were cut are never handed on as if they were whole."""
    deltas: list[Delta] = [
        Begin(USAGE),
        CallText(0, 0, "c0", "weather", '{"city":'),
        ChoiceEnd(0, "length"),
        End(USAGE),
    ]

    chunks, _ = encode(deltas)

    assert chunks[-1]["candidates"][0]["finishReason"] == "MALFORMED_FUNCTION_CALL"


def test_logprobs_come_with_the_end() -> None:
    """Chosen tokens with their alternatives, and the mean."""
    token = TokenText(5, b"Hi", -0.5, (TokenText(5, b"Hi", -0.5), TokenText(6, b"Ho", -1.5)))
    deltas: list[Delta] = [
        Begin(USAGE),
        Text(0, "Hi", (token,)),
        ChoiceEnd(0, "length"),
        End(USAGE),
    ]

    _, whole = encode(deltas, sampling=Sampling(logprobs=2))

    last = whole["candidates"][0]
    assert last["finishReason"] == "MAX_TOKENS"
    assert last["avgLogprobs"] == -0.5
    assert [t["tokenId"] for t in last["logprobsResult"]["topCandidates"][0]["candidates"]] == [
        5,
        6,
    ]


def test_without_sse_a_stream_is_one_array() -> None:
    """What REST clients read that did not ask for events."""
    encoder = ARRAY_DIALECT.encoder(Call("m", (Prompt(),), Generation()), Reply("id", "m", 7))
    data = b"".join(map(encoder.stream, TEXT)) + encoder.close()

    assert len(json.loads(data)) == 3


def test_an_answer_that_breaks_off_is_an_error_chunk() -> None:
    """Within a stream, and within an array, which stays one."""
    refusal = Refusal(Kind.INTERNAL, "internal_error", "Broken.")
    call, reply = Call("m", (Prompt(),), Generation()), Reply("id", "m", 7)
    events = DIALECT.encoder(call, reply).error_event(refusal)
    array = ARRAY_DIALECT.encoder(call, reply)
    data = b"".join(map(array.stream, TEXT[:2])) + array.error_event(refusal)

    assert events.startswith(b'data: {"error":{"code":500')
    assert json.loads(data)[-1]["error"]["status"] == "INTERNAL"


WHOLE: list[Delta] = [
    *SCRIPT[:-3],
    CallText(0, 0, "c0", "weather", '{"city":"B'),
    CallText(0, 0, arguments='ern"}'),
    *SCRIPT[-3:],
]
"""The script of every dialect, with a call."""


@pytest.mark.parametrize(
    ("name", "dialect"),
    [("gemini_stream.txt", DIALECT), ("gemini_array.json", ARRAY_DIALECT)],
)
def test_a_stream_is_the_transcript_to_the_byte(name: str, dialect: GeminiDialect) -> None:
    """What goes over the wire is a contract; a change of it is seen here."""
    settings = Generation(choices=2, samples=2, sampling=Sampling(logprobs=1))
    encoder = dialect.encoder(Call("smollm2", (Prompt(),), settings), REPLY)

    check_golden(name, b"".join(map(encoder.stream, WHOLE)) + encoder.close())


def test_a_unary_answer_is_the_transcript_to_the_byte() -> None:
    """The same deltas, gathered."""
    settings = Generation(choices=2, samples=2, sampling=Sampling(logprobs=1))
    encoder = DIALECT.encoder(Call("smollm2", (Prompt(),), settings), REPLY)

    check_golden("gemini_unary.json", encoder.unary(WHOLE))


PIECES = st.lists(st.text("ab{}\n\u00e4", min_size=1, max_size=5), max_size=6)


@given(PIECES, st.sampled_from(["stop", "length"]))
def test_the_unary_answer_is_the_fold_of_the_stream(pieces: list[str], reason: Any) -> None:
    """And both are what the SDK's own types read."""
    deltas: list[Delta] = [Begin(USAGE), *(Text(0, piece) for piece in pieces)]
    deltas += [ChoiceEnd(0, reason), End(USAGE)]

    chunks, whole = encode(deltas)

    read = [types.GenerateContentResponse.model_validate(chunk) for chunk in chunks]
    text = "".join(
        part.text or ""
        for chunk in read
        for candidate in chunk.candidates or []
        for part in (candidate.content and candidate.content.parts) or []
    )
    folded = types.GenerateContentResponse.model_validate(whole)
    assert text == "".join(pieces) == (folded.text or "")
    assert whole["usageMetadata"] == chunks[-1]["usageMetadata"]
