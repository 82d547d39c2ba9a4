"""Parts of Google's own tools in Gemini's histories, and inline data that is a text."""

from __future__ import annotations

from typing import Any

import pytest
from google.genai import types

from gateway.dialects.gemini import wire
from gateway.errors import Refusal
from tests.unit.gateway.dialects.requests import GEMINI

CODE = {"executableCode": {"language": "PYTHON", "code": "print(1)"}}
OUTPUT = {"codeExecutionResult": {"outcome": "OUTCOME_OK", "output": "1\n"}}
SEARCH = {"toolCall": {"toolType": "GOOGLE_SEARCH_WEB", "args": {"q": "rain"}, "id": "s"}}
FOUND = {"toolResponse": {"toolType": "GOOGLE_SEARCH_WEB", "response": {"n": 1}, "id": "s"}}
NOTES = {
    *("media_resolution", "video_metadata", "thought_signature", "part_metadata", "thought"),
    *("audio_transcription", "media_processing", "speech_metadata", "document_metadata"),
    *("spreadsheet_metadata", "audio_metadata"),
}
"""Fields of the SDK's part that describe its data."""


def contents_with(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    hello = {"role": "user", "parts": [{"text": "hi"}]}
    return [hello, {"role": "model", "parts": list(parts)}, hello]


def told(*parts: dict[str, Any]) -> list[tuple[str, str]]:
    """Return what the model is told of a turn's parts: calls as `name arguments`."""
    (prompt,) = GEMINI.parse(contents=contents_with(*parts)).prompts
    return [
        (one.role, one.text if one.call is None else f"{one.call.name} {one.call.arguments}")
        for one in prompt.segments[1:-1]
    ]


def test_every_kind_of_data_of_the_sdks_part_is_known() -> None:
    assert types.Part.model_fields.keys() - NOTES <= set(wire.Part.__struct_fields__)


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        (
            [CODE, OUTPUT],
            [
                ("assistant", 'code_execution {"code":"print(1)"}'),
                ("tool", '{"output":"1\\n"}'),
            ],
        ),
        (
            [CODE, {"codeExecutionResult": {"outcome": "OUTCOME_FAILED", "output": "no"}}],
            [("assistant", 'code_execution {"code":"print(1)"}'), ("tool", '{"error":"no"}')],
        ),
        (
            [SEARCH, FOUND],
            [("assistant", 'google_search_web {"q":"rain"}'), ("tool", '{"n":1}')],
        ),
    ],
)
def test_what_googles_tools_did_is_told_as_calls(parts: Any, expected: Any) -> None:
    """Between the texts of the same turn, in order."""
    before, behind = {"text": "I look."}, {"text": "It is 1."}

    found = told(before, *parts, behind)

    assert found == [("assistant", "I look."), *expected, ("assistant", "It is 1.")]


@pytest.mark.parametrize("part", [CODE, OUTPUT, SEARCH, FOUND])
def test_the_strict_mode_refuses_them(part: dict[str, Any]) -> None:
    refusal = GEMINI.refused("strict", contents=contents_with(part))

    assert (refusal.code, refusal.param) == ("unsupported_parameter", "contents[1].parts[0]")


def test_a_result_without_its_code_is_refused() -> None:
    with pytest.raises(Refusal, match="no functionCall of 'code_execution' precedes"):
        told(OUTPUT)


@pytest.mark.parametrize("data", ["w6kgPz8_", "w6kgPz8/", "w6k", "w6k="])
def test_inline_data_that_is_a_text_is_read(data: str) -> None:
    """Base64 of either alphabet, with or without its padding."""
    part = {"inlineData": {"mimeType": "text/plain", "data": data}}

    assert told(part)[0][1].startswith("é")
    assert GEMINI.refused("strict", contents=contents_with(part)).param == "contents[1].parts[0]"


@pytest.mark.parametrize(
    ("mime_type", "data"),
    [("image/png", "aGk="), ("text/plain", "/w=="), ("text/plain", "a"), ("text/plain", "h!i=")],
)
def test_inline_data_that_is_no_text_is_refused(mime_type: str, data: str) -> None:
    with pytest.raises(Refusal, match="inlineData is not supported: the model reads only text"):
        told({"inlineData": {"mimeType": mime_type, "data": data}})
