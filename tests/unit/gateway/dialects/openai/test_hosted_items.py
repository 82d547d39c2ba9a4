"""Items of hosted tools in the input of responses: told, left out by name, or refused by name."""

from __future__ import annotations

import copy
import typing
from typing import Any

import pytest
from openai.types.responses import response_input_item, response_item, response_output_item

from gateway.dialects.canonical import Call
from gateway.dialects.openai.responses.hosted_items import KINDS, REFUSED
from gateway.dialects.tolerance import Mode
from gateway.errors import Kind, Refusal
from tests.unit.gateway.dialects.requests import RESPONSES

ACTION = {"type": "exec", "command": ["ls"], "env": {}}
OPERATION = {"type": "delete_file", "path": "a.txt"}
ITEMS: dict[str, dict[str, Any]] = {
    "message": {"role": "user", "content": "hello"},
    "function_call": {"call_id": "c", "name": "clock", "arguments": "{}"},
    "function_call_output": {"call_id": "c", "output": "noon"},
    "reasoning": {"id": "rs_1", "summary": [{"type": "summary_text", "text": "hm"}]},
    "item_reference": {"id": "msg_1_0"},
    "web_search_call": {"id": "ws_1", "status": "completed", "action": {"type": "search"}},
    "file_search_call": {
        "id": "fs_1",
        "status": "completed",
        "queries": ["rain"],
        "results": [{"filename": "a.txt", "text": "It rains.", "score": 0.5, "attributes": {}}],
    },
    "code_interpreter_call": {
        "id": "ci_1",
        "status": "completed",
        "container_id": "cntr_1",
        "code": "print(6 * 7)",
        "outputs": [{"type": "logs", "logs": "42"}, {"type": "image", "url": "https://a/b"}],
    },
    "image_generation_call": {"id": "ig_1", "status": "completed", "result": "iVBOR" * 100},
    "computer_call": {"id": "cu_1", "call_id": "k", "pending_safety_checks": [], "status": "x"},
    "computer_call_output": {"call_id": "k", "output": {"type": "computer_screenshot"}},
    "mcp_list_tools": {"id": "ml_1", "server_label": "wiki", "tools": [{"name": "look"}]},
    "mcp_call": {
        "id": "mcp_1",
        "server_label": "wiki",
        "name": "look.up",
        "arguments": '{"q":"rain"}',
        "output": "Rain is wet.",
    },
    "mcp_approval_request": {
        "id": "ar_1",
        "server_label": "wiki",
        "name": "write",
        "arguments": "{}",
    },
    "mcp_approval_response": {"approval_request_id": "ar_1", "approve": False, "reason": "no"},
    "local_shell_call": {"id": "ls_1", "call_id": "l", "action": ACTION, "status": "completed"},
    "local_shell_call_output": {"id": "l", "output": "a.txt"},
    "shell_call": {"call_id": "s", "action": {"commands": ["ls"]}},
    "shell_call_output": {
        "call_id": "s",
        "output": [{"stdout": "a.txt", "stderr": "", "outcome": {"type": "exit"}}],
    },
    "apply_patch_call": {"call_id": "p", "operation": OPERATION, "status": "completed"},
    "apply_patch_call_output": {"call_id": "p", "status": "completed"},
    "program": {"id": "pr_1", "call_id": "g", "code": "return 1", "fingerprint": "f"},
    "program_output": {"id": "po_1", "call_id": "g", "result": "1", "status": "completed"},
    "custom_tool_call": {"call_id": "u", "name": "write", "input": "text"},
    "custom_tool_call_output": {"call_id": "u", "output": "done"},
    "tool_search_call": {"arguments": {}, "id": "ts_1"},
    "tool_search_output": {"tools": []},
    "additional_tools": {"role": "developer", "tools": []},
    "configuration_update": {"reasoning": {"effort": "low"}},
    "compaction": {"encrypted_content": "gAAAA"},
    "compaction_trigger": {},
}
"""An item of each type that the SDK knows."""
ANSWERS = {
    "function_call": "function_call_output",
    "local_shell_call": "local_shell_call_output",
    "shell_call": "shell_call_output",
    "apply_patch_call": "apply_patch_call_output",
    "program": "program_output",
}
HELLO = {"type": "message", "role": "user", "content": "hi"}
DAMAGE: tuple[Any, ...] = (None, 3, True, "", "x" * 600, [], [[1]], [None], {}, {"type": []})


def item_of(kind: str) -> dict[str, Any]:
    return {"type": kind, **copy.deepcopy(ITEMS[kind])}


def turn_with(kind: str) -> list[dict[str, Any]]:
    """Return a history with an item, with its call or result if it needs one."""
    calls = {result: call for call, result in ANSWERS.items()}
    before = [item_of(calls[kind])] if kind in calls else []
    behind = [item_of(ANSWERS[kind])] if kind in ANSWERS else []
    return [HELLO, *before, item_of(kind), *behind, HELLO]


def parse(items: object, mode: Mode = "standard") -> Call:
    return RESPONSES.parse(mode, input=items)


def refusals(items: object, mode: Mode) -> set[Kind]:
    """Return the kind of the refusal, if it is one; raises what else the items lead to."""
    try:
        parse(items, mode)
    except Refusal as refusal:
        return {refusal.kind}
    return set()


def told(items: object) -> list[tuple[str, str]]:
    """Return what the model is told: calls as `name arguments`."""
    call = parse(items)
    return [
        (one.role, one.text if one.call is None else f"{one.call.name} {one.call.arguments}")
        for one in call.prompts[0].segments
    ]


