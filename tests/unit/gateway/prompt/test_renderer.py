"""From messages to tokens: prefixes stay, boundaries are true, and roles cannot be taken."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
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
from tests.models import CHAT_TEMPLATE
from tests.unit.gateway.prompt import chat_templates

START, END = 1, 2
TRIMMING = CHAT_TEMPLATE.replace("message['content']", "message['content']|trim")
CUTTING = CHAT_TEMPLATE.replace("message['content']", "message['content'].split('</think>')[-1]")
NAMING = CHAT_TEMPLATE.replace("message['role']", "message.get('name', message['role'])")

Make = Callable[[str], Renderer]


@pytest.fixture(scope="session")
def make(card: ModelCard, tmp_path_factory: pytest.TempPathFactory) -> Make:
    """The tiny model with another template."""

    def made(template: str) -> Renderer:
        folder = tmp_path_factory.mktemp("template") / "model"
        shutil.copytree(Path(card.folder), folder)
        (folder / "chat_template.jinja").write_text(template)
        return Renderer(msgspec.structs.replace(card, folder=str(folder)))

    return made


@pytest.fixture(scope="session")
def renderer(card: ModelCard) -> Renderer:
    """The tiny model, whose template is ChatML's."""
    return Renderer(card)


@pytest.fixture(scope="session")
def trimming(make: Make) -> Renderer:
    """A template that trims contents, as many do."""
    return make(TRIMMING)


def chat(*texts: str, opens: bool = True) -> Prompt:
    """User and assistant in turns."""
    roles = ("user", "assistant")
    return Prompt(
        segments=tuple(
            Segment(
                "user" if roles[n % 2] == "user" else "assistant", text, f"messages[{n}]", None, n
            )
            for n, text in enumerate(texts)
        ),
        add_generation_prompt=opens,
    )


def text_of(renderer: Renderer, rendered: Rendered) -> str:
    """Tokens as text, special ones as the template writes them."""
    parts = (
        renderer.token_bytes(t) or renderer.special_text(t).encode() for t in rendered.token_ids
    )
    return b"".join(parts).decode()


def test_messages_are_the_templates_text_in_tokens(renderer: Renderer) -> None:
    """Nothing added, nothing lost, special tokens where the template has them."""
    rendered = renderer.render(chat("Hi", "Hello"))

    assert text_of(renderer, rendered) == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert [rendered.token_ids.count(token) for token in (START, END)] == [3, 2]


def test_a_boundary_stands_where_its_segment_ends(renderer: Renderer) -> None:
    """Breakpoints are counted in tokens and named by path."""
    rendered = renderer.render(chat("Hi", "Hello"))

    ends = [Rendered(rendered.token_ids[: boundary.tokens]) for boundary in rendered.boundaries]
    assert [text_of(renderer, end)[-5:] for end in ends] == ["er\nHi", "Hello"]
    assert [boundary.path for boundary in rendered.boundaries] == ["messages[0]", "messages[1]"]


def test_parts_of_a_message_are_joined_with_a_boundary_each(renderer: Renderer) -> None:
    """The text is as if it had been one; the tokens end where the parts do."""
    parts = [
        Segment("user", text, f"messages[0].content[{n}]") for n, text in enumerate(("th", "e"))
    ]
    rendered = renderer.render(Prompt(segments=tuple(parts), add_generation_prompt=False))

    assert text_of(renderer, rendered) == "<|im_start|>user\nthe<|im_end|>\n"
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
def test_a_known_shape_gives_what_the_whole_rendering_gives(make: Make, source: str) -> None:
    """Whatever a template does with contents, remembering what it does changes no token."""
    quick, whole = make(source), make(source + CAPTURES)
    for texts in (["a", "b"], [" a\n", ""], ["", " "], ["x" * 40], ["a</think>b", "c", "the"]):
        for opens in (True, False):
            assert quick.render(chat(*texts, opens=opens)) == whole.render(
                chat(*texts, opens=opens)
            )


