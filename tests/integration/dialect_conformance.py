"""What every dialect has to hold, whoever's it is: a suite that a new one is put through.

A dialect's tests subclass `DialectConformance` with an `Adapter`, which says how a good request
looks and how a client of that dialect reads an answer; everything else is asked here.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.dialects.canonical import (
    NO_METADATA,
    Begin,
    Call,
    CallText,
    ChoiceEnd,
    Delta,
    End,
    OutputFormat,
    Reply,
    RequestMetadata,
    Text,
    ToolChoice,
    UsageRecord,
)
from gateway.dialects.protocol import Dialect
from gateway.errors import Kind, Refusal
from tests.golden.transcripts import outcome

shared = settings(suppress_health_check=[HealthCheck.differing_executors])
"""Each dialect runs the same property; that is the point of them."""

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"b": {"type": "string"}, "a": {"type": "integer"}},
    "required": ["b"],
}
REPLY = Reply("id-1", "m", 1_700_000_000)


class BrokenOff(Exception):
    """What a client raises when a stream ends in an error; its message is the error's."""


@dataclass(frozen=True)
class Answer:
    """One answer as a client understands it. `calls`: (name, arguments) of each tool call.
    `usage`: total prompt tokens, tokens read from the cache, output tokens."""

    text: str
    calls: tuple[tuple[str, Any], ...]
    reason: str
    usage: tuple[int, int, int]


@dataclass(frozen=True)
class Adapter:
    """One dialect. `good` asks model "m" to answer the user's "hi" and nothing else; `streaming`
    is what is added to stream it. `has_calls`: it can carry tool calls. `tool`: the fields that
    declare a function (its name, its schema); `held_to`: those that ask for an answer of a schema;
    both where it has such a thing."""

    dialect: Dialect
    good: dict[str, Any]
    read_unary: Callable[[bytes], Answer]
    read_stream: Callable[[bytes], Answer]
    read_error: Callable[[bytes], str]
    asked: RequestMetadata = NO_METADATA
    asked_streaming: RequestMetadata = NO_METADATA
    streaming: dict[str, Any] = field(default_factory=dict)
    has_calls: bool = True
    tool: Callable[[str, dict[str, Any]], dict[str, Any]] | None = None
    held_to: Callable[[dict[str, Any]], dict[str, Any]] | None = None

    def parse(self, **fields: Any) -> Call:
        """A good request with more fields."""
        return self.dialect.parse(json.dumps({**self.good, **fields}).encode(), self.asked)

    def parse_streaming(self) -> Call:
        """The good request, to be streamed."""
        body = json.dumps({**self.good, **self.streaming}).encode()
        return self.dialect.parse(body, self.asked_streaming)

    def streamed(self, deltas: list[Delta]) -> bytes:
        """A whole stream."""
        encoder = self.dialect.encoder(self.parse_streaming(), REPLY)
        return b"".join(map(encoder.stream, deltas)) + encoder.close()

    def folded(self, deltas: list[Delta]) -> bytes:
        """The same answer in one piece."""
        return self.dialect.encoder(self.parse(), REPLY).unary(deltas)


TOKENS = st.integers(0, 2**31)
CLASSES = st.dictionaries(st.sampled_from(["5m", "1h", "30m", "24h"]), TOKENS, max_size=2)


@st.composite
def usages(draw: st.DrawFn) -> UsageRecord:
    """Any record whose sum holds."""
    read, write, fresh = draw(CLASSES), draw(CLASSES), draw(TOKENS)
    total = sum(read.values()) + sum(write.values()) + fresh
    return UsageRecord(total, read, write, fresh, draw(TOKENS), draw(TOKENS))


TEXTS = st.builds(lambda text: [Text(0, text)], st.text(max_size=4))
ARGUMENTS = st.dictionaries(st.text(max_size=3), st.integers(-9, 9) | st.text(max_size=3))


