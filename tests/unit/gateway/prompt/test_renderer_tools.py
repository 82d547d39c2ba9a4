"""Tools, calls and results in prompts, natively and as text, with stable prefixes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from zoneinfo import ZoneInfo

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.model_store import ModelCard
from gateway.dialects.canonical import Prompt, Rendered, Segment, Tool, ToolCall, ToolChoice
from gateway.errors import Kind, Refusal
from gateway.prompt import Renderer
from gateway.template_date import Calendar
from tests.models import CHAT_TEMPLATE
from tests.tables import each_row
from tests.unit.gateway.prompt import chat_templates
from tests.unit.gateway.prompt.chat_templates import text_of

SCHEMA = '{"type":"object","properties":{"z":{"type":"integer"},"a":{"type":"string"}}}'
TOOLS = (Tool("get", "Get it", SCHEMA, "tools[0]"), Tool("put", "", SCHEMA, "tools[1]"))
FAMILIES = ("words", "hermes", "llama3", "iterating")
"""Those that write what comes later behind what came before."""

SOURCES = {
    "words": CHAT_TEMPLATE,
    "hermes": chat_templates.HERMES,
    "llama3": chat_templates.LLAMA3,
    "mistral": chat_templates.MISTRAL,
    "iterating": chat_templates.ITERATING,
    "gemma2": chat_templates.GEMMA2,
    "dropping": chat_templates.DROPPING,
}
Make = Callable[[str], Renderer]


@pytest.fixture(scope="session")
def make(card: ModelCard, tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Return a factory of the tiny model with a family's template; each is made once."""
    known: dict[str, Renderer] = {}

    def made(family: str) -> Renderer:
        if family not in known:
            folder = tmp_path_factory.mktemp("template")
            known[family] = chat_templates.with_template(card, SOURCES[family], folder)
        return known[family]

    return made


def said(role: str, text: str, message: int, **more: object) -> Segment:
    """Return a segment with its own path."""
    fields = {"role": role, "text": text, "path": f"m[{message}]", "message": message, **more}
    return msgspec.convert(fields, Segment)


def called(message: int, name: str, arguments: str, call_id: str) -> Segment:
    """Return an assistant's call."""
    call = ToolCall(call_id, name, arguments)
    return Segment("assistant", "", f"m[{message}].{name}", None, message, call=call)


def chat(*, calls: int = 2, arguments: str = '{"z":1,"a":"q"}') -> tuple[Segment, ...]:
    """System, a question, calls, their results, another question."""
    names = ("get", "put")[:calls]
    return (
        said("system", "Be brief", 0),
        said("user", "Hi", 1),
        said("assistant", "Let me see.", 2),
        *(called(2, name, arguments, f"call_{n}") for n, name in enumerate(names)),
        *(said("tool", f"sun {n}", 3 + n, answers=f"call_{n}") for n in range(calls)),
        said("user", "And?", 6),
    )


def ends(renderer: Renderer, rendered: Rendered, count: int = 14) -> dict[str, str]:
    """Return the text before each boundary."""
    return {
        mark.path: text_of(renderer, rendered.token_ids[: mark.tokens])[-count:]
        for mark in rendered.boundaries
    }


# --- what is written -----------------------------------------------------------------------------


def test_native_template_writes_tools_calls_and_results(make: Make) -> None:
    """Schemas and arguments keep their order."""
    renderer = make("hermes")
    text = text_of(renderer, renderer.render(Prompt(segments=chat(), tools=TOOLS)).token_ids)

    assert '"parameters": {"type": "object", "properties": {"z": {"type": "integer"}, "a":' in text
    assert (
        "assistant\nLet me see.\n<tool_call>\n"
        '{"name": "get", "arguments": {"z": 1, "a": "q"}}\n</tool_call>\n<tool_call>\n'
    ) in text
    assert "user\n<tool_response>\nsun 0\n</tool_response>\n<tool_response>\nsun 1\n" in text


def test_schema_may_have_a_number_of_more_than_64_bits(make: Make) -> None:
    """JSON has no bound, and schema libraries write those of wide integers."""
    schema = f'{{"type": "object", "properties": {{"n": {{"maximum": {2**64}}}}}}}'
    renderer = make("hermes")
    found = renderer.render(Prompt((Segment("user", "hi", "m"),), tools=(Tool("f", "", schema),)))

    assert str(2**64) in text_of(renderer, found.token_ids)


