"""The default model with functions: a forced call exists, and its arguments satisfy its schema.

From a canonical prompt through the renderer, the whole engine under the grammar, and back through
the tool call parser. Needs the model on disk (`make pull`); `make test` runs that first.
"""

from __future__ import annotations

import itertools
import json

import pytest
from msgspec.structs import replace

from engine.api import CacheGrant, Request, Sampling
from engine.core.core import Core
from engine.model_store import ModelCard
from gateway.dialects.canonical import OutputFormat, Prompt, Segment, Tool, ToolChoice
from gateway.prompt import Renderer
from gateway.structured_output.output_check import satisfies
from gateway.structured_output.tool_call_parser import ParsedCall, ToolCallParser
from tests.e2e.real_core import run_samples

pytestmark = [pytest.mark.model, pytest.mark.slow]

WEATHER = json.dumps(
    {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 20},
            "days": {"type": "integer", "minimum": 1, "maximum": 7},
            "unit": {"enum": ["celsius", "fahrenheit"]},
        },
        "required": ["city", "days", "unit"],
        "additionalProperties": False,
    }
)
TOOLS = (
    Tool("get_weather", "The weather of a city", WEATHER, "tools[0]", strict=True),
    Tool("get_time", "The time in a city", '{"type":"object","properties":{}}', "tools[1]"),
)


@pytest.fixture(scope="module")
def renderer(default_card: ModelCard) -> Renderer:
    return Renderer(default_card)


def answers(
    core: Core, renderer: Renderer, prompt: Prompt, sampling: Sampling, samples: int = 1
) -> list[tuple[str, list[tuple[str, str]], str]]:
    """Return each sample's text, calls (name, arguments) and finish reason."""
    asked = Segment("user", "What is the weather in Paris, in celsius?", "messages[0]")
    rendered = renderer.render(replace(prompt, segments=(asked,), tools=TOOLS))
    request = Request(
        request_id="r",
        tokens=rendered.token_ids,
        max_tokens=160,
        grant=CacheGrant(b"n"),
        sampling=sampling,
        samples=samples,
        stop_token_ids=renderer.card.stop_token_ids,
        grammar=rendered.grammar,
    )
    drawn, reasons = run_samples(core, request)
    return [(*parse_answer(renderer, ids), why) for ids, why in zip(drawn, reasons, strict=True)]


def parse_answer(renderer: Renderer, ids: list[int]) -> tuple[str, list[tuple[str, str]]]:
    """Return text and calls of an answer."""
    numbers = itertools.count()
    names = [tool.name for tool in TOOLS]
    reader = ToolCallParser(renderer.tool_style, names, lambda: str(next(numbers)))
    text = renderer.detokenizer(shows_markers=True)
    found = [piece for i in ids for piece in reader.push(text.push(i))]
    found += [*reader.push(text.finish()), *reader.finish()]
    calls: list[tuple[str, str]] = []
    for piece in found:
        if isinstance(piece, ParsedCall):
            calls[piece.call :] = [
                (piece.name, "") if piece.name else (calls[-1][0], calls[-1][1] + piece.arguments)
            ]
    return "".join(piece for piece in found if isinstance(piece, str)), calls


def test_named_function_is_called_once(default_core: Core, renderer: Renderer) -> None:
    """Greedily, with the arguments of its schema; the unconstrained model would not call it."""
    prompt = Prompt(tool_choice=ToolChoice("required", ("get_weather",)))
    ((text, calls, reason),) = answers(default_core, renderer, prompt, Sampling(temperature=0))

    assert (text, reason) == ("", "stop")
    ((name, arguments),) = calls
    assert name == "get_weather"
    assert satisfies(arguments, OutputFormat("json_schema", WEATHER))


def test_required_call_is_a_call_at_any_temperature(default_core: Core, renderer: Renderer) -> None:
    """At temperature 3 the unconstrained model is noise."""
    prompt = Prompt(tool_choice=ToolChoice("required", parallel=False))
    sampling = Sampling(temperature=3, seed=3)

    ended = [
        said for said in answers(default_core, renderer, prompt, sampling, 4) if said[2] == "stop"
    ]
    assert ended
    for text, calls, _ in ended:
        ((name, arguments),) = calls
        assert text == ""
        assert name == "get_time" or satisfies(arguments, OutputFormat("json_schema", WEATHER))


def test_strict_function_allows_text_before_a_call(default_core: Core, renderer: Renderer) -> None:
    ((text, calls, _),) = answers(default_core, renderer, Prompt(), Sampling(temperature=0))

    assert text
    assert calls == []
