"""OpenAI's responses: accepted requests and refusals."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.api import Sampling
from gateway.dialects.canonical import (
    CacheDirectives,
    Call,
    EarlierItems,
    GenerationParameters,
    ItemReference,
    OutputFormat,
    RequestMetadata,
    Segment,
    ThreadDirectives,
    Tool,
    ToolCall,
    ToolChoice,
)
from gateway.dialects.openai.responses import dialect as openai_responses
from gateway.dialects.tolerance import Mode
from gateway.errors import Kind, Refusal
from tests.tables import each_row
from tests.unit.gateway.dialects.requests import HI, RESPONSES

DIALECT = openai_responses.DIALECT
LOGPROBS = ["message.output_text.logprobs"]
CLOCK: dict[str, Any] = {"type": "function", "name": "clock", "parameters": {}, "strict": None}
CALL = {"type": "function_call", "call_id": "a", "name": "clock", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "a", "output": "noon"}


def parse(items: object = "hi", tolerance: Mode = "standard", /, **fields: Any) -> Call:
    return RESPONSES.parse(tolerance, input=items, **fields)


def refused(items: object = "hi", **fields: Any) -> Refusal:
    return RESPONSES.refused("strict", input=items, **fields)


def segments(items: object, **fields: Any) -> tuple[Segment, ...]:
    return parse(items, **fields).prompts[0].segments


def test_defaults_are_plain_sampling_and_a_remembered_prompt() -> None:
    """A later request may be compared with the remembered prompt."""
    call = parse()

    assert call.generation == GenerationParameters()
    assert call.prompts[0].segments == (Segment("user", "hi", "input"),)
    assert (call.operation, call.stream, call.partition) == ("generate", False, "")
    assert (call.cache.lookup, call.cache.implicit, call.cache.remember) == (None, None, True)


def test_honoured_fields_reach_the_call() -> None:
    """A field that is decoded and dropped is worse than a refused one."""
    call = parse(
        instructions="Be brief.",
        stream=True,
        stream_options={"include_obfuscation": True},
        max_output_tokens=9,
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.1,
        seed=7,
        include=LOGPROBS,
        top_logprobs=3,
        min_tokens=2,
        ignore_eos=True,
        stop_token_ids=[5],
        priority=-3,
        user="u",
        tools=[CLOCK],
        tool_choice="required",
        parallel_tool_calls=False,
        text={"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}}},
    )

    assert call.generation == GenerationParameters(
        max_tokens=9,
        sampling=Sampling(0.5, 40, 0.9, 0.1, seed=7, logprobs=3),
        stop_token_ids=(5,),
        ignore_eos=True,
        min_tokens=2,
    )
    assert (call.stream, call.priority, call.client_user) == (True, -3, "u")
    (prompt,) = call.prompts
    assert prompt.segments[0] == Segment("system", "Be brief.", "instructions")
    assert prompt.segments[1].message == 1
    assert prompt.tools == (Tool("clock", "", '{"type":"object","properties":{}}', "tools[0]"),)
    assert prompt.tool_choice == ToolChoice("required", (), False)
    assert prompt.output_format == OutputFormat(
        "json_schema", '{"type":"object"}', "text.format.schema", strict=False
    )


def test_accepts_fields_at_their_defaults() -> None:
    """Agents send all of these."""
    neutral = {
        "store": True,
        "background": False,
        "truncation": "disabled",
        "service_tier": "auto",
        "reasoning": {"effort": None, "summary": None},
        "include": ["reasoning.encrypted_content"],
        "previous_response_id": None,
        "conversation": None,
        "max_tool_calls": 3,
        "context_management": [],
        "metadata": {"a": "b"},
        "safety_identifier": "s",
        "text": {"format": {"type": "text"}},
    }

    assert parse(**neutral).prompts == parse().prompts


def test_accepts_the_items_of_an_answer() -> None:
    """An agent appends the output and its results to the input in every turn."""
    output = [
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {
            "type": "message",
            "id": "msg_1",
            "status": "completed",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Hm.", "annotations": [], "logprobs": []}],
        },
        {**CALL, "id": "fc_1", "status": "completed"},
        {**CALL, "call_id": "b", "arguments": '{ "z": 1 }'},
    ]
    found = segments([HI, *output, {**RESULT, "call_id": "b"}, RESULT, HI])

    assert found == (
        Segment("user", "hi", "input[0].content"),
        Segment("assistant", "Hm.", "input[2].content[0]", message=1),
        Segment("assistant", "", "input[3]", message=1, call=ToolCall("a", "clock", "{}")),
        Segment("assistant", "", "input[4]", message=1, call=ToolCall("b", "clock", '{"z":1}')),
        Segment("tool", "noon", "input[6].output", "clock", 2, answers="a"),
        Segment("tool", "noon", "input[5].output", "clock", 3, answers="b"),
        Segment("user", "hi", "input[7].content", message=4),
    )


@pytest.mark.parametrize(
    "between",
    [
        [HI],
        [{"role": "developer", "content": "A note."}],
        [{"type": "reasoning", "summary": []}, HI, {"role": "assistant", "content": "Wait."}],
    ],
)
def test_result_follows_its_call_whatever_stands_between(between: list[dict[str, Any]]) -> None:
    """A client lets its user write while a tool runs: without the result behind its call, every
    later request of the conversation would be refused."""
    other = {**CALL, "call_id": "b"}
    results = [{**RESULT, "call_id": "b", "output": "one"}, RESULT]
    apart = parse([HI, CALL, other, *between, *results], store=False).prompts[0].segments
    later = parse([HI, CALL, other, *between, *results, HI], store=False).prompts[0].segments

    assert [s.answers or (s.call.call_id if s.call else None) for s in apart[:5]] == [
        None,
        "a",
        "b",
        "a",
        "b",
    ]
    assert [(s.name, s.text) for s in apart[3:5]] == [("clock", "noon"), ("clock", "one")]
    assert later[: len(apart)] == apart
    assert [s.message for s in apart] == sorted(s.message for s in apart)


def test_call_of_a_stored_response_is_answered_behind_a_message() -> None:
    """The history and the input are one list."""
    fields = {"model": "m", "input": [HI, RESULT], "previous_response_id": "resp_1"}
    earlier = EarlierItems((HI, CALL))
    call = DIALECT.parse(json.dumps(fields).encode(), RequestMetadata(earlier=earlier))

    roles = [part.role for part in call.prompts[0].segments]
    assert roles == ["user", "assistant", "tool", "user"]


def test_calls_without_text_are_an_assistant_turn() -> None:
    """They must not become part of the user's message."""
    found = segments([HI, CALL, {**RESULT, "output": [{"type": "input_text", "text": "noon"}]}])

    assert [(s.role, s.message, s.text) for s in found] == [
        ("user", 0, "hi"),
        ("assistant", 1, ""),
        ("tool", 2, "noon"),
    ]