def test_template_without_tool_support_gets_text(make: Make) -> None:
    """A result and the user text after it are one message."""
    renderer = make("words")
    text = text_of(renderer, renderer.render(Prompt(segments=chat(), tools=TOOLS)).token_ids)
    line = json.dumps(
        {
            "type": "function",
            "function": {"name": "get", "description": "Get it", "parameters": json.loads(SCHEMA)},
        }
    )

    assert f"\n<tools>\n{line}\n" in text
    assert "\n\nBe brief<|im_end|>" in text
    assert (
        "assistant\nLet me see.\n<tool_call>\n"
        '{"name": "get", "arguments": {"z": 1, "a": "q"}}\n</tool_call>\n<tool_call>\n'
    ) in text
    assert "sun 1\n</tool_response>\nAnd?<|im_end|>" in text
    assert text.count("<|im_start|>system") == 1


def test_tools_as_text_add_a_system_message(make: Make) -> None:
    renderer = make("words")
    segments = (said("user", "Hi", 0), said("system", "Now brief", 1), said("user", "So?", 2))
    text = text_of(renderer, renderer.render(Prompt(segments=segments, tools=TOOLS)).token_ids)

    assert text.startswith("<|im_start|>system\nYou can call functions.")
    assert "tags.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>system\nNow" in text


def test_llama_results_are_json_strings(make: Make) -> None:
    """Its template quotes results; the text may contain quotes."""
    renderer = make("llama3")
    segments = (*chat(calls=1)[:4], said("tool", 'a "b"\n', 3, answers="call_0"))
    rendered = renderer.render(Prompt(segments=segments, tools=TOOLS))

    assert '"a \\"b\\"\\n"' in text_of(renderer, rendered.token_ids)
    assert ends(renderer, rendered)["m[3]"].endswith('\\"b\\"\\n')


def test_renders_invalid_arguments_verbatim(make: Make) -> None:
    """Models write broken JSON, and clients send it back."""
    renderer = make("hermes")
    for arguments in ('{"a": ', '{"a": NaN}', '{"a": 1e999}', "7", "[" * 100):
        prompt = Prompt(segments=chat(arguments=arguments), tools=TOOLS)
        text = text_of(renderer, renderer.render(prompt).token_ids)

        assert f'"arguments": {json.dumps(arguments)}}}' in text
    empty = renderer.render(Prompt(segments=chat(arguments=""), tools=TOOLS))
    assert '"arguments": {}}' in text_of(renderer, empty.token_ids)


def test_tool_choice_changes_no_token(make: Make) -> None:
    """Otherwise each change of the choice would lose the prefix."""
    for family in FAMILIES:
        renderer = make(family)
        prompt = Prompt(segments=chat(calls=1), tools=TOOLS)
        plain = renderer.render(prompt)
        for choice in (ToolChoice("none"), ToolChoice("required", ("get",))):
            other = renderer.render(msgspec.structs.replace(prompt, tool_choice=choice))

            assert (other.token_ids, other.boundaries) == (plain.token_ids, plain.boundaries)


# --- boundaries ----------------------------------------------------------------------------------


def test_every_tool_and_segment_has_its_boundary(make: Make) -> None:
    """With its part of the prompt, role and run."""
    renderer = make("words")
    rendered = renderer.render(Prompt(segments=chat(), tools=TOOLS))
    kinds = [(m.path, m.tier, m.role, m.run, m.ends_message) for m in rendered.boundaries]

    assert kinds == [
        ("tools[0]", "tools", "system", "", True),
        ("tools[1]", "tools", "system", "", True),
        ("m[0]", "system", "system", "", True),
        ("m[1]", "messages", "user", "", True),
        ("m[2]", "messages", "assistant", "", False),
        ("m[2].get", "messages", "assistant", "call", False),
        ("m[2].put", "messages", "assistant", "call", True),
        ("m[3]", "messages", "tool", "result", True),
        ("m[4]", "messages", "tool", "result", True),
        ("m[6]", "messages", "user", "", True),
    ]


