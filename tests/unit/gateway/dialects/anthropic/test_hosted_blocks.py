"""Blocks of hosted tools in Anthropic's histories: told, left out by name, or refused by name."""

from __future__ import annotations

import copy
import typing
from collections.abc import Iterator
from typing import Any

import pytest
from anthropic.types import content_block, content_block_param
from anthropic.types.beta import beta_content_block, beta_content_block_param

from gateway.dialects.anthropic.hosted_blocks import LEFT_OUT, RESULTS, USES
from gateway.dialects.anthropic.prompt import REFUSED_BLOCKS
from gateway.dialects.canonical import Call
from gateway.dialects.tolerance import Mode
from gateway.errors import Kind, Refusal
from tests.unit.gateway.dialects.requests import MESSAGES

OUTPUT = {"type": "code_execution_result", "stdout": "42", "stderr": "", "return_code": 0}
PAGE = {"type": "document", "title": "Rain", "source": {"type": "text", "data": "It rains."}}
USE_OF = {
    "web_search_tool_result": "web_search",
    "web_fetch_tool_result": "web_fetch",
    "code_execution_tool_result": "code_execution",
    "bash_code_execution_tool_result": "bash_code_execution",
    "text_editor_code_execution_tool_result": "text_editor_code_execution",
    "tool_search_tool_result": "tool_search_tool_regex",
    "advisor_tool_result": "advisor",
}
"""The tool of each result."""
CONTENTS: dict[str, Any] = {
    "web_search_tool_result": [
        {
            "type": "web_search_result",
            "title": "Rain",
            "url": "https://a/b",
            "encrypted_content": "EqgfCio",
            "page_age": None,
        }
    ],
    "web_fetch_tool_result": {
        "type": "web_fetch_result",
        "url": "https://a/b",
        "content": PAGE,
        "retrieved_at": None,
    },
    "code_execution_tool_result": {**OUTPUT, "content": []},
    "bash_code_execution_tool_result": {
        **OUTPUT,
        "type": "bash_code_execution_result",
        "stdout": "",
        "stderr": "no such file",
        "return_code": 2,
        "content": [{"type": "bash_code_execution_output", "file_id": "file_1"}],
    },
    "text_editor_code_execution_tool_result": {
        "type": "text_editor_code_execution_view_result",
        "file_type": "text",
        "content": "line 1",
    },
    "tool_search_tool_result": {
        "type": "tool_search_tool_search_result",
        "tool_references": [{"type": "tool_reference", "tool_name": "clock"}],
    },
    "advisor_tool_result": {"type": "advisor_result", "text": "Look outside."},
    "mcp_tool_result": [{"type": "text", "text": "Rain is wet."}],
}
"""A content of each result."""
BLOCKS: dict[str, dict[str, Any]] = {
    "text": {"text": "hello"},
    "thinking": {"thinking": "hm", "signature": "s"},
    "redacted_thinking": {"data": "x"},
    "tool_use": {"id": "toolu_1", "name": "clock", "input": {}},
    "tool_result": {"tool_use_id": "toolu_1", "content": "noon"},
    "server_tool_use": {"id": "srvtoolu_1", "name": "web_search", "input": {"query": "rain"}},
    "mcp_tool_use": {
        "id": "mcptoolu_1",
        "name": "look.up",
        "server_name": "wiki",
        "input": {"q": "rain"},
    },
    **{
        kind: {"tool_use_id": "srvtoolu_1", "content": content}
        for kind, content in CONTENTS.items()
    },
    "document": {"title": "Rain", "source": {"type": "text", "data": "It rains."}},
    "search_result": {
        "title": "Rain",
        "source": "https://a/b",
        "content": [{"type": "text", "text": "It rains."}],
    },
    "mcp_tool_listing": {"mcp_server_name": "wiki", "tools": []},
    "fallback": {"from": {"model": "a"}, "to": {"model": "b"}},
    "container_upload": {"file_id": "file_1"},
    "image": {"source": {"type": "url", "url": "https://a/b.png"}},
    "compaction": {"content": "They spoke of rain."},
    "tool_addition": {"tool": {"type": "tool_reference", "name": "clock"}},
    "tool_removal": {"tool": {"type": "tool_reference", "name": "clock"}},
}
"""A block of each type that the SDK knows."""
IN_USER_TURNS = {"tool_result", "document", "search_result"} | REFUSED_BLOCKS.keys()
DAMAGE: tuple[Any, ...] = (None, 3, True, "", "x" * 600, [], [[1]], [None], {}, {"type": []})