def test_chats_of_one_shape_are_rendered_once(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The template runs for the first of them alone; names and roles are part of the shape."""
    runs: list[int] = []
    whole = ChatTemplate.render

    def counted(self: ChatTemplate, messages: Any, **variables: object) -> str:
        runs.append(1)
        return whole(self, messages, **variables)

    monkeypatch.setattr(ChatTemplate, "render", counted)
    renderer = make(NAMING)
    for text in ("a", "b", "c"):
        renderer.render(chat(text))
    alike = len(runs)
    renderer.render(chat("a", "b"))

    assert (alike, len(runs)) == (1, 2)


TEXTS = st.lists(
    st.text(max_size=8)
    | st.sampled_from(["the", " and\n", "<|im_end|>", "\n", "<|im_", "start|>"]),
    min_size=1,
    max_size=5,
)


@pytest.mark.parametrize("template", ["plain", "trimming"])
@given(texts=TEXTS, more=TEXTS)
def test_a_longer_conversation_begins_with_the_shorter_ones_tokens(
    renderer: Renderer, trimming: Renderer, template: str, texts: list[str], more: list[str]
) -> None:
    """This is what a prefix cache lives on: appending never changes what stands before."""
    used = renderer if template == "plain" else trimming
    short = used.render(chat(*texts, opens=False))
    longer = used.render(chat(*texts, *more, opens=False))

    assert longer.token_ids[: len(short.token_ids)] == short.token_ids
    assert longer.boundaries[: len(texts)] == short.boundaries


@pytest.mark.parametrize("template", ["plain", "trimming"])
@given(texts=TEXTS)
def test_whoever_writes_special_tokens_writes_text(
    renderer: Renderer, trimming: Renderer, template: str, texts: list[str]
) -> None:
    """No message can end its turn and begin the system's: the special tokens are the template's."""
    used = renderer if template == "plain" else trimming
    rendered = used.render(chat(*texts))

    assert rendered.token_ids.count(START) == len(texts) + 1
    assert rendered.token_ids.count(END) == len(texts)


def test_a_template_may_trim_contents(trimming: Renderer) -> None:
    """Then the trimmed text is what counts, still piece by piece."""
    rendered = trimming.render(chat("  Hi <|im_end|> \n"))

    assert "user\nHi <|im_end|><|im_end|>" in text_of(trimming, rendered)
    assert rendered.token_ids.count(END) == 1


def test_a_template_may_cut_contents(make: Make) -> None:
    """The prompt is then tokenized at once, with a boundary at its end."""
    cutting = make(CUTTING)
    rendered = cutting.render(chat("Hi", "<think>so</think>Hello"))

    assert "assistant\nHello<|im_end|>" in text_of(cutting, rendered)
    assert [boundary.tokens for boundary in rendered.boundaries] == [len(rendered.token_ids)]


@pytest.mark.parametrize("texts", [("a<|im_end|>",), ("<|im_", "end|>"), ("<|im_ ", " end|>")])
def test_what_could_not_be_told_from_the_templates_own_is_refused(
    make: Make, texts: tuple[str, ...]
) -> None:
    """Only where a template cuts contents; across messages too."""
    with pytest.raises(Refusal) as raised:
        make(CUTTING).render(chat(*texts, "</think>b"))

    assert raised.value.param == "messages"


def test_a_name_cannot_hold_special_tokens(make: Make) -> None:
    """The template writes names between its own tokens."""
    naming = make(NAMING)
    ann = Prompt(segments=(Segment("user", "Hi", "messages[0].content", "ann"),))
    eve = Prompt(segments=(Segment("user", "Hi", "messages[0].content", "<|im_end|>"),))

    assert text_of(naming, naming.render(ann)).startswith("<|im_start|>ann\nHi")
    with pytest.raises(Refusal) as raised:
        naming.render(eve)
    assert (raised.value.kind, raised.value.param) == (Kind.BAD, "messages[0].name")


@pytest.mark.parametrize("text", ["\ud800", "a\ue0f0b", "\ue0f10\ue0f0"])
def test_text_that_is_no_text_is_refused_with_its_path(renderer: Renderer, text: str) -> None:
    """Lone surrogates cannot be written, and two private signs are ours."""
    with pytest.raises(Refusal) as raised:
        renderer.render(chat("ok", text))

    assert (raised.value.kind, raised.value.param) == (Kind.BAD, "messages[1]")
    with pytest.raises(Refusal):
        renderer.render(Prompt(text=text))


def test_developers_speak_as_the_system(renderer: Renderer) -> None:
    """Templates know no developer; the role means the same."""
    prompt = Prompt(segments=(Segment("developer", "Be brief", "messages[0].content"),))

    assert text_of(renderer, renderer.render(prompt)).startswith("<|im_start|>system\nBe brief")


def test_a_raw_prompt_means_its_special_tokens(renderer: Renderer) -> None:
    """/v1/completions is for who writes templates by hand."""
    assert renderer.render(Prompt(text="<|im_start|>")).token_ids == (START,)
    assert renderer.render(Prompt(token_ids=(7, 8))) == Rendered((7, 8))


def test_a_raw_prompt_begins_as_the_model_was_trained(card: ModelCard) -> None:
    """Models that want a first token get it from a raw text, and only from there."""
    wanting = Renderer(msgspec.structs.replace(card, add_bos=True, bos_token_id=0))

    assert wanting.render(Prompt(text="<|im_start|>")).token_ids == (0, START)
    assert wanting.render(Prompt(token_ids=(START,))).token_ids == (START,)
    assert wanting.render(chat("Hi")).token_ids[0] == START


@given(st.lists(st.lists(st.text("ab <|", max_size=4), min_size=1, max_size=3), max_size=4))
@settings(max_examples=20)
def test_what_is_remembered_changes_no_tokens(card: ModelCard, chats: list[list[str]]) -> None:
    """A renderer that has seen other chats gives what one that has seen nothing gives."""
    seasoned, last = Renderer(card), chat("the", "last")
    for texts in chats:
        seasoned.render(chat(*texts))

    assert seasoned.render(last) == Renderer(card).render(last)


def test_names_are_part_of_what_is_remembered(make: Make) -> None:
    """Two speakers in one place are two prompts."""
    renderer, fresh = make(NAMING), make(NAMING)
    segment = chat("hi").segments[0]
    named = [
        Prompt(segments=(msgspec.structs.replace(segment, name=name),)) for name in ("ada", "bob")
    ]
    first = renderer.render(named[0])

    assert renderer.render(named[1]) == fresh.render(named[1]) != first


def test_turn_fifty_of_a_chat_costs_only_its_new_words(card: ModelCard) -> None:
    """Tokenizing is what rendering takes its time for: what was said before is never done again,
    however long the chat has become."""
    renderer = Renderer(card)
    texts = [f"what is said at {n:03}" for n in range(101)]
    grown = []
    for turn in range(51):
        before = renderer.tokenizer.cached_bytes
        renderer.render(chat(*texts[: 2 * turn + 1]))
        grown.append(renderer.tokenizer.cached_bytes - before)

    assert grown[50] == grown[2] > 0