@each_row(
    ("items", "param", "says"),
    [
        ([], "input", "required"),
        (None, "input", "required"),
        ("", "input", ">= 1"),
        ([{"type": "reasoning"}], "input", "no item has content"),
        ([HI, CALL], "input[1]", "'a'"),
        ([HI, CALL, HI], "input[2]", "'a'"),
        ([HI, CALL, HI, {**RESULT, "call_id": "b"}], "input[2]", "'a'"),
        ([HI, RESULT, CALL], "input[1].call_id", "'a'"),
        ([HI, RESULT], "input[1].call_id", "'a'"),
        ([HI, CALL, RESULT, RESULT], "input[3].call_id", "'a'"),
        ([{"type": "item_reference"}], "input[0].id", "missing required"),
        ([{"type": "item_reference", "id": 3}], "input[0].id", "Expected `str`"),
        ([{"id": "msg_1_0"}, {"id": "msg_1_0"}], "input[1]", "duplicate item found"),
        ([{"type": "web_search_call"}], "input[0].type", "web_search_call"),
        ([{"type": 3}], "input[0].type", "Expected `str`"),
        ([{"role": "tool", "content": "x"}], "input[0].role", "tool"),
        ([{**HI, "contents": "x"}], "input[0].contents", "did you mean `content`"),
        ([{"role": "user", "content": []}], "input[0].content", "empty"),
        (
            [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}],
            "input[0].content[0]",
            "reads only text",
        ),
        (
            [{"role": "user", "content": [{"type": "refusal", "refusal": "x"}]}],
            "input[0].content[0].type",
            "refusal",
        ),
        ([{"role": "user", "content": [{"type": "x" * 500}]}], "input[0].content[0].type", "xxx"),
        ([{"role": "user", "content": [{"type": {}}]}], "input[0].content[0].type", "unknown"),
        ([HI, {"type": "reasoning", "content": True}], "input[1].content", "got `boolean`"),
        ([HI, {"type": "reasoning", "summary": 5}], "input[1].summary", "got `number`"),
    ],
)
def test_refuses_inconsistent_items(items: object, param: str, says: str) -> None:
    """A template would render them, and the model would read nonsense."""
    refusal = refused(items)

    assert refusal.param == param
    assert says in refusal.message
    assert len(refusal.message) < 500


