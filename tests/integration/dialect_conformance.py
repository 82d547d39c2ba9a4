"""The conformance suite that every dialect must pass.

A dialect's test subclasses `DialectConformance` with an `Adapter`, which has a valid request and
reads answers as a client of that dialect does.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import structs

from gateway.dialects.canonical import (
    Begin,
    Call,
    CallText,
    ChoiceEnd,
    Delta,
    End,
    OutputFormat,
    Reply,
    Text,
    ToolChoice,
    UsageRecord,
)
from gateway.dialects.protocol import Encoder
from gateway.errors import Kind, Refusal
from tests.unit.gateway.dialects.requests import Endpoint

shared = settings(suppress_health_check=[HealthCheck.differing_executors])
"""Every dialect runs the same inherited properties, each in another executor."""

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"b": {"type": "string"}, "a": {"type": "integer"}},
    "required": ["b"],
}
REPLY = Reply("id-1", "m", 1_700_000_000)


class StreamFailed(Exception):
    """Raised by a client when a stream ends in an error; its message is the error's."""


@dataclass(frozen=True)
class Answer:
    """An answer as a client reads it.

    `calls` are (name, arguments) of each tool call; `usage` is (prompt tokens, tokens read from the
    cache, output tokens).
    """

    text: str
    calls: tuple[tuple[str, Any], ...]
    reason: str
    usage: tuple[int, int, int]


@dataclass(frozen=True)
class Adapter:
    """The adapter of one dialect.

    The endpoint's smallest request asks to answer the user's "hi"; `streaming` has the fields that
    stream it, or `streaming_action` is the action of its path that does.
    `has_calls`: the dialect has tool calls. `tool` returns fields that declare a function of a name
    and a schema; `with_schema` returns fields that constrain the answer to a schema; None if the
    dialect has neither.
    """

    endpoint: Endpoint
    read_unary: Callable[[bytes], Answer]
    read_stream: Callable[[bytes], Answer]
    read_error: Callable[[bytes], str]
    streaming: dict[str, Any] = field(default_factory=dict)
    streaming_action: str = ""
    has_calls: bool = True
    tool: Callable[[str, dict[str, Any]], dict[str, Any]] | None = None
    with_schema: Callable[[dict[str, Any]], dict[str, Any]] | None = None

    def parse(self, **fields: Any) -> Call:
        """Parse the smallest request with more fields."""
        return self.endpoint.parse(**fields)

    def parse_streaming(self) -> Call:
        """Parse the smallest request as a stream."""
        endpoint = structs.replace(self.endpoint, action=self.streaming_action)
        return endpoint.parse(**self.streaming)

    def encoder(self) -> Encoder:
        """Return the encoder of a stream."""
        return self.endpoint.dialect.encoder(self.parse_streaming(), REPLY)

    def streamed(self, deltas: list[Delta]) -> bytes:
        """Return a complete stream."""
        return self.endpoint.streamed(self.parse_streaming(), deltas, REPLY)

    def unary(self, deltas: list[Delta]) -> bytes:
        """Return the unary answer of the same deltas."""
        return self.endpoint.dialect.encoder(self.parse(), REPLY).unary(deltas)


TOKENS = st.integers(0, 2**31)
CLASSES = st.dictionaries(st.sampled_from(["5m", "1h", "30m", "24h"]), TOKENS, max_size=2)


@st.composite
def usages(draw: st.DrawFn) -> UsageRecord:
    """Draw any record whose sum holds."""
    read, write, fresh = draw(CLASSES), draw(CLASSES), draw(TOKENS)
    total = sum(read.values()) + sum(write.values()) + fresh
    return UsageRecord(total, read, write, fresh, draw(TOKENS), draw(TOKENS))


TEXTS = st.lists(st.builds(Text, st.just(0), st.text(max_size=4)), min_size=1, max_size=3)
ARGUMENTS = st.dictionaries(st.text(max_size=3), st.integers(-9, 9) | st.text(max_size=3))


