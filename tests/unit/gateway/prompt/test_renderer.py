"""Messages to tokens: prefixes are stable, boundaries are exact, roles cannot be spoofed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.model_store import ModelCard
from gateway.dialects.canonical import Prompt, Rendered, Segment
from gateway.errors import Kind, Refusal
from gateway.prompt import Renderer
from gateway.prompt.template import ChatTemplate
from tests.examples import examples
from tests.models import CHAT_TEMPLATE
from tests.unit.gateway.prompt import chat_templates
from tests.unit.gateway.prompt.chat_templates import text_of, with_template

START, END = 1, 2
TRIMMING = CHAT_TEMPLATE.replace("message['content']", "message['content']|trim")
CUTTING = CHAT_TEMPLATE.replace("message['content']", "message['content'].split('</think>')[-1]")
NAMING = CHAT_TEMPLATE.replace("message['role']", "message.get('name', message['role'])")

Make = Callable[[str], Renderer]


@pytest.fixture(scope="session")
def make(card: ModelCard, tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Return a factory of the tiny model with another template."""

    return lambda template: with_template(card, template, tmp_path_factory.mktemp("template"))


@pytest.fixture(scope="session")
def trimming(make: Make) -> Renderer:
    """A renderer whose template trims contents."""
    return make(TRIMMING)


def chat(*texts: str, opens: bool = True) -> Prompt:
    """Return segments of user and assistant in alternation."""
    return Prompt(
        segments=tuple(
            Segment("assistant" if n % 2 else "user", text, f"messages[{n}]", None, n)
            for n, text in enumerate(texts)
        ),
        add_generation_prompt=opens,
    )


def test_tokens_spell_the_rendered_template(renderer: Renderer) -> None:
    """Special tokens only where the template has them."""
    rendered = renderer.render(chat("Hi", "Hello"))

    assert text_of(renderer, rendered.token_ids) == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert [rendered.token_ids.count(token) for token in (START, END)] == [3, 2]


def test_boundary_is_at_end_of_segment(renderer: Renderer) -> None:
    """Breakpoints are counted in tokens and named by path."""
    rendered = renderer.render(chat("Hi", "Hello"))

    ends = [Rendered(rendered.token_ids[: boundary.tokens]) for boundary in rendered.boundaries]
    assert [text_of(renderer, end.token_ids)[-5:] for end in ends] == ["er\nHi", "Hello"]
    assert [boundary.path for boundary in rendered.boundaries] == ["messages[0]", "messages[1]"]


def test_each_part_of_a_message_has_a_boundary(renderer: Renderer) -> None:
    """The text is joined; the tokens end where the parts do."""
    parts = [
        Segment("user", text, f"messages[0].content[{n}]") for n, text in enumerate(("th", "e"))
    ]
    rendered = renderer.render(Prompt(segments=tuple(parts), add_generation_prompt=False))

    assert text_of(renderer, rendered.token_ids) == "<|im_start|>user\nthe<|im_end|>\n"
    assert len(rendered.boundaries) == 2


CAPTURES = "{% set unused %}{% endset %}"
"""With it a template is rendered in full for each chat."""

LOOKING = (
    CHAT_TEMPLATE,
    TRIMMING,
    CUTTING,
    NAMING,
    chat_templates.LLAMA3,
    chat_templates.HERMES,
    CHAT_TEMPLATE.replace("message['content']", "message['content']|upper"),
    CHAT_TEMPLATE.replace("message['content']", "message['content']|length|string"),
    "{% for m in messages %}{% if m.content %}<{{ m.content }}>{% endif %}{% endfor %}",
    "{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}",
    "{% for m in messages[-1:] %}<{{ m.content }}>{% endfor %}",
    "{% for m in messages|reverse %}<{{ m.content }}>{% endfor %}",
)


@pytest.mark.parametrize("source", LOOKING)
def test_cached_shape_equals_full_rendering(make: Make, source: str) -> None:
    """Caching a template's behaviour changes no token."""
    quick, whole = make(source), make(source + CAPTURES)
    for texts in (["a", "b"], [" a\n", ""], ["", " "], ["x" * 40], ["a</think>b", "c", "the"]):
        for opens in (True, False):
            assert quick.render(chat(*texts, opens=opens)) == whole.render(
                chat(*texts, opens=opens)
            )


