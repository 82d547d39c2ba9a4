"""A template's tool style is detected from its source."""

from __future__ import annotations

from gateway.prompt.template import ChatTemplate
from gateway.structured_output.tool_styles import (
    FALLBACK,
    HERMES,
    LLAMA3,
    MISTRAL,
    ToolStyle,
    detect_style,
)
from tests.models import CHAT_TEMPLATE
from tests.tables import each_row
from tests.unit.gateway.prompt import chat_templates


@each_row(
    ("source", "style"),
    [
        (chat_templates.HERMES, HERMES),
        (chat_templates.LLAMA3, LLAMA3),
        (chat_templates.MISTRAL, MISTRAL),
        (CHAT_TEMPLATE, FALLBACK),
        ("{{ tools }}", HERMES),
        ("{# tools <tool_call> #}{{ messages }}", FALLBACK),
        ("{% set tools = 1 %}{{ tools }}", FALLBACK),
    ],
)
def test_detects_style_from_markers(source: str, style: ToolStyle) -> None:
    """A template without tools gets the fallback style."""
    assert detect_style(source, ChatTemplate(source).variables) == style


def test_mistral_call_ids_have_nine_characters() -> None:
    """Equal for a call and its result."""
    long = MISTRAL.call_id("call_0123456789")

    assert (len(long), long.isalnum()) == (9, True)
    assert long == MISTRAL.call_id("call_0123456789") != MISTRAL.call_id("call_1")
    assert MISTRAL.call_id("abcdefgh1") == "abcdefgh1"
    assert HERMES.call_id("call_0123456789") == "call_0123456789"
