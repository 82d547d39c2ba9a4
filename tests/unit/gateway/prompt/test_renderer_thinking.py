"""Thinking in prompts: switches, thoughts of earlier answers, and whether the answer thinks."""

from __future__ import annotations

import pytest

from engine.model_store import ModelCard
from gateway.dialects.canonical import OutputFormat, Prompt, Role, Segment, Thinking
from gateway.prompt import Renderer
from tests.unit.gateway.prompt import chat_templates
from tests.unit.gateway.prompt.chat_templates import text_of


@pytest.fixture(scope="session")
def thinker(card: ModelCard, tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    """Return the tiny model with a template that thinks between tags."""
    folder = tmp_path_factory.mktemp("template")
    return chat_templates.with_template(card, chat_templates.THINKING, folder)


def said(role: Role, text: str, message: int, *, is_thought: bool = False) -> Segment:
    """Return a segment with its own path."""
    path = f"messages[{message}].{'thought' if is_thought else 'content'}"
    return Segment(role, text, path, None, message, is_thought=is_thought)


QUESTION = (said("user", "hi", 0),)
HISTORY = (
    *QUESTION,
    said("assistant", "let me see", 1, is_thought=True),
    said("assistant", "Hello.", 1),
    said("user", "and now?", 2),
)


@pytest.mark.parametrize(
    ("wanted", "end", "thought"),
    [
        (Thinking(), "assistant\n", "possible"),
        (Thinking(is_on=True), "assistant\n<think>\n", "open"),
        (Thinking(effort="none"), "<think>\n\n</think>\n\n", ""),
    ],
)
@pytest.mark.parametrize("segments", [QUESTION, HISTORY], ids=["shape", "whole"])
def test_switch_reaches_the_template(
    thinker: Renderer, segments: tuple[Segment, ...], wanted: Thinking, end: str, thought: str
) -> None:
    """The prompt's end says whether the answer begins inside a thought."""
    rendered = thinker.render(Prompt(segments, thinking=wanted))

    assert text_of(thinker, rendered.token_ids).endswith(end)
    assert rendered.thought == thought


def test_prompts_with_different_switches_do_not_share_a_shape(thinker: Renderer) -> None:
    """The shape cache would otherwise answer with the first one's end."""
    prompts = [Prompt(QUESTION, thinking=Thinking(is_on=on)) for on in (True, False, True)]
    first, other, again = (text_of(thinker, thinker.render(prompt).token_ids) for prompt in prompts)

    assert first == again != other


def test_earlier_thoughts_are_dropped_where_the_template_drops_them(thinker: Renderer) -> None:
    """So the next turn's prompt begins with the last turn's, up to its answer."""
    before = thinker.render(Prompt(QUESTION)).token_ids
    after = thinker.render(Prompt(HISTORY))

    assert "let me see" not in text_of(thinker, after.token_ids)
    assert after.token_ids[: len(before)] == before
    paths = [boundary.path for boundary in after.boundaries]
    assert paths == [segment.path for segment in HISTORY]
    ends = [boundary.tokens for boundary in after.boundaries]
    assert ends == sorted(ends)


def test_last_thought_is_kept_where_the_template_keeps_it(thinker: Renderer) -> None:
    """The thought of the answer that is continued or judged stands before it."""
    text = text_of(
        thinker, thinker.render(Prompt(HISTORY[:3], add_generation_prompt=False)).token_ids
    )

    assert "<think>\nlet me see\n</think>\n\nHello." in text


def test_thoughts_cost_a_model_that_does_not_think_nothing(card: ModelCard) -> None:
    """The prompt is that of the same chat without them, and so are its boundaries."""
    renderer = Renderer(card)
    plain = tuple(segment for segment in HISTORY if not segment.is_thought)

    assert renderer.render(Prompt(HISTORY, thinking=Thinking(is_on=True))) == renderer.render(
        Prompt(plain)
    )


def test_format_waits_for_the_thought(thinker: Renderer) -> None:
    """The grammar of a schema becomes one that begins behind the thought."""
    form = OutputFormat("json_object")
    thinking = thinker.render(Prompt(QUESTION, output_format=form, thinking=Thinking(is_on=True)))
    direct = thinker.render(Prompt(QUESTION, output_format=form, thinking=Thinking(is_on=False)))

    assert thinking.grammar is not None
    assert thinking.grammar.kind == "lark"
    assert direct.grammar is not None
    assert direct.grammar.kind == "json_object"


def test_raw_prompts_do_not_think(thinker: Renderer) -> None:
    """Only the template opens a thought."""
    assert thinker.render(Prompt(text="<think>")).thought == ""
    assert thinker.render(Prompt(HISTORY[:3], continues=True)).thought == ""
