"""Tool ends are found by rendering one more tool, once per set of tools."""

from __future__ import annotations

import json
from collections.abc import Callable
from string import ascii_lowercase
from typing import Any

import pytest

from gateway.dialects.canonical import Prompt, Segment, Tool, ToolCall
from gateway.errors import Kind, Refusal
from gateway.prompt.layout import ToolOffsets, placeholder
from gateway.prompt.messages import TemplateInput, build_template_input
from gateway.structured_output.tool_styles import HERMES

Write = Callable[[list[dict[str, Any]], list[str]], str]


class Written:
    """A template as a function that counts its runs."""

    def __init__(self, write: Write) -> None:
        self._write = write
        self.runs = 0
        self.offsets = ToolOffsets(self.run, ["<end>"])

    def run(
        self, template_input: TemplateInput, text_of: Any, arguments: Any, *, opens_turn: bool
    ) -> str:
        """Render as the renderer does."""
        self.runs += 1
        messages = template_input.for_template(HERMES, text_of, arguments)
        return self._write(list(template_input.tools), [str(m["content"]) for m in messages])

    def check(self, *texts: str, tools: int = 2, owner: int = 0) -> list[str]:
        """Return the marked text before the end of each tool."""
        made = tuple(Tool(name, path=name) for name in ascii_lowercase[:tools])
        segments = tuple(
            Segment("user" if n else "system", text, f"m[{n}]", None, n)
            for n, text in enumerate(texts)
        )
        template_input = build_template_input(Prompt(segments=segments, tools=made), HERMES)
        marked = self.run(template_input, placeholder, None, opens_turn=False)
        found = self.offsets.tool_ends(template_input, marked, owner)
        return [marked[: found[part]] for part in sorted(found)]


def names(tools: list[dict[str, Any]]) -> list[str]:
    return [tool["function"]["name"] for tool in tools]


def listed(tools: list[dict[str, Any]], texts: list[str]) -> str:
    return "[" + ",".join(names(tools)) + "]" + "|".join(texts)


def last(tools: list[dict[str, Any]], texts: list[str]) -> str:
    return "|".join((*texts[:-1], listed(tools, texts[-1:])))


def test_tool_ends_before_closing_bracket() -> None:
    """A further tool would follow there."""
    assert Written(listed).check("S", "Hi") == ["[a", "[a,b"]


def test_cached_tools_are_not_rendered_again() -> None:
    """Also if the conversation has changed."""
    written = Written(listed)
    written.check("S", "Hi")
    before = written.runs
    written.check("S", "Hi", "So", "on")

    assert written.runs == before + 1


def test_tools_behind_messages_end_together() -> None:
    """No text before them can be matched on its own."""
    found = Written(last).check("S", "Hi", "So")

    assert [text[-4:] for text in found] == ["[a,b", "[a,b"]


def test_cost_is_linear_in_tools() -> None:
    """Two short renderings per tool."""
    sizes = []

    def counted(tools: list[dict[str, Any]], texts: list[str]) -> str:
        sizes.append(len(tools))
        return listed(tools, texts)

    found = Written(counted).check("S", "Hi", tools=26)

    assert [text[-1] for text in found] == list(ascii_lowercase)
    assert sum(sizes) < 6 * 26 + 4 * 26


def test_tools_not_written_in_sequence_end_together() -> None:
    """A table of contents in front, for example."""

    def counting(tools: list[dict[str, Any]], texts: list[str]) -> str:
        return f"{len(tools)} tools: " + listed(tools, texts)

    found = Written(counting).check("S", "Hi")

    assert set(found) == {"2 tools: [a,b]" + placeholder(2) + "|" + placeholder(3)}


def test_tool_end_does_not_cut_special_token() -> None:
    """The text after a tool may begin like the end of the list."""

    def parted(tools: list[dict[str, Any]], texts: list[str]) -> str:
        return "<er>".join(names(tools)) + "<end>" + "|".join(texts)

    assert Written(parted).check("S", "Hi") == ["a", "a<er>b"]


def test_tools_end_with_first_question_if_template_refuses_more() -> None:
    """The end is then a safe upper bound."""

    def two(tools: list[dict[str, Any]], texts: list[str]) -> str:
        if len(tools) > 2:
            raise Refusal(Kind.BAD, "invalid_messages", "two at most")
        return json.dumps(tools) + "|".join(texts)

    found = Written(two).check("S", "Hi", "So", "on")

    assert len(set(found)) == 1
    assert found[0].endswith(placeholder(3))


def test_another_owner_locates_its_tools_itself() -> None:
    """A cached set would take less time, and so tell that another tenant has sent it."""
    written = Written(listed)
    written.check("S", "Hi", owner=1)
    before = written.runs
    written.check("S", "Hi", owner=2)
    assert written.runs > before + 1


def test_many_tools_beside_many_messages_end_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Locating each tool renders the messages again, which a bound of characters ends."""
    monkeypatch.setattr("gateway.prompt.layout.PROBE_CHARS_MAX", 1_000)
    written = Written(listed)
    found = written.check("S", "Hi", tools=20)

    assert len(set(found)) == 1
    assert written.runs < 10


@pytest.mark.parametrize(("chars_max", "expected"), [(10_000, 30), (1_000, 4), (1, 1)])
def test_calls_of_the_latest_messages_are_located(
    monkeypatch: pytest.MonkeyPatch, chars_max: int, expected: int
) -> None:
    """Each message with calls needs a rendering; a bound of characters ends them, latest first."""
    monkeypatch.setattr("gateway.prompt.layout.PROBE_CHARS_MAX", chars_max)
    calls = [ToolCall(f"call_{n}", "f", "{}") for n in range(30)]
    segments = tuple(
        Segment("assistant", "", f"m[{n}]", None, n, call=call) for n, call in enumerate(calls)
    )
    template_input = build_template_input(Prompt(segments=segments), HERMES)
    runs = 0

    def run(
        template_input: TemplateInput, text_of: object, arguments: object, *, opens_turn: bool
    ) -> str:
        nonlocal runs
        runs += 1
        return "".join(f"{message.calls[0][1].call_id:>6};" for message in template_input.messages)

    marked = run(template_input, None, None, opens_turn=False)
    runs = 0
    found = ToolOffsets(run, []).call_ends(template_input, marked)

    assert runs == len(found) == expected
    assert all(marked[:end].endswith(f"call_{part};") for part, end in found.items())
    assert sorted(found) == list(range(30 - expected, 30))
