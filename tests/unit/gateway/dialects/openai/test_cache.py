"""Caching fields of OpenAI's dialects: breakpoints and cache directives."""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec
import pytest

from gateway.dialects.canonical import CacheDirectives, Call, RequestMetadata
from tests.golden.transcripts import refusal_of
from tests.tables import each_row
from tests.unit.gateway.dialects.requests import CHAT, COMPLETIONS, HI, RESPONSES, Endpoint

NATIVE = {"prompt_cache_breakpoint": {"mode": "explicit"}}
FOREIGN = {"cache_control": {"type": "ephemeral"}}


def part(**retentions_of: Any) -> dict[str, Any]:
    return {"type": "text", "text": "word", **retentions_of}


def chat(parts: list[dict[str, Any]] | None = None, **fields: Any) -> Call:
    """Return the call of a chat with these parts."""
    content = parts if parts is not None else [part()]
    return CHAT.parse(messages=[{"role": "user", "content": content}], **fields)


def retentions_of(call: Call) -> list[str | None]:
    """Return the retention class of each segment."""
    return [segment.retention for segment in call.prompts[0].segments]


def test_no_caching_field_gives_default_directives() -> None:
    """Clients without caching fields read any cached prefix."""
    assert chat().cache == CacheDirectives()
    assert chat(prompt_cache_key="k", cache_salt="s").cache == CacheDirectives()


@each_row(
    ("field", "options", "expected"),
    [
        (NATIVE, None, "30m?"),
        (NATIVE, {"ttl": "12h"}, "12h"),
        ({"prompt_cache_breakpoint": {"mode": "explicit", "ttl": "12h"}}, None, "12h"),
        ({"prompt_cache_breakpoint": {"mode": "explicit", "ttl": "30m"}}, {"ttl": "12h"}, "30m"),
        (FOREIGN, None, "5m?"),
        (FOREIGN, {"ttl": "12h"}, "5m?"),
        ({"cache_control": {"type": "ephemeral", "ttl": "1h"}}, None, "1h"),
        ({**NATIVE, **FOREIGN}, None, "30m?"),
        ({"cache_control": None, "prompt_cache_breakpoint": None}, None, None),
    ],
)
def test_breakpoint_names_a_class_or_takes_the_requests(
    field: dict[str, Any], options: dict[str, Any] | None, expected: str | None
) -> None:
    """OpenAI's own field overrides cache_control."""
    assert retentions_of(chat([part(**field), part()], prompt_cache_options=options)) == [
        expected,
        None,
    ]


@each_row(
    ("parts", "options", "lookup", "implicit"),
    [
        ([part(**NATIVE)], None, "written", "30m?"),
        ([part(**FOREIGN)], None, "written", None),
        ([part(**FOREIGN), part(**NATIVE)], None, "written", "30m?"),
        ([part()], {}, "written", "30m?"),
        ([part()], {"ttl": "12h"}, "written", "12h"),
        ([part()], {"mode": "implicit"}, "written", "30m?"),
        ([part()], {"mode": "explicit"}, "none", None),
        ([part(**NATIVE)], {"mode": "explicit"}, "written", None),
        ([part(**FOREIGN)], {"mode": "implicit"}, "written", "30m?"),
    ],
)
def test_mode_sets_lookup_and_implicit_breakpoint(
    parts: list[dict[str, Any]],
    options: dict[str, Any] | None,
    lookup: str,
    implicit: str | None,
) -> None:
    """Explicit mode without breakpoints caches nothing.

    Clients with cache_control mark every prefix they want, so implicit writes would bill them for
    nothing.
    """
    ask = chat(parts, prompt_cache_options=options).cache

    assert (ask.lookup, ask.implicit) == (lookup, implicit)


@pytest.mark.parametrize(("options", "most"), [(None, 3), ({"mode": "explicit"}, 4)])
def test_writes_the_latest_breakpoints_and_looks_up_all(
    options: dict[str, Any] | None, most: int
) -> None:
    """A request writes at most four, the implicit one included; more are no error."""
    call = chat([part(**NATIVE)] * 5, prompt_cache_options=options)

    assert retentions_of(call) == ["30m?"] * 5
    assert call.cache.writes_max == most