def test_continued_request_is_parsed_with_its_history() -> None:
    """First without a prompt; a call that was truncated is left out."""
    body = json.dumps({"model": "m", "input": "and?", "previous_response_id": "resp_1"}).encode()
    cut = {"type": "function_call", "call_id": "c", "name": "n", "arguments": '{"a', "id": "fc"}
    history = (
        {"role": "user", "content": "hi"},
        {**cut, "status": "incomplete"},
    )
    pending = DIALECT.parse(body)
    call = DIALECT.parse(body, RequestMetadata(earlier=EarlierItems(history)))

    assert (pending.thread, pending.prompts) == (ThreadDirectives("resp_1", is_pending=True), ())
    own = b'[{"type":"message","role":"user","content":[{"type":"input_text","text":"and?"}]}]'
    assert call.thread == ThreadDirectives("resp_1", store=True, input=own)
    assert [part.text for part in call.prompts[0].segments] == ["hi", "and?"]


def test_text_behind_a_call_belongs_to_its_turn() -> None:
    """A model may write on behind its call; the answer comes back with the call's result."""
    said = {"type": "message", "role": "assistant", "content": "I look."}
    other = {**CALL, "call_id": "b"}
    answered = {**RESULT, "call_id": "b"}
    segments = parse([HI, CALL, said, other, RESULT, answered]).prompts[0].segments

    assert [(part.role, part.message) for part in segments] == [
        ("user", 0),
        *[("assistant", 1)] * 3,
        ("tool", 2),
        ("tool", 3),
    ]


def test_stored_items_may_be_continued_without_input() -> None:
    """A client may have put its message into the conversation; counting needs no input either."""
    body = json.dumps({"model": "m", "conversation": "conv_1"}).encode()
    history = ({"role": "user", "content": "hi"},)
    call = DIALECT.parse(body, RequestMetadata(earlier=EarlierItems(history)))

    assert DIALECT.parse(body).thread == ThreadDirectives(conversation_id="conv_1", is_pending=True)
    assert [part.text for part in call.prompts[0].segments] == ["hi"]
    assert call.thread.input == b"[]"
    with pytest.raises(Refusal, match="input: this field is required") as refusal:
        DIALECT.parse(body, RequestMetadata(earlier=EarlierItems()))
    assert refusal.value.code == "missing_required_parameter"