@st.composite
def calls(draw: st.DrawFn, number: int) -> list[Delta]:
    """A whole tool call in pieces, the first of which names it."""
    text, pieces = json.dumps(draw(ARGUMENTS)), draw(st.integers(1, 4))
    cut = max(1, len(text) // pieces)
    parts = [text[start : start + cut] for start in range(0, len(text), cut)]
    first = CallText(0, number, f"call_{number}", f"tool_{number}")
    return [first, *(CallText(0, number, arguments=part) for part in parts)]


@st.composite
def answers(draw: st.DrawFn, *, has_calls: bool) -> list[Delta]:
    """Any whole answer of one choice: texts, calls after and between them, an end."""
    usage = draw(usages())
    deltas: list[Delta] = [Begin(usage)]
    called = 0
    for is_call in draw(st.lists(st.booleans(), max_size=5)):
        if is_call and has_calls:
            deltas += draw(calls(called))
            called += 1
        else:
            deltas += draw(TEXTS)
    deltas.append(ChoiceEnd(0, "tool_calls" if called else draw(st.sampled_from(["stop"]))))
    return [*deltas, End(usage)]


class DialectConformance:
    """Subclass it, set `adapter`, and be a dialect."""

    adapter: ClassVar[Adapter]

    def test_a_minimal_request_is_the_same_call_everywhere(self) -> None:
        """One inner form: what differs is on the wire."""
        call = self.adapter.parse()

        (prompt,) = call.prompts
        assert call.model == "m"
        assert [(s.role, s.text) for s in prompt.segments] == [("user", "hi")]
        assert (call.operation, call.stream, prompt.continues) == ("generate", False, False)
        assert (call.generation.choices, call.generation.stop) == (1, ())

    def test_a_function_is_the_same_tool_everywhere(self) -> None:
        """The schema keeps the order in which it came: it is part of the prefix."""
        if self.adapter.tool is None:
            assert not self.adapter.has_calls
            return
        (prompt,) = self.adapter.parse(**self.adapter.tool("f", SCHEMA)).prompts

        (tool,) = prompt.tools
        assert (tool.name, tool.parameters) == ("f", json.dumps(SCHEMA, separators=(",", ":")))
        assert tool.path.startswith("tools[0]")
        assert prompt.tool_choice == ToolChoice()

    def test_an_answer_of_a_schema_is_the_same_format_everywhere(self) -> None:
        """And its field is known, for what only an engine finds wrong with it."""
        if self.adapter.held_to is None:
            return
        (prompt,) = self.adapter.parse(**self.adapter.held_to(SCHEMA)).prompts

        wanted = prompt.output_format
        assert (wanted.kind, json.loads(wanted.schema)) == ("json_schema", SCHEMA)
        assert wanted.path != OutputFormat().path

    def test_streaming_is_asked_for_by_body_or_path(self) -> None:
        """Every SDK accepts JSON and streams alike, so nothing else can tell."""
        assert self.adapter.parse_streaming().stream

    def test_an_unknown_field_is_refused_by_name(self) -> None:
        """A typo that is ignored costs its author a day."""
        with pytest.raises(Refusal) as raised:
            self.adapter.parse(modle="m")

        assert raised.value.kind is Kind.BAD
        assert "modle" in raised.value.message

    @pytest.mark.parametrize(
        "body",
        [b"", b"nul", b"[]", b'"x"', b"\xff", b"[" * 100_000, b'{"a":' * 5_000, b'{"model":"m"'],
        ids=lambda body: repr(body[:12]),
    )
    def test_what_is_no_request_is_refused(self, body: bytes) -> None:
        """Every decoder has errors of its own kind; all of them are the client's."""
        with pytest.raises(Refusal) as raised:
            self.adapter.dialect.parse(body, self.adapter.asked)

        assert raised.value.kind is Kind.BAD

    @shared
    @given(st.data())
    def test_any_json_in_any_field_is_a_call_or_a_refusal(self, data: st.DataObject) -> None:
        """Nothing else ever comes out of a parser."""
        name = data.draw(st.sampled_from(sorted(self.adapter.good)))
        body = json.dumps({**self.adapter.good, name: data.draw(_JSON)}).encode()
        got = outcome(lambda some: self.adapter.dialect.parse(some, self.adapter.asked), body)

        assert isinstance(got, Call) or (got.kind is Kind.BAD and len(got.message) < 1_000)

    @shared
    @given(st.data())
    def test_a_unary_answer_is_the_fold_of_the_stream(self, data: st.DataObject) -> None:
        """One answer, two shapes: they may never say different things."""
        deltas = data.draw(answers(has_calls=self.adapter.has_calls))

        whole = self.adapter.read_unary(self.adapter.folded(deltas))
        assert self.adapter.read_stream(self.adapter.streamed(deltas)) == whole
        assert whole.text == "".join(d.text for d in deltas if isinstance(d, Text))
        assert len(whole.calls) == sum(isinstance(d, CallText) and bool(d.name) for d in deltas)

    @shared
    @given(usages())
    def test_usage_adds_up_and_comes_from_the_one_record(self, usage: UsageRecord) -> None:
        """Money follows these numbers."""
        deltas: list[Delta] = [Begin(usage), Text(0, "a"), ChoiceEnd(0, "stop"), End(usage)]

        found = self.adapter.read_unary(self.adapter.folded(deltas)).usage
        assert found == (usage.total_in, usage.read_tokens(), usage.out)

    def test_each_way_to_end_is_told_apart(self) -> None:
        """An answer that was cut off must not look whole."""
        usage = UsageRecord(1, fresh=1, out=1)
        reasons = {
            self.adapter.read_unary(
                self.adapter.folded([Begin(usage), Text(0, "a"), end, End(usage)])
            ).reason
            for end in (ChoiceEnd(0, "stop"), ChoiceEnd(0, "length"))
        }

        assert len(reasons) == 2

    def test_keep_alives_mean_nothing(self) -> None:
        """They may come before the first event and between any two."""
        usage = UsageRecord(1, fresh=1, out=1)
        deltas: list[Delta] = [Begin(usage), Text(0, "a"), ChoiceEnd(0, "stop"), End(usage)]
        encoder = self.adapter.dialect.encoder(self.adapter.parse_streaming(), REPLY)
        ping = self.adapter.dialect.keep_alive()
        data = b"".join(ping + encoder.stream(delta) for delta in deltas) + encoder.close()

        assert ping
        assert self.adapter.read_stream(data).text == "a"

    def test_an_error_inside_a_stream_breaks_it_off(self) -> None:
        """A stream that just ends looks whole."""
        usage = UsageRecord(1, fresh=1)
        encoder = self.adapter.dialect.encoder(self.adapter.parse_streaming(), REPLY)
        data = encoder.stream(Begin(usage)) + encoder.stream(Text(0, "half"))
        data += encoder.error_event(Refusal(Kind.BUSY, "engine_restarting", "The engine stopped."))

        with pytest.raises(BrokenOff, match=r"The engine stopped\."):
            self.adapter.read_stream(data)

    @pytest.mark.parametrize("kind", list(Kind))
    def test_every_refusal_has_a_status_and_its_message(self, kind: Kind) -> None:
        """Whatever goes wrong, the client reads why in the shape it knows."""
        refusal = Refusal(kind, "some_code", "What went wrong.", param="p")
        status, body = self.adapter.dialect.error_body(refusal, "r1")

        assert 400 <= status < 600
        assert self.adapter.read_error(body) == "What went wrong."
        assert (status >= 500) == (kind in (Kind.INTERNAL, Kind.BUSY, Kind.DEADLINE))


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "content", "type", "text", "x"]), inner)
    ),
    max_leaves=6,
)
