"""The caching fields of OpenAI's dialects: which breakpoints they make, and what they ask."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.dialects.canonical import CacheDirectives, Call
from gateway.dialects.openai import chat as openai_chat
from gateway.dialects.openai import responses as openai_responses
from gateway.errors import Refusal

NATIVE = {"prompt_cache_breakpoint": {"mode": "explicit"}}
FOREIGN = {"cache_control": {"type": "ephemeral"}}


def part(**marks: Any) -> dict[str, Any]:
    return {"type": "text", "text": "word", **marks}


def chat(parts: list[dict[str, Any]] | None = None, **fields: Any) -> Call:
    """A question of these parts."""
    content = parts if parts is not None else [part()]
    body = {"model": "m", "messages": [{"role": "user", "content": content}], **fields}
    return openai_chat.DIALECT.parse(json.dumps(body).encode())


def marks(call: Call) -> list[str | None]:
    """The class of each segment's breakpoint."""
    return [segment.retention for segment in call.prompts[0].segments]


def test_without_a_caching_field_nothing_is_asked_of_the_cache() -> None:
    """Whatever it holds is read, to the token: what callers that know nothing of it want."""
    assert chat().cache == CacheDirectives()
    assert chat(prompt_cache_key="k", cache_salt="s").cache == CacheDirectives()


@pytest.mark.parametrize(
    ("mark", "options", "expected"),
    [
        (NATIVE, None, "30m"),
        (NATIVE, {"ttl": "12h"}, "12h"),
        ({"prompt_cache_breakpoint": {"mode": "explicit", "ttl": "12h"}}, None, "12h"),
        ({"prompt_cache_breakpoint": {"mode": "explicit", "ttl": "30m"}}, {"ttl": "12h"}, "30m"),
        (FOREIGN, None, "5m"),
        (FOREIGN, {"ttl": "12h"}, "5m"),
        ({"cache_control": {"type": "ephemeral", "ttl": "1h"}}, None, "1h"),
        ({**NATIVE, **FOREIGN}, None, "30m"),
        ({"cache_control": None, "prompt_cache_breakpoint": None}, None, None),
    ],
)
def test_a_mark_names_its_class_or_takes_the_requests(
    mark: dict[str, Any], options: dict[str, Any] | None, expected: str | None
) -> None:
    """Two spellings of one thing; where both are there, OpenAI's own counts."""
    assert marks(chat([part(**mark), part()], prompt_cache_options=options)) == [expected, None]


@pytest.mark.parametrize(
    ("parts", "options", "lookup", "implicit"),
    [
        ([part(**NATIVE)], None, "written", "30m"),
        ([part(**FOREIGN)], None, "written", None),
        ([part(**FOREIGN), part(**NATIVE)], None, "written", "30m"),
        ([part()], {}, "written", "30m"),
        ([part()], {"ttl": "12h"}, "written", "12h"),
        ([part()], {"mode": "implicit"}, "written", "30m"),
        ([part()], {"mode": "explicit"}, "none", None),
        ([part(**NATIVE)], {"mode": "explicit"}, "written", None),
        ([part(**FOREIGN)], {"mode": "implicit"}, "written", "30m"),
    ],
)
def test_the_mode_decides_what_is_read_and_kept_unasked(
    parts: list[dict[str, Any]],
    options: dict[str, Any] | None,
    lookup: str,
    implicit: str | None,
) -> None:
    """Explicit without a mark is no caching at all; marks of the other spelling name all there is
    to keep, so that nobody is billed for a write that was never asked for."""
    ask = chat(parts, prompt_cache_options=options).cache

    assert (ask.lookup, ask.implicit) == (lookup, implicit)


@pytest.mark.parametrize(("options", "most"), [(None, 3), ({"mode": "explicit"}, 4)])
def test_of_many_marks_the_latest_are_written_and_all_stay(
    options: dict[str, Any] | None, most: int
) -> None:
    """Four writes a request, of which the implicit one is one; nobody is refused for a mark, and
    the earlier ones are still looked up."""
    call = chat([part(**NATIVE)] * 5, prompt_cache_options=options)

    assert marks(call) == ["30m"] * 5
    assert call.cache.writes_max == most