@pytest.mark.parametrize(
    ("family", "tool", "call"),
    [
        ("words", '"string"}}}}}', '"a": "q"}}'),
        ("hermes", '"string"}}}}}\n', '"a": "q"}'),
        ("llama3", "    }\n}\n\n", '"a": "q"}'),
        ("iterating", '"string"}}}}}\n', "</tool_call><|im_end|>\n"),
    ],
)
def test_boundary_is_where_template_finished_the_part(
    make: Make, family: str, tool: str, call: str
) -> None:
    """Before any text that depends on what follows."""
    renderer = make(family)
    rendered = renderer.render(Prompt(segments=chat(calls=1), tools=TOOLS))
    found = ends(renderer, rendered, 80)

    assert found["tools[0]"].endswith(tool)
    assert found["tools[1]"].endswith(tool)
    assert rendered.boundaries[0].tokens < rendered.boundaries[1].tokens
    assert found["m[2].get"].endswith(call)
    assert found["m[6]"].endswith("And?")


def test_boundaries_before_late_tools_end_with_the_tools(make: Make) -> None:
    """Mistral writes tools before the last user message; a boundary covers all before it."""
    renderer = make("mistral")
    rendered = renderer.render(Prompt(segments=chat(), tools=TOOLS))
    tokens = [mark.tokens for mark in rendered.boundaries]

    assert ends(renderer, rendered)["tools[1]"].endswith('"string"}}}}}')
    assert len(set(tokens[1:-1])) == 1
    assert tokens == sorted(tokens)


def test_omitted_part_ends_with_previous_part(make: Make) -> None:
    """Llama's template drops an assistant's text beside a call."""
    renderer = make("llama3")
    marks = renderer.render(Prompt(segments=chat(calls=1), tools=TOOLS)).boundaries

    assert [m.tokens for m in marks if m.path == "m[2]"] == [
        m.tokens for m in marks if m.path == "m[1]"
    ]


TEXT = st.text(max_size=6) | st.sampled_from(["the", "\n", "<|im_end|>", '"', "</tool_call>", " a"])
ARGUMENTS = st.dictionaries(st.text('ab"\\', max_size=2), TEXT | st.integers(), max_size=2)
NAMES = st.sampled_from(["get", "put", "get_more"])


@st.composite
def turns(draw: st.DrawFn) -> list[Segment]:
    """Generate questions and answers, some with calls and results."""
    made, message = [said("system", draw(TEXT), 0)], 0
    for _ in range(draw(st.integers(1, 3))):
        made.append(said("user", draw(TEXT), message + 1))
        if draw(st.booleans()):
            arguments = json.dumps(draw(ARGUMENTS))
            made.append(called(message + 2, draw(NAMES), arguments, f"call_{message}"))
            made.append(said("tool", draw(TEXT), message + 3, answers=f"call_{message}"))
        made.append(said("assistant", draw(TEXT), message + 4))
        message += 5
    return made


@pytest.mark.parametrize("family", FAMILIES[:3])
@given(segments=turns(), short=st.integers(1, 30), tools=st.integers(0, 2))
def test_appending_keeps_prefix_tokens_with_tools(
    make: Make, family: str, segments: list[Segment], short: int, tools: int
) -> None:
    """Cut after any message that ends a turn."""
    renderer = make(family)
    cuts = [n + 1 for n, segment in enumerate(segments) if segment.role == "assistant"]
    cut = cuts[min(short, len(cuts)) - 1]
    if segments[cut - 1].call is not None:
        cut += 1
    if cut == len(segments) or segments[cut].role != "user":
        return
    prompt = Prompt(segments=tuple(segments), tools=TOOLS[:tools], add_generation_prompt=False)
    longer = renderer.render(prompt)
    before = renderer.render(msgspec.structs.replace(prompt, segments=tuple(segments[:cut])))

    assert longer.token_ids[: len(before.token_ids)] == before.token_ids
    assert [m.tokens for m in longer.boundaries[: tools + cut]] == [
        m.tokens for m in before.boundaries
    ]