def test_items_of_a_thread_are_bounded() -> None:
    body = {"model": "m", "input": [{"role": "user", "content": "and?"}]}
    history = ({"type": "reasoning"},) * 10_000
    metadata = RequestMetadata(earlier=EarlierItems(history))

    with pytest.raises(Refusal, match="1 items after 10000 stored ones; limit 10000") as refusal:
        DIALECT.parse(json.dumps({**body, "previous_response_id": "resp_1"}).encode(), metadata)
    assert refusal.value.param == "input"


@each_row(
    ("fields", "param", "says"),
    [
        ({"reasoning": {"effort": "high"}}, "reasoning.effort", "high"),
        ({"truncation": "auto"}, "truncation", "auto"),
        ({"top_logprobs": 2}, "top_logprobs", "include"),
        ({"stream_options": {}}, "stream_options", "stream"),
        ({"max_output_tokens": 0}, "max_output_tokens", "received 0"),
        ({"service_tier": "flex"}, "service_tier", "flex"),
        ({"metadata": {"a": 1}}, "metadata", "str"),
        ({"metadata": {"a": "b", "c": "x" * 513}}, "metadata", "received length 513"),
        ({"metadata": {"a": "b", "x" * 65: "c"}}, "metadata", "received length 65"),
        ({"metadata": {str(n): "" for n in range(17)}}, "metadata", "received length 17"),
        (
            {"text": {"format": {"type": "json_object", "schema": {}}}},
            "text.format.schema",
            "unknown field `schema`; omit it",
        ),
        ({"text": {"verbosity": "low"}}, "text.verbosity", "not supported"),
        (
            {"text": {"format": {"type": "json_schema", "name": "x"}}},
            "text.format.schema",
            "required",
        ),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "function"),
        ({"tools": [{"type": "function"}]}, "tools[0].name", "missing"),
        ({"tools": [CLOCK, CLOCK]}, "tools[1]", "declared twice"),
        ({"tool_choice": {"type": "function", "name": "x"}}, "tool_choice", "'x'"),
        ({"tool_choice": {"type": "mcp"}}, "tool_choice", "allowed_tools"),
        (
            {
                "tools": [CLOCK],
                "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"name": "x"}]},
            },
            "tool_choice.tools[0]",
            "function",
        ),
    ],
)
def test_refuses_invalid_value_with_path(fields: dict[str, Any], param: str, says: str) -> None:
    """The message has the expected and the received value."""
    refusal = refused(**fields)

    assert refusal.param == param
    assert says in refusal.message


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("none", ToolChoice("none")),
        ({"type": "function", "name": "clock"}, ToolChoice("required", ("clock",))),
        (
            {
                "type": "allowed_tools",
                "mode": "required",
                "tools": [{"type": "function", "name": "clock"}],
            },
            ToolChoice("required", ("clock",)),
        ),
    ],
)
def test_tool_choice_reaches_the_prompt(choice: object, expected: ToolChoice) -> None:
    """Flat on the wire, one canonical form."""
    assert parse(tools=[CLOCK], tool_choice=choice).prompts[0].tool_choice == expected


def test_prewarm_generates_nothing() -> None:
    """The prompt is written as a generating request would write it."""
    call = parse(prompt_cache_options={"prewarm": True, "ttl": "12h"}, max_output_tokens=50)

    assert (call.operation, call.generation.max_tokens) == ("prewarm", 0)
    assert (call.cache.lookup, call.cache.implicit) == ("written", "12h")


def test_comparison_id_only_selects_the_diagnosis_baseline() -> None:
    """It loads no context."""
    ask = parse(prompt_cache_options={"comparison_response_id": "resp_1"}).cache

    assert (ask.compare_with, ask.remember) == ("resp_1", True)
    assert parse(prompt_cache_options={"comparison_response_id": None}).cache.compare_with == ""