def test_accepts_cache_control_on_messages_tools_and_requests() -> None:
    """Clients of compatible servers send all three."""
    tool = {"type": "function", "function": {"name": "f"}}
    of_request = chat([part(), part()], **FOREIGN)
    of_tool = chat(tools=[{**tool, **FOREIGN}, {**tool, "function": {"name": "g", **FOREIGN}}])
    of_message = CHAT.parse(messages=[{**HI, **FOREIGN}])

    assert retentions_of(of_request) == [None, "5m?"]
    assert [one.retention for one in of_tool.prompts[0].tools] == ["5m?", "5m?"]
    assert retentions_of(of_message) == ["5m?"]
    assert {c.cache.lookup for c in (of_request, of_tool, of_message)} == {"written"}


@pytest.mark.parametrize("value", ["in_memory", "in-memory"])
def test_deprecated_retention_keeps_the_default_lookup(value: str) -> None:
    """A client that requests a longer retention must not read less."""
    assert chat(prompt_cache_retention=value).cache == CacheDirectives(implicit="in_memory")
    assert chat(prompt_cache_retention="24h").cache == CacheDirectives(implicit="24h")
    assert retentions_of(chat([part(**NATIVE)], prompt_cache_retention="24h")) == ["24h"]


def test_refuses_deprecated_retention_with_a_ttl() -> None:
    """The two contradict each other."""
    refusal = refusal_of(chat, prompt_cache_retention="24h", prompt_cache_options={"ttl": "30m"})

    assert refusal.param == "prompt_cache_retention"
    assert chat(prompt_cache_retention="24h", prompt_cache_options={}).cache.implicit == "24h"


@each_row(
    ("fields", "param"),
    [
        ({"prompt_cache_options": {"ttl": "1h"}}, "prompt_cache_options.ttl"),
        ({"prompt_cache_options": {"mode": "off"}}, "prompt_cache_options.mode"),
        ({"prompt_cache_options": {"prewarm": True}}, "prompt_cache_options.prewarm"),
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
def test_refuses_unknown_ttl_or_mode_with_path(fields: dict[str, Any], param: str) -> None:
    """A silent typo in a ttl would disable the cache."""
    assert refusal_of(chat, **fields).param == param


def test_breakpoints_never_change_the_prompt() -> None:
    """A moved field must not change the tokens."""
    plain, marked = chat([part(), part()]), chat([part(**NATIVE), part(**FOREIGN)])

    assert [s.text for s in plain.prompts[0].segments] == [
        s.text for s in marked.prompts[0].segments
    ]
    assert [s.path for s in plain.prompts[0].segments] == [
        s.path for s in marked.prompts[0].segments
    ]


def partition_of(endpoint: Endpoint, *, separates: bool = True, **fields: Any) -> str:
    body = msgspec.json.encode({**endpoint.smallest, **fields})
    metadata = RequestMetadata(separates_cache_key=separates)
    return endpoint.dialect.parse(body, metadata).partition


@each_row("separates", [False, True])
@each_row("endpoint", [CHAT, COMPLETIONS, RESPONSES])
def test_a_cache_key_is_a_hint_unless_it_separates(endpoint: Endpoint, *, separates: bool) -> None:
    """Sessions of one agent begin alike, and each has a key of its own; a salt always separates."""
    parse = partial(partition_of, endpoint, separates=separates)
    keys = {parse(prompt_cache_key=key) for key in ("one", "two")}
    salted = parse(prompt_cache_key="one", cache_salt="s")

    assert len(keys) == (2 if separates else 1)
    assert salted not in {*keys, ""}


def test_each_partition_field_narrows_the_namespace() -> None:
    """Plain concatenation would let ("ab", "c") read what ("a", "bc") wrote."""
    fields: list[dict[str, Any]] = [
        *(
            {name: value}
            for name in ("cache_salt", "prompt_cache_key", "extra_key")
            for value in ("ab", "cd")
        ),
        {"cache_salt": "a", "prompt_cache_key": "b"},
        {"user": "somebody"},
    ]
    *found, of_user = [partition_of(CHAT, **field) for field in fields]

    assert len({*found, ""}) == 8
    assert partition_of(CHAT, cache_salt="ab", prompt_cache_key="") == found[0]
    assert of_user == ""


def test_responses_accepts_the_same_breakpoints() -> None:
    """Both endpoints share the rules."""
    parts = [{"type": "input_text", "text": "a", **NATIVE}, {"type": "input_text", "text": "b"}]
    items = [{"role": "user", "content": parts}]
    native = RESPONSES.parse(input=items)
    explicit = RESPONSES.parse(input=items, prompt_cache_options={"mode": "explicit", "ttl": "12h"})

    assert (retentions_of(native), native.cache.implicit) == (["30m?", None], "30m?")
    assert (retentions_of(explicit), explicit.cache.implicit) == (["12h", None], None)