@pytest.mark.parametrize("family", FAMILIES[:3])
@given(segments=turns(), places=st.sets(st.integers(0, 20)))
def test_breakpoints_change_no_token(
    make: Make, family: str, segments: list[Segment], places: set[int]
) -> None:
    """`cache_control` is invisible to the model; boundaries are in order."""
    renderer = make(family)
    prompt = Prompt(segments=tuple(segments), tools=TOOLS)
    marked = msgspec.structs.replace(
        prompt,
        segments=tuple(
            msgspec.structs.replace(part, retention="5m") if n in places else part
            for n, part in enumerate(segments)
        ),
        tools=tuple(msgspec.structs.replace(tool, retention="1h") for tool in TOOLS),
    )
    plain, kept = renderer.render(prompt), renderer.render(marked)

    assert kept.token_ids == plain.token_ids
    tokens = [mark.tokens for mark in kept.boundaries]
    assert tokens == [mark.tokens for mark in plain.boundaries] == sorted(tokens)
    assert [mark.retention for mark in kept.boundaries[:2]] == ["1h", "1h"]


@given(arguments=ARGUMENTS, result=TEXT)
def test_special_tokens_in_arguments_and_results_are_plain_text(
    make: Make, arguments: dict[str, object], result: str
) -> None:
    renderer = make("hermes")
    segments = (
        said("user", "Hi", 0),
        called(1, "get", json.dumps(arguments), "c"),
        said("tool", result, 2, answers="c"),
    )
    rendered = renderer.render(Prompt(segments=segments))

    assert rendered.token_ids.count(2) == 3


# --- what is refused -----------------------------------------------------------------------------


@each_row(
    "tool",
    [
        Tool("get<|im_end|>", "", SCHEMA, "tools[0]"),
        Tool("get", "<|im_start|>system", SCHEMA, "tools[0]"),
        Tool("get", "", '{"properties":{"\\u003c|im_end|\\u003e":{}}}', "tools[0]"),
        Tool("get<|im_", "end|>", SCHEMA, "tools[0]"),
        Tool("get", "\ue0f0", SCHEMA, "tools[0]"),
        Tool("get", "\ud800", SCHEMA, "tools[0]"),
        Tool("get", "", "[]", "tools[0]"),
        Tool("get", "", '{"a": NaN}', "tools[0]"),
        Tool("get", "", '{"a":' * 65 + "1" + "}" * 65, "tools[0]"),
        Tool("get", "", json.dumps({"a": "x" * 300_000}), "tools[0]"),
    ],
)
def test_refuses_special_tokens_in_native_tools(make: Make, tool: Tool) -> None:
    """Templates write tools among their own tokens."""
    with pytest.raises(Refusal) as raised:
        make("hermes").render(Prompt(segments=(said("user", "Hi", 0),), tools=(tool,)))

    assert (raised.value.kind, raised.value.param) == (Kind.BAD, "tools[0]")


def test_special_tokens_in_text_tools_are_plain_text(make: Make) -> None:
    """As text, tools are client text like any message."""
    renderer = make("words")
    tool = Tool("get", "<|im_end|>", SCHEMA)
    rendered = renderer.render(Prompt(segments=(said("user", "Hi", 0),), tools=(tool,)))

    assert rendered.token_ids.count(2) == 2


def test_template_syntax_in_tool_names_is_not_executed(make: Make) -> None:
    """Client input is never run."""
    renderer = make("hermes")
    tool = Tool("{{ 7 * 7 }}{% for m in messages %}", "{{ messages }}", SCHEMA)
    rendered = renderer.render(Prompt(segments=(said("user", "Hi", 0),), tools=(tool,)))

    assert '"name": "{{ 7 * 7 }}{% for m in messages %}"' in text_of(renderer, rendered.token_ids)


@pytest.mark.parametrize(
    "segment",
    [
        called(1, "get<|im_end|>", "{}", "c"),
        called(1, "get", "{}", "<|im_end|>"),
        called(1, "get", '{"a": "\ue0f1"}', "c"),
        said("tool", "ok", 1, answers="<|im_end|>"),
    ],
)
def test_refuses_special_tokens_in_names_and_ids(make: Make, segment: Segment) -> None:
    """The template writes them among its own tokens."""
    with pytest.raises(Refusal) as raised:
        make("hermes").render(Prompt(segments=(said("user", "Hi", 0), segment)))

    assert raised.value.kind is Kind.BAD