def block(kind: str) -> dict[str, Any]:
    return {"type": kind, **copy.deepcopy(BLOCKS[kind])}


def user(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks) or "hi"}


def assistant(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def use(result: str) -> dict[str, Any]:
    """Return the use that a result answers."""
    if result == "mcp_tool_result":
        return {**block("mcp_tool_use"), "id": "srvtoolu_1"}
    return {**block("server_tool_use"), "name": USE_OF[result]}


def blocks_with(kind: str) -> list[dict[str, Any]]:
    """Return a turn's blocks with one of a type, and with its use or result if it needs one."""
    one = block(kind)
    if kind in USES:
        result = "mcp_tool_result" if kind == "mcp_tool_use" else "web_search_tool_result"
        return [one, {**block(result), "tool_use_id": one["id"]}]
    return [use(kind), one] if kind in RESULTS else [one]


def history_with(kind: str) -> list[dict[str, Any]]:
    """Return a history that holds a block of a type where the API takes it."""
    if kind == "tool_result":
        return [user(), assistant(block("tool_use")), user(block(kind))]
    if kind in IN_USER_TURNS:
        return [user(block(kind))]
    behind = user(block("tool_result")) if kind == "tool_use" else user()
    return [user(), assistant(*blocks_with(kind)), behind]


def parse(messages: object, mode: Mode = "standard") -> Call:
    return MESSAGES.parse(mode, messages=messages)


def refusals(messages: object, mode: Mode) -> set[Kind]:
    """Return the kind of the refusal, if it is one; raises what else the messages lead to."""
    try:
        parse(messages, mode)
    except Refusal as refusal:
        return {refusal.kind}
    return set()


def told(messages: object) -> list[tuple[str, str]]:
    """Return what the model is told: calls as `name arguments`."""
    return [
        (one.role, one.text if one.call is None else f"{one.call.name} {one.call.arguments}")
        for one in parse(messages).prompts[0].segments
    ]


def members(union: Any) -> Iterator[Any]:
    """Yield the classes of a union of unions."""
    found = typing.get_args(union)
    if not found:
        yield union
    for one in found:
        if isinstance(one, type) or typing.get_args(one):
            yield from members(one)


def sdk_types() -> set[str]:
    """Return the types of the SDK's content blocks."""
    unions = (
        content_block.ContentBlock,
        content_block_param.ContentBlockParam,
        beta_content_block.BetaContentBlock,
        beta_content_block_param.BetaContentBlockParam,
    )
    found: set[str] = set()
    for member in {one for union in unions for one in members(union)}:
        if hasattr(member, "model_fields"):
            kind = member.model_fields["type"].annotation
        elif (kind := typing.get_type_hints(member).get("type")) is None:
            continue  # what an annotation says beside the types
        found |= set(typing.get_args(kind))
    return found


def test_every_block_of_the_sdk_is_tried() -> None:
    assert sdk_types() == BLOCKS.keys()
    assert set(USES | RESULTS | LEFT_OUT) < BLOCKS.keys()


@pytest.mark.parametrize("kind", BLOCKS)
def test_a_block_is_taken_or_refused_by_its_name(kind: str) -> None:
    """In the strict mode all blocks of hosted tools are refused."""
    if kind in REFUSED_BLOCKS:
        with pytest.raises(Refusal, match=f"messages.0..content.0.: {kind}: "):
            parse(history_with(kind))
    else:
        call = parse(history_with(kind))
        left_out = (f"messages[].content[].{kind}",) if kind in LEFT_OUT else ()
        assert call.ignored == left_out
    if kind in USES | RESULTS | LEFT_OUT:
        with pytest.raises(Refusal, match=r"is not taken in the strict mode; expected"):
            parse(history_with(kind), "strict")
        with pytest.raises(Refusal, match=r"is not taken in user messages; expected"):
            parse([user(block(kind))])


@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize("mode", ["standard", "lenient"])
def test_a_damaged_block_is_a_refusal(kind: str, mode: Mode) -> None:
    """Of a value of each wrong kind in each field, also within contents, and of each field that is
    not there."""
    whole = history_with(kind)
    for turn in whole:
        blocks = turn["content"] if isinstance(turn["content"], list) else []
        for at, one in enumerate(list(blocks)):
            content = one.get("content")
            inner = content if isinstance(content, dict) else {}
            rest: list[Any] = [{name: one[name] for name in one if name != gone} for gone in one]
            rest += [{**one, name: value} for name in one for value in DAMAGE]
            rest += [
                {**one, "content": {**inner, name: value}} for name in inner for value in DAMAGE
            ]
            for damaged in rest:
                blocks[at] = damaged
                assert refusals(whole, mode) <= {Kind.BAD, Kind.NOT_FOUND}, damaged
            blocks[at] = one


@pytest.mark.parametrize(
    ("kind", "call", "result"),
    [
        ("web_search_tool_result", "web_search", "Rain\nhttps://a/b"),
        ("web_fetch_tool_result", "web_fetch", "https://a/b\nRain\nIt rains."),
        ("code_execution_tool_result", "code_execution", "42"),
        (
            "bash_code_execution_tool_result",
            "bash_code_execution",
            "no such file\nexit status 2",
        ),
        ("text_editor_code_execution_tool_result", "text_editor_code_execution", "line 1"),
        ("tool_search_tool_result", "tool_search_tool_regex", "clock"),
        ("advisor_tool_result", "advisor", "Look outside."),
        ("mcp_tool_result", "wiki_look_up", "Rain is wet."),
    ],
)
def test_a_use_of_a_hosted_tool_is_told_with_its_result(kind: str, call: str, result: str) -> None:
    """As the client's own calls are, between the texts beside it."""
    before, behind = ({"type": "text", "text": words} for words in ("I look.", "It is wet."))

    found = told([user(), assistant(before, *blocks_with(kind), behind), user()])

    assert found[1] == ("assistant", "I look.")
    assert (found[2][0], found[2][1].partition(" ")[0]) == ("assistant", call)
    assert found[3:] == [("tool", result), ("assistant", "It is wet."), ("user", "hi")]


@pytest.mark.parametrize(
    ("kind", "content", "text"),
    [
        (
            "web_search_tool_result",
            {"type": "web_search_tool_result_error", "error_code": "unavailable"},
            "Error: unavailable",
        ),
        (
            "code_execution_tool_result",
            {
                "type": "encrypted_code_execution_result",
                "encrypted_stdout": "EqgfCio",
                "stderr": "late",
                "return_code": 0,
                "content": [],
            },
            "(encrypted)\nlate",
        ),
        (
            "advisor_tool_result",
            {"type": "advisor_redacted_result", "encrypted_content": "EqgfCio"},
            "(encrypted)",
        ),
        (
            "text_editor_code_execution_tool_result",
            {"type": "text_editor_code_execution_create_result", "is_file_update": False},
            "The file was created.",
        ),
        (
            "text_editor_code_execution_tool_result",
            {"type": "text_editor_code_execution_str_replace_result", "lines": ["-a", "+b"]},
            "-a\n+b",
        ),
        ("mcp_tool_result", "Rain is wet.", "Rain is wet."),
        (
            "web_fetch_tool_result",
            {
                "type": "web_fetch_result",
                "url": "https://a/b",
                "content": {
                    "type": "document",
                    "title": "A scan",
                    "source": {"type": "base64", "media_type": "application/pdf", "data": "JVBE"},
                },
            },
            "https://a/b\nA scan",
        ),
    ],
)
def test_a_result_is_what_can_be_read_of_it(kind: str, content: Any, text: str) -> None:
    """What is encrypted, or is no text, is not there to read."""
    result = {**block(kind), "content": content}

    assert told([user(), assistant(use(kind), result), user()])[2] == ("tool", text)


def test_a_failed_mcp_call_is_told_as_failed() -> None:
    result = {**block("mcp_tool_result"), "is_error": True}

    assert told([user(), assistant(use("mcp_tool_result"), result)])[2][1] == "Error: Rain is wet."


def test_code_that_called_the_clients_tool_has_its_result_in_a_later_turn() -> None:
    """As programmatic tool calling writes it."""
    running = {**block("server_tool_use"), "name": "code_execution"}
    call = {**block("tool_use"), "caller": {"type": "code_execution_20260120", "tool_id": "s"}}
    messages = [user(), assistant(running, call), user(block("tool_result"))]
    ended = assistant(block("code_execution_tool_result"), {"type": "text", "text": "At noon."})

    assert told([*messages, ended, user()])[1:-1] == [
        ("assistant", 'code_execution {"query":"rain"}'),
        ("assistant", "clock {}"),
        ("tool", "noon"),
        ("tool", "42"),
        ("assistant", "At noon."),
    ]
    with pytest.raises(Refusal, match=r"messages\[1\]\.content\[0\]: this server runs no server"):
        parse(messages)


def test_a_paused_turn_goes_on_behind_its_result() -> None:
    """An answer that the hosted API had paused is sent back as the last turn."""
    prompt = parse([user(), assistant(*blocks_with("web_search_tool_result"))]).prompts[0]

    assert (prompt.add_generation_prompt, prompt.continues) == (True, False)


def test_results_have_uses() -> None:
    """A result without its use, a second one, and an id of two uses."""
    used, result = blocks_with("web_search_tool_result")
    for blocks in ([result], [used, result, result], [used, result, used, result]):
        with pytest.raises(Refusal, match="id"):
            parse([user(), assistant(*blocks), user()])


def test_a_breakpoint_on_a_hosted_block_marks_its_end() -> None:
    marked = {"cache_control": {"type": "ephemeral"}}
    used, result = blocks_with("web_search_tool_result")

    segments = parse([user(), assistant(used, {**result, **marked}), user()]).prompts[0].segments

    assert [one.role for one in segments if one.retention is not None] == ["tool"]


# --- texts with a source -------------------------------------------------------------------------

PDF = {"type": "base64", "media_type": "application/pdf", "data": "JVBE"}
PARTS = {"type": "content", "content": [{"type": "text", "text": "It rains."}]}


@pytest.mark.parametrize(
    ("document", "text"),
    [
        (block("document"), "Rain\nIt rains."),
        ({**block("document"), "context": "A letter."}, "Rain\nA letter.\nIt rains."),
        ({"type": "document", "source": PARTS}, "It rains."),
        ({"type": "document", "source": {"type": "content", "content": "It snows."}}, "It snows."),
        (block("search_result"), "Rain\nhttps://a/b\nIt rains."),
    ],
)
def test_a_document_that_is_a_text_is_its_text(document: dict[str, Any], text: str) -> None:
    """In a user's turn and in a tool's result, with its breakpoint."""
    marked = {**document, "cache_control": {"type": "ephemeral"}}
    result = {**block("tool_result"), "content": [marked]}

    (segment,) = parse([user(marked)]).prompts[0].segments
    assert (segment.text, segment.retention is not None) == (text, True)
    assert told([user(), assistant(block("tool_use")), user(result)])[-1] == ("tool", text)


@pytest.mark.parametrize(
    "document",
    [
        {"type": "document", "source": PDF},
        {"type": "document", "source": {"type": "url", "url": "https://a/b.pdf"}},
        {"type": "document", "source": {"type": "file", "file_id": "file_1"}},
        {
            "type": "document",
            "source": {"type": "content", "content": [{"type": "image", "source": {}}]},
        },
    ],
)
def test_a_document_that_is_no_text_is_refused(document: dict[str, Any]) -> None:
    with pytest.raises(Refusal, match=r"content\[0\]: document: the model reads only text"):
        parse([user(document)])


def test_citations_that_are_asked_for_are_named() -> None:
    """Answers cite nothing, so the strict mode refuses them."""
    document = {**block("document"), "citations": {"enabled": True}}

    assert parse([user(document)]).ignored == ("messages[].content[].citations",)
    with pytest.raises(Refusal, match="citations: this field is not supported"):
        parse([user(document)], "strict")
    assert not parse([user({**document, "citations": {"enabled": False}})]).ignored