def test_a_mark_of_a_message_a_tool_or_the_request_is_a_breakpoint_too() -> None:
    """Clients of compatible servers put it on all of them."""
    tool = {"type": "function", "function": {"name": "f"}}
    of_request = chat([part(), part()], **FOREIGN)
    of_tool = chat(tools=[{**tool, **FOREIGN}, {**tool, "function": {"name": "g", **FOREIGN}}])
    body = {"model": "m", "messages": [{"role": "user", "content": "hi", **FOREIGN}]}
    of_message = openai_chat.DIALECT.parse(json.dumps(body).encode())

    assert marks(of_request) == [None, "5m"]
    assert [one.retention for one in of_tool.prompts[0].tools] == ["5m", "5m"]
    assert marks(of_message) == ["5m"]
    assert {c.cache.lookup for c in (of_request, of_tool, of_message)} == {"written"}


@pytest.mark.parametrize("value", ["in_memory", "in-memory"])
def test_the_deprecated_field_is_a_limit_and_matches_as_without_it(value: str) -> None:
    """Its models matched whatever was there; a caller who asks for longer must not get less."""
    assert chat(prompt_cache_retention=value).cache == CacheDirectives(implicit="in_memory")
    assert chat(prompt_cache_retention="24h").cache == CacheDirectives(implicit="24h")
    assert marks(chat([part(**NATIVE)], prompt_cache_retention="24h")) == ["24h"]


def test_a_limit_and_a_promise_at_once_are_refused() -> None:
    """They contradict each other, and one would be dropped in silence."""
    with pytest.raises(Refusal) as raised:
        chat(prompt_cache_retention="24h", prompt_cache_options={"ttl": "30m"})

    assert raised.value.param == "prompt_cache_retention"
    assert chat(prompt_cache_retention="24h", prompt_cache_options={}).cache.implicit == "24h"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt_cache_options": {"ttl": "1h"}}, "prompt_cache_options.ttl"),
        ({"prompt_cache_options": {"mode": "off"}}, "prompt_cache_options.mode"),
        ({"prompt_cache_options": {"prewarm": True}}, "prompt_cache_options"),
        ({"prompt_cache_retention": "1h"}, "prompt_cache_retention"),
        ({"cache_control": {"type": "forever"}}, "cache_control.type"),
        ({"cache_control": {"type": "ephemeral", "ttl": "30m"}}, "cache_control.ttl"),
        (
            {"parts": [part(prompt_cache_breakpoint={"mode": "implicit"})]},
            "messages[0].content[0].prompt_cache_breakpoint.mode",
        ),
        (
            {"parts": [part(cache_control={"type": "ephemeral", "ttl": 5})]},
            "messages[0].content[0].cache_control.ttl",
        ),
    ],
)
def test_a_class_or_mode_that_is_none_is_refused_by_its_path(
    fields: dict[str, Any], param: str
) -> None:
    """A typo in a ttl would cost its author the cache."""
    with pytest.raises(Refusal) as raised:
        chat(**fields)

    assert raised.value.param == param


def test_marks_are_never_part_of_the_prompt() -> None:
    """Moving a breakpoint must not change what the model sees, or what was cached."""
    plain, marked = chat([part(), part()]), chat([part(**NATIVE), part(**FOREIGN)])

    assert [s.text for s in plain.prompts[0].segments] == [
        s.text for s in marked.prompts[0].segments
    ]
    assert [s.path for s in plain.prompts[0].segments] == [
        s.path for s in marked.prompts[0].segments
    ]


def test_each_part_of_a_partition_narrows_it() -> None:
    """A value under one name is not the same value under another."""
    fields: list[dict[str, Any]] = [
        {name: "x"} for name in ("cache_salt", "prompt_cache_key", "extra_key")
    ]
    found = {chat(**field).partition for field in fields}

    assert len(found) == 3
    assert "" not in found


def test_responses_know_the_same_marks() -> None:
    """One set of rules for both endpoints."""
    parts = [{"type": "input_text", "text": "a", **NATIVE}, {"type": "input_text", "text": "b"}]
    body: dict[str, Any] = {"model": "m", "input": [{"role": "user", "content": parts}]}
    native = openai_responses.DIALECT.parse(json.dumps(body).encode())
    explicit = openai_responses.DIALECT.parse(
        json.dumps({**body, "prompt_cache_options": {"mode": "explicit", "ttl": "12h"}}).encode()
    )

    assert (marks(native), native.cache.implicit) == (["30m", None], "30m")
    assert (marks(explicit), explicit.cache.implicit) == (["12h", None], None)