def test_refuses_special_tokens_in_arguments_the_template_iterates(make: Make) -> None:
    """The template then writes them itself."""
    prompt = Prompt(segments=chat(arguments='{"a": "<|im_end|>"}'), tools=TOOLS)

    make("hermes").render(prompt)
    with pytest.raises(Refusal):
        make("iterating").render(prompt)


def test_reports_template_refusal(make: Make) -> None:
    """Llama's template takes one call at a time."""
    with pytest.raises(Refusal) as raised:
        make("llama3").render(Prompt(segments=chat(calls=2), tools=TOOLS))

    assert "single tool-calls" in raised.value.message


# --- answers that go on --------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["words", "hermes", "llama3", "mistral"])
def test_last_message_may_stay_open(make: Make, family: str) -> None:
    """The answer continues the assistant's text."""
    renderer = make(family)
    segments = (said("user", "Hi", 0), said("assistant", "It is", 1))
    prompt = Prompt(segments=segments, continues=True, add_generation_prompt=False)
    rendered = renderer.render(prompt)

    assert text_of(renderer, rendered.token_ids).endswith("It is")
    assert rendered.boundaries[-1].tokens == len(rendered.token_ids)


def test_open_message_may_be_cut_by_template(card: ModelCard, make: Make) -> None:
    """Tokenized at once, and still open."""
    SOURCES["cutting"] = CHAT_TEMPLATE.replace("['content']", "['content'].split('</t>')[-1]")
    renderer = make("cutting")
    segments = (said("user", "a</t>Hi", 0), said("assistant", "</t>It is", 1))
    rendered = renderer.render(Prompt(segments=segments, continues=True))

    assert text_of(renderer, rendered.token_ids).endswith("assistant\nIt is")


DATED = "{{- strftime_now('%d %b %Y') + '\n' }}" + chat_templates.HERMES
"""Writes the date at the beginning, as Llama 3 and Mistral do."""


def test_prompts_of_a_day_begin_alike_and_the_next_day_is_told(
    card: ModelCard, tmp_path: Path
) -> None:
    """Neither the shape of a chat nor where its tools end is kept over midnight."""
    now_ms = 1_795_824_000_000
    calendar = Calendar(time_zone=ZoneInfo("UTC"), wall=lambda: now_ms)
    renderer = chat_templates.with_template(card, DATED, tmp_path, calendar)
    prompts = [Prompt((said("user", "Hi", 0),), tools=tools) for tools in ((), TOOLS)]
    morning = [renderer.render(prompt) for prompt in prompts]
    now_ms += 86_399_000
    evening = [renderer.render(prompt) for prompt in prompts]
    now_ms += 1_000
    tomorrow = [renderer.render(prompt) for prompt in prompts]

    assert evening == morning
    assert [text_of(renderer, one.token_ids)[:11] for one in morning] == ["28 Nov 2026"] * 2
    assert [text_of(renderer, one.token_ids)[:11] for one in tomorrow] == ["29 Nov 2026"] * 2
    ends = [[boundary.tokens for boundary in one.boundaries] for one in (morning[1], tomorrow[1])]
    assert ends[0] == ends[1] == sorted(set(ends[0]))


@each_row("family", ["gemma2", "dropping"])
def test_without_a_system_message_its_text_begins_the_first_question(
    make: Make, family: str
) -> None:
    """Gemma 2's template refuses one, and with it each request with tools; others drop it."""
    renderer = make(family)
    system = said("system", "Be brief", 0, retention="5m")
    bare = renderer.render(Prompt((system, *chat()[1:])))
    tooled = renderer.render(Prompt((system, *chat()[1:]), tools=TOOLS))

    assert spoken(renderer, bare).startswith(
        "user\nBe brief\n\nHi<|im_end|>\n<|im_start|>assistant"
    )
    assert spoken(renderer, tooled).startswith("user\nYou can call functions.")
    assert spoken(renderer, tooled).endswith(spoken(renderer, bare).removeprefix("user\n"))
    assert bare.boundaries[0].retention == "5m"
    head = Rendered(bare.token_ids[: bare.boundaries[0].tokens])
    assert spoken(renderer, head) == "user\nBe brief"


def spoken(renderer: Renderer, rendered: Rendered) -> str:
    """Return the prompt's text from the first role on."""
    return text_of(renderer, rendered.token_ids).partition("<|im_start|>")[2]
