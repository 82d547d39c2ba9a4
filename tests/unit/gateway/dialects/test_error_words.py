"""Words that clients look for in an error: frameworks decide by them, beside status and code."""

from __future__ import annotations

import json

import pytest

from gateway.dialects.anthropic import messages as anthropic
from gateway.dialects.gemini import generate_content as gemini
from gateway.dialects.openai import chat as openai_chat
from gateway.dialects.openai import completions as openai_completions
from gateway.dialects.openai import responses as openai_responses
from gateway.dialects.protocol import Dialect
from gateway.errors import TOO_LONG, Kind, Refusal

DETAIL = "This model's maximum context length is 64 tokens, and so on."
OPENAI = "Input tokens exceed the configured limit of 64 tokens"
WORDS: list[tuple[Dialect, str]] = [
    (openai_chat.DIALECT, OPENAI),
    (openai_completions.DIALECT, OPENAI),
    (openai_responses.DIALECT, OPENAI),
    (anthropic.DIALECT, "prompt is too long: 65 tokens > 64 maximum"),
    (gemini.DIALECT, "input token count (65) exceeds the maximum number of tokens allowed (64)"),
]


def message(dialect: Dialect, refusal: Refusal) -> str:
    """Return the message of an error body."""
    _, body = dialect.error_body(refusal, "r1")
    found: str = json.loads(body)["error"]["message"]
    return found


@pytest.mark.parametrize(("dialect", "words"), WORDS)
def test_a_too_long_request_says_what_clients_look_for(dialect: Dialect, words: str) -> None:
    """Fallbacks to larger models, trimming and summaries start by these words."""
    refusal = Refusal(Kind.BAD, TOO_LONG, DETAIL, size=(65, 64))

    assert words in message(dialect, refusal)
    assert message(dialect, refusal).endswith(DETAIL)


@pytest.mark.parametrize(("dialect", "words"), WORDS)
def test_the_words_stay_without_a_known_size(dialect: Dialect, words: str) -> None:
    """The engine's own refusal has no counts."""
    start = words.split("(")[0].split(":")[0].removesuffix(" of 64 tokens")
    refusal = Refusal(Kind.BAD, TOO_LONG, DETAIL)

    assert start.strip() in message(dialect, refusal)


def test_other_errors_keep_their_words() -> None:
    """Only a request that is too long has words of its dialect."""
    refusal = Refusal(Kind.BAD, "invalid_value", "temperature: too high.")

    assert {message(dialect, refusal) for dialect, _ in WORDS} == {"temperature: too high."}