def test_counting_accepts_a_generating_request() -> None:
    """The count is that of the generating request, and no prompt is remembered."""
    body = json.dumps({"model": "m", "input": "hi", "tools": [CLOCK]}).encode()
    counted, request = openai_responses.COUNT_DIALECT.parse(body), DIALECT.parse(body)

    assert (counted.operation, counted.cache.remember) == ("count", False)
    assert counted.prompts == request.prompts
    assert json.loads(DIALECT.count_body(7, 0)) == {
        "object": "response.input_tokens",
        "input_tokens": 7,
    }


def test_no_caching_field_gives_default_directives() -> None:
    """A remembered fingerprint changes neither reads nor writes."""
    plain = parse().cache

    assert CacheDirectives(remember=True, echo=plain.echo) == plain


def test_output_format_has_a_digest() -> None:
    """Clients count it as part of the prompt; `text` is the default and has none."""
    forms: list[Any] = [
        {"type": "json_object"},
        {"type": "json_schema", "name": "a", "schema": {"type": "object"}},
        {"type": "json_schema", "name": "a", "schema": {"type": "array"}},
    ]
    found = {parse(text={"format": form}).digests for form in forms}

    assert len(found) == 3
    assert parse(text={"format": {"type": "text"}}).digests == parse().digests == ()


# --- references to stored items -------------------------------------------------------------------

STORED = {"id": "msg_a_b_0", "type": "message", "role": "assistant", "content": "Hm."}


def parse_with(items: object, referenced: dict[str, Any]) -> Call:
    """Return the call of an input whose references were looked for."""
    body = json.dumps({"model": "m", "input": items}).encode()
    return DIALECT.parse(body, RequestMetadata(earlier=EarlierItems(referenced=referenced)))


def test_reference_names_its_response_and_its_place() -> None:
    """Underscores of the response's own name stay; an id of another form names no response."""
    items = [
        HI,
        {"type": "item_reference", "id": "msg_a_b_0"},
        {"id": "fco_a_i12"},
        *({"id": name} for name in ("x", "msg_1", "msg_a_i", "msg__0")),
    ]
    call = parse(items)

    assert call.thread.is_pending
    assert call.prompts == ()
    assert call.thread.references == (
        ItemReference("msg_a_b_0", "resp_a_b", "output", 0),
        ItemReference("fco_a_i12", "resp_a", "input", 12),
        *(ItemReference(name, "", "output", 0) for name in ("x", "msg_1", "msg_a_i", "msg__0")),
    )


def test_reference_is_the_item_that_it_names() -> None:
    """In the prompt and in what is stored: the turn does not depend on the earlier response."""
    references = [{"type": "item_reference", "id": "msg_a_b_0"}, {"id": "msg_a_i0"}]
    call = parse_with([HI, *references], {"msg_a_b_0": STORED, "msg_a_i0": HI})

    assert call.prompts == parse([HI, STORED, HI]).prompts
    assert json.loads(call.thread.input) == [HI, STORED, HI]


@each_row(
    ("name", "found"),
    [("msg_a_0", None), ("fc_a_b_0", STORED), ("fc_a_i0", HI), ("msg_a_i0", {**HI, "id": "own"})],
)
def test_reference_to_no_stored_item_is_not_found(name: str, found: dict[str, Any] | None) -> None:
    """Nor does an id find an item of another kind at the same place."""
    with pytest.raises(Refusal) as raised:
        parse_with([HI, {"type": "item_reference", "id": name}], {name: found} if found else {})

    assert (raised.value.kind, raised.value.code) == (Kind.NOT_FOUND, "item_not_found")
    assert repr(name) in raised.value.message


# --- namespaces of tools -----------------------------------------------------------------------

CRM: dict[str, Any] = {
    "type": "namespace",
    "name": "crm",
    "description": "Customers.",
    "tools": [{**CLOCK, "description": "The time."}, {**CLOCK, "name": "find"}],
}
FLAT_CALL = {**CALL, "namespace": "crm"}