@st.composite
def calls(draw: st.DrawFn, number: int) -> list[Delta]:
    """Draw a complete tool call in pieces, the first of which has its name."""
    text, pieces = json.dumps(draw(ARGUMENTS)), draw(st.integers(1, 4))
    cut = max(1, len(text) // pieces)
    parts = [text[start : start + cut] for start in range(0, len(text), cut)]
    first = CallText(0, number, f"call_{number}", f"tool_{number}")
    return [first, *(CallText(0, number, arguments=part) for part in parts)]


@st.composite
def answers(draw: st.DrawFn, *, has_calls: bool) -> list[Delta]:
    """Draw any complete answer of one choice: texts, calls after and between them, an end."""
    usage = draw(usages())
    deltas: list[Delta] = [Begin(usage)]
    called = 0
    for is_call in draw(st.lists(st.booleans(), max_size=5)):
        if is_call and has_calls:
            deltas += draw(calls(called))
            called += 1
        else:
            deltas += draw(TEXTS)
    end: Literal["stop", "length"] = draw(st.sampled_from(["stop", "length"]))
    deltas.append(ChoiceEnd(0, "tool_calls" if called else end))
    return [*deltas, End(usage)]


class DialectConformance:
    """The suite. A subclass sets `adapter`."""

    adapter: ClassVar[Adapter]

    def test_minimal_request_gives_the_same_call(self) -> None:
        """Dialects differ on the wire only."""
        call = self.adapter.parse()

        (prompt,) = call.prompts
        assert call.model == "m"
        assert [(s.role, s.text) for s in prompt.segments] == [("user", "hi")]
        assert (call.operation, call.stream, prompt.continues) == ("generate", False, False)
        assert (call.generation.choices, call.generation.stop) == (1, ())

    def test_function_gives_the_same_tool(self) -> None:
        """The schema keeps its key order, because it is part of the prefix."""
        if self.adapter.tool is None:
            assert not self.adapter.has_calls
            return
        (prompt,) = self.adapter.parse(**self.adapter.tool("f", SCHEMA)).prompts

        (tool,) = prompt.tools
        assert (tool.name, tool.parameters) == ("f", json.dumps(SCHEMA, separators=(",", ":")))
        assert tool.path.startswith("tools[0]")
        assert prompt.tool_choice == ToolChoice()

    def test_json_schema_gives_the_same_output_format(self) -> None:
        """The format knows its field, for errors that only the engine detects."""
        if self.adapter.with_schema is None:
            return
        (prompt,) = self.adapter.parse(**self.adapter.with_schema(SCHEMA)).prompts

        wanted = prompt.output_format
        assert (wanted.kind, json.loads(wanted.schema)) == ("json_schema", SCHEMA)
        assert wanted.path != OutputFormat().path

    def test_body_or_path_requests_a_stream(self) -> None:
        """SDKs accept JSON and streams alike, so no header tells them apart."""
        assert self.adapter.parse_streaming().stream

    @shared
    @given(st.data())
    def test_unary_answer_is_the_fold_of_the_stream(self, data: st.DataObject) -> None:
        """Both must carry the same content."""
        deltas = data.draw(answers(has_calls=self.adapter.has_calls))

        whole = self.adapter.read_unary(self.adapter.unary(deltas))
        assert self.adapter.read_stream(self.adapter.streamed(deltas)) == whole
        assert whole.text == "".join(d.text for d in deltas if isinstance(d, Text))
        assert len(whole.calls) == sum(isinstance(d, CallText) and bool(d.name) for d in deltas)

    @shared
    @given(usages())
    def test_usage_matches_the_record(self, usage: UsageRecord) -> None:
        """Charges follow these numbers."""
        deltas: list[Delta] = [Begin(usage), Text(0, "a"), ChoiceEnd(0, "stop"), End(usage)]

        found = self.adapter.read_unary(self.adapter.unary(deltas)).usage
        assert found == (usage.total_in, usage.read_tokens(), usage.out)

    def test_a_truncated_answer_has_its_own_finish_reason(self) -> None:
        """A truncated answer must not look complete."""
        usage = UsageRecord(1, fresh=1, out=1)
        reasons = {
            self.adapter.read_unary(
                self.adapter.unary([Begin(usage), Text(0, "a"), end, End(usage)])
            ).reason
            for end in (ChoiceEnd(0, "stop"), ChoiceEnd(0, "length"))
        }

        assert len(reasons) == 2

    def test_clients_ignore_keep_alives(self) -> None:
        """They may precede the first event and stand between any two."""
        usage = UsageRecord(1, fresh=1, out=1)
        deltas: list[Delta] = [Begin(usage), Text(0, "a"), ChoiceEnd(0, "stop"), End(usage)]
        encoder, ping = self.adapter.encoder(), self.adapter.endpoint.dialect.keep_alive()
        data = b"".join(ping + encoder.stream(delta) for delta in deltas) + encoder.close()

        assert ping
        assert self.adapter.read_stream(data).text == "a"

    def test_stream_error_raises_in_the_client(self) -> None:
        """A stream that only ends looks complete."""
        usage = UsageRecord(1, fresh=1)
        encoder = self.adapter.encoder()
        data = encoder.stream(Begin(usage)) + encoder.stream(Text(0, "half"))
        data += encoder.error_event(Refusal(Kind.BUSY, "engine_restarting", "The engine stopped."))

        with pytest.raises(StreamFailed, match=r"The engine stopped\."):
            self.adapter.read_stream(data)

    @pytest.mark.parametrize("kind", list(Kind))
    def test_every_refusal_has_a_status_and_a_message(self, kind: Kind) -> None:
        """The client reads the reason in the shape that it knows."""
        refusal = Refusal(kind, "some_code", "What went wrong.", param="p")
        status, body = self.adapter.endpoint.dialect.error_body(refusal, "r1")

        assert 400 <= status < 600
        assert self.adapter.read_error(body) == "What went wrong."
        assert (status >= 500) == (kind in (Kind.INTERNAL, Kind.BUSY, Kind.DEADLINE))