def sdk_types() -> set[str]:
    """Return the types of the SDK's unions of items."""
    found: set[str] = set()
    for module, name in (
        (response_input_item, "ResponseInputItem"),
        (response_item, "ResponseItem"),
        (response_output_item, "ResponseOutputItem"),
    ):
        for member in typing.get_args(typing.get_args(getattr(module, name))[0]):
            kind = member.model_fields["type"].annotation
            found |= {
                value
                for one in (kind, *typing.get_args(kind))
                for value in typing.get_args(one)
                if isinstance(value, str)
            }
    return found


def test_every_item_of_the_sdk_is_tried() -> None:
    assert sdk_types() == ITEMS.keys()
    assert not KINDS.keys() & REFUSED.keys()
    assert KINDS.keys() | REFUSED.keys() < ITEMS.keys()


@pytest.mark.parametrize("kind", ITEMS)
def test_an_item_is_taken_or_refused_by_its_name(kind: str) -> None:
    """In the strict mode all items of hosted tools are refused."""
    if kind in REFUSED:
        with pytest.raises(Refusal, match=f"input.1..type: unsupported item type '{kind}'"):
            parse(turn_with(kind))
    else:
        call = parse(turn_with(kind))
        assert call.prompts or kind == "item_reference"  # what that names is looked up first
    if kind in KINDS:
        with pytest.raises(Refusal, match=r"input.1..type: .* in the strict mode; expected"):
            parse(turn_with(kind), "strict")


@pytest.mark.parametrize("kind", ITEMS)
@pytest.mark.parametrize("mode", ["standard", "lenient"])
def test_a_damaged_item_is_a_refusal(kind: str, mode: Mode) -> None:
    """Of a value of each wrong kind in each field, and of each field that is not there."""
    whole = turn_with(kind)
    for at, item in enumerate(whole):
        rest = [{name: item[name] for name in item if name != left_out} for left_out in item]
        for damaged in (*rest, *({**item, name: value} for name in item for value in DAMAGE)):
            kinds = refusals([*whole[:at], damaged, *whole[at + 1 :]], mode)
            assert kinds <= {Kind.BAD, Kind.NOT_FOUND}, damaged


@pytest.mark.parametrize(
    ("kind", "call", "result"),
    [
        ("mcp_call", 'wiki_look_up {"q":"rain"}', "Rain is wet."),
        ("code_interpreter_call", 'code_interpreter {"code":"print(6 * 7)"}', "42"),
        ("file_search_call", 'file_search {"queries":["rain"]}', "a.txt\nIt rains."),
        ("image_generation_call", 'image_generation {"prompt":""}', "An image."),
        ("local_shell_call", 'local_shell {"type":"exec","command":["ls"],"env":{}}', "a.txt"),
        ("shell_call", 'shell {"commands":["ls"]}', "a.txt"),
        (
            "apply_patch_call",
            'apply_patch {"type":"delete_file","path":"a.txt"}',
            "completed",
        ),
        ("program", 'program {"code":"return 1"}', "1"),
    ],
)
def test_a_call_that_others_made_is_told_with_its_result(kind: str, call: str, result: str) -> None:
    """As the client's own calls are; an image is not among it."""
    assert told(turn_with(kind)) == [
        ("user", "hi"),
        ("assistant", call),
        ("tool", result),
        ("user", "hi"),
    ]


def test_what_says_nothing_is_left_out_by_name() -> None:
    """A search's results, and a server's tools, are not in their items; nor are those of a file
    search that were not asked for."""
    files = {**item_of("file_search_call"), "results": None}
    call = parse([HELLO, item_of("web_search_call"), item_of("mcp_list_tools"), files, HELLO])

    assert [one.text for one in call.prompts[0].segments] == ["hi", "hi"]
    assert call.ignored == tuple(
        f"input[].{name}" for name in ("web_search_call", "mcp_list_tools", "file_search_call")
    )


def test_an_answer_with_hosted_calls_is_one_turn_around_their_results() -> None:
    """As a hosted API gives it: a thought, a call, the text that says what was found."""
    answer = {"type": "message", "role": "assistant", "content": "It is wet."}
    items = [HELLO, item_of("reasoning"), item_of("mcp_call"), answer, HELLO]

    assert told(items) == [
        ("user", "hi"),
        ("assistant", "hm"),
        ("assistant", 'wiki_look_up {"q":"rain"}'),
        ("tool", "Rain is wet."),
        ("assistant", "It is wet."),
        ("user", "hi"),
    ]


@pytest.mark.parametrize("error", ["away", {"type": "protocol_error", "code": 1}])
def test_a_call_that_failed_is_told_as_failed(error: object) -> None:
    items = [HELLO, {**item_of("mcp_call"), "output": None, "error": error}]

    assert told(items)[-1][1].startswith("Error: ")


def test_an_approval_is_what_became_of_it() -> None:
    """Denied it is told, carried out the call tells it, and this server can carry out none."""
    request = item_of("mcp_approval_request")
    denied = item_of("mcp_approval_response")
    approved = {**denied, "approve": True}
    made = {**item_of("mcp_call"), "approval_request_id": "ar_1"}

    assert told([HELLO, request, denied, HELLO])[1:3] == [
        ("assistant", "wiki_write {}"),
        ("tool", "The user did not approve this call: no"),
    ]
    assert len(told([HELLO, request, approved, made])) == 3
    with pytest.raises(Refusal, match=r"input\[2\]\.approve: this server calls no MCP tools"):
        parse([HELLO, request, approved])


def test_calls_without_ids_have_them_by_their_place() -> None:
    """Clients leave out ids of items that the server did not store."""
    bare = {name: value for name, value in item_of("mcp_call").items() if name != "id"}
    segments = parse([HELLO, bare, bare, HELLO]).prompts[0].segments
    ids = [one.call.call_id for one in segments if one.call is not None]

    assert len(set(ids)) == len(ids) == 2
    assert [one.answers for one in segments if one.role == "tool"] == ids