def test_functions_of_a_namespace_have_joined_names() -> None:
    """So that one function of each namespace may have the same name."""
    call = parse([HI, FLAT_CALL, RESULT], tools=[CLOCK, CRM])
    (prompt,) = call.prompts

    parameters = '{"type":"object","properties":{}}'
    assert prompt.tools == (
        Tool("clock", "", parameters, "tools[0]"),
        Tool("crm.clock", "Customers.\n\nThe time.", parameters, "tools[1].tools[0]"),
        Tool("crm.find", "", parameters, "tools[1].tools[1]"),
    )
    assert prompt.segments[1].call == ToolCall("a", "crm.clock", "{}")
    assert json.loads(dict(call.cache.echo)["response"])["tools"][1] == CRM


@each_row(
    ("choice", "names"),
    [
        ({"type": "function", "name": "find", "namespace": "crm"}, ("crm.find",)),
        ([{"type": "function", "name": "clock"}], ("clock",)),
        ([{"type": "function", "name": "clock", "namespace": "crm"}], ("crm.clock",)),
        ([{"type": "namespace", "name": "crm"}], ("crm.clock", "crm.find")),
    ],
)
def test_functions_of_a_namespace_can_be_chosen(choice: Any, names: tuple[str, ...]) -> None:
    if isinstance(choice, list):
        choice = {"type": "allowed_tools", "mode": "required", "tools": choice}
    call = parse(tools=[CLOCK, CRM], tool_choice=choice)

    assert call.prompts[0].tool_choice == ToolChoice("required", names)


def test_other_tools_of_a_namespace_are_ignored_by_name() -> None:
    """And hints of a function. The strict mode refuses both; the lenient mode ignores all."""
    hint = {**CLOCK, "defer_loading": True, "allowed_callers": ["direct"], "async": False}
    custom = {"type": "custom", "name": "patch"}
    group = {**CRM, "tools": [custom, hint]}

    call = parse(tools=[group])
    lenient = parse("hi", "lenient", tools=[group, {"type": "web_search"}])
    assert [tool.name for tool in call.prompts[0].tools] == ["crm.clock"]
    assert call.ignored == ("tools.custom", "tools.allowed_callers", "tools.defer_loading")
    assert lenient.ignored == (*call.ignored, "tools.web_search")
    assert refused(tools=[{**CRM, "tools": [custom]}]).param == "tools[0].tools[0].type"
    assert refused(tools=[{**CRM, "tools": [hint]}]).param == "tools.allowed_callers"


@each_row(
    ("fields", "param", "says"),
    [
        ({"tools": [{**CRM, "name": "a.b"}]}, "tools[0].name", "regex"),
        ({"tools": [{"type": "namespace", "name": "a"}]}, "tools[0].tools", "missing"),
        ({"tools": [CRM, CRM]}, "tools[1].tools[0]", "declared twice"),
        ({"tools": [{**CRM, "tools": [{"type": "x"}]}]}, "tools[0].tools[0].type", "'x'"),
        (
            {
                "tools": [
                    {
                        **CRM,
                        "name": f"n{number}",
                        "tools": [{**CLOCK, "name": f"f{one}"} for one in range(57)],
                    }
                    for number in range(9)
                ]
            },
            "tools",
            "513 functions with those of namespaces; expected at most 512",
        ),
        (
            {
                "tools": [CRM],
                "tool_choice": {
                    "type": "allowed_tools",
                    "mode": "auto",
                    "tools": [{"type": "namespace", "name": "x"}],
                },
            },
            "tool_choice",
            "x.*",
        ),
    ],
)
def test_refuses_bad_namespaces(fields: dict[str, Any], param: str, says: str) -> None:
    refusal = refused(**fields)

    assert refusal.param == param
    assert says in refusal.message


def test_the_user_may_be_in_the_metadata() -> None:
    """Several clients send it there; `user` comes first."""
    named = parse(metadata={"user_id": "u"})
    both = parse(user="v", metadata={"user_id": "u"})

    assert (named.client_user, both.client_user) == ("u", "v")