def counted_renderings(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that grows by one with each rendering."""
    runs: list[int] = []
    whole = ChatTemplate.render

    def counted(self: ChatTemplate, messages: Any, **variables: object) -> str:
        runs.append(1)
        return whole(self, messages, **variables)

    monkeypatch.setattr(ChatTemplate, "render", counted)
    return runs


def test_chats_of_one_shape_are_rendered_once(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names and roles are part of the shape."""
    renderer = make(NAMING)
    runs = counted_renderings(monkeypatch)
    for text in ("a", "b", "c"):
        renderer.render(chat(text))
    alike = len(runs)
    renderer.render(chat("a", "b"))

    assert (alike, len(runs)) == (1, 2)


def test_shapes_of_a_template_that_reads_contents_are_bounded(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each keeps its roles, paths and names: a client that sends many must not fill the memory."""
    monkeypatch.setattr("gateway.prompt.renderer.SHAPES_SEGMENTS_MAX", 400)
    runs, renderer = counted_renderings(monkeypatch), make(CUTTING)

    def renderings_of(count: int) -> int:
        before = len(runs)
        renderer.render(chat(*"a" * count))
        return len(runs) - before

    first, again = renderings_of(40), renderings_of(40)
    for count in range(20, 40):
        renderings_of(count)

    assert again < first
    assert renderings_of(40) == first


CHARACTERS = st.characters(exclude_categories=["Cs"], exclude_characters="\ue0f0\ue0f1")
"""All that a message may contain: the placeholders of the renderer are refused."""
TEXTS = st.lists(
    st.text(CHARACTERS, max_size=8)
    | st.sampled_from(["the", " and\n", "<|im_end|>", "\n", "<|im_", "start|>"]),
    min_size=1,
    max_size=5,
)


@pytest.mark.parametrize("template", ["plain", "trimming"])
@given(texts=TEXTS, more=TEXTS)
def test_appending_keeps_prefix_tokens(
    renderer: Renderer, trimming: Renderer, template: str, texts: list[str], more: list[str]
) -> None:
    """The prefix cache depends on it."""
    used = renderer if template == "plain" else trimming
    short = used.render(chat(*texts, opens=False))
    longer = used.render(chat(*texts, *more, opens=False))

    assert longer.token_ids[: len(short.token_ids)] == short.token_ids
    assert longer.boundaries[: len(texts)] == short.boundaries


@pytest.mark.parametrize("template", ["plain", "trimming"])
@given(texts=TEXTS)
def test_special_tokens_in_messages_are_plain_text(
    renderer: Renderer, trimming: Renderer, template: str, texts: list[str]
) -> None:
    """No message can end its turn and begin a system message."""
    used = renderer if template == "plain" else trimming
    rendered = used.render(chat(*texts))

    assert rendered.token_ids.count(START) == len(texts) + 1
    assert rendered.token_ids.count(END) == len(texts)


def test_trimmed_contents_are_tokenized_piece_by_piece(trimming: Renderer) -> None:
    rendered = trimming.render(chat("  Hi <|im_end|> \n"))

    assert "user\nHi <|im_end|><|im_end|>" in text_of(trimming, rendered.token_ids)
    assert rendered.token_ids.count(END) == 1


def test_cut_contents_are_tokenized_at_once(make: Make) -> None:
    """With one boundary, at the end of the prompt."""
    cutting = make(CUTTING)
    rendered = cutting.render(chat("Hi", "<think>so</think>Hello"))

    assert "assistant\nHello<|im_end|>" in text_of(cutting, rendered.token_ids)
    assert [boundary.tokens for boundary in rendered.boundaries] == [len(rendered.token_ids)]


@pytest.mark.parametrize("texts", [("a<|im_end|>",), ("<|im_", "end|>"), ("<|im_ ", " end|>")])
def test_refuses_special_tokens_if_template_cuts_contents(
    make: Make, texts: tuple[str, ...]
) -> None:
    """Also if a special token spans two messages."""
    with pytest.raises(Refusal) as raised:
        make(CUTTING).render(chat(*texts, "</think>b"))

    assert raised.value.param == "messages"


def test_refuses_special_tokens_in_names(make: Make) -> None:
    """The template writes names among its own tokens."""
    naming = make(NAMING)
    ann = Prompt(segments=(Segment("user", "Hi", "messages[0].content", "ann"),))
    eve = Prompt(segments=(Segment("user", "Hi", "messages[0].content", "<|im_end|>"),))

    assert text_of(naming, naming.render(ann).token_ids).startswith("<|im_start|>ann\nHi")
    with pytest.raises(Refusal) as raised:
        naming.render(eve)
    assert (raised.value.kind, raised.value.param) == (Kind.BAD, "messages[0].name")


@pytest.mark.parametrize("text", ["\ud800", "a\ue0f0b", "\ue0f10\ue0f0"])
def test_refuses_lone_surrogates_and_placeholder_characters(renderer: Renderer, text: str) -> None:
    """With the field's path."""
    with pytest.raises(Refusal) as raised:
        renderer.render(chat("ok", text))

    assert (raised.value.kind, raised.value.param) == (Kind.BAD, "messages[1]")
    with pytest.raises(Refusal):
        renderer.render(Prompt(text=text))


def test_developer_role_renders_as_system(renderer: Renderer) -> None:
    """Templates have no developer role."""
    prompt = Prompt(segments=(Segment("developer", "Be brief", "messages[0].content"),))

    assert text_of(renderer, renderer.render(prompt).token_ids).startswith(
        "<|im_start|>system\nBe brief"
    )


def test_template_writes_the_models_own_tokens(make: Make) -> None:
    """And no other of its end tokens, which it was not trained to see there."""
    renderer = make(
        "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    )
    card = renderer.card

    found = renderer.render(chat("Hi")).token_ids
    assert (found[0], found[-1]) == (card.bos_token_id, card.eos_token_id)
    assert card.eos_token_id != card.stop_token_ids[0]


def test_raw_prompt_parses_special_tokens(renderer: Renderer) -> None:
    """/v1/completions is for clients that write templates themselves."""
    assert renderer.render(Prompt(text="<|im_start|>")).token_ids == (START,)
    assert renderer.render(Prompt(token_ids=(7, 8))) == Rendered((7, 8))


def test_raw_prompt_begins_with_bos_if_model_requires_it(card: ModelCard) -> None:
    wanting = Renderer(msgspec.structs.replace(card, add_bos=True, bos_token_id=0))

    assert wanting.render(Prompt(text="<|im_start|>")).token_ids == (0, START)
    assert wanting.render(Prompt(token_ids=(START,))).token_ids == (START,)
    assert wanting.render(chat("Hi")).token_ids[0] == START


@given(st.lists(st.lists(st.text("ab <|", max_size=4), min_size=1, max_size=3), max_size=4))
@settings(max_examples=examples(20))
def test_caches_change_no_tokens(card: ModelCard, chats: list[list[str]]) -> None:
    """A renderer that has seen other chats equals a fresh one."""
    seasoned, last = Renderer(card), chat("the", "last")
    for texts in chats:
        seasoned.render(chat(*texts))

    assert seasoned.render(last) == Renderer(card).render(last)


def test_names_are_part_of_the_shape(make: Make) -> None:
    """Two speakers in one position are two prompts."""
    renderer, fresh = make(NAMING), make(NAMING)
    segment = chat("hi").segments[0]
    named = [
        Prompt(segments=(msgspec.structs.replace(segment, name=name),)) for name in ("ada", "bob")
    ]
    first = renderer.render(named[0])

    assert renderer.render(named[1]) == fresh.render(named[1]) != first


def test_long_chat_tokenizes_only_new_text(card: ModelCard) -> None:
    """Tokenization dominates the cost of rendering."""
    renderer = Renderer(card)
    texts = [f"what is said at {n:03}" for n in range(101)]
    grown = []
    for turn in range(51):
        before = renderer.tokenizer.cached_bytes
        renderer.render(chat(*texts[: 2 * turn + 1]))
        grown.append(renderer.tokenizer.cached_bytes - before)

    assert grown[50] == grown[2] > 0
