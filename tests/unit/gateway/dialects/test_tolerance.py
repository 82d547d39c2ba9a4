"""Tolerance: what is ignored, what its name is, and what stays a refusal, in every dialect."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.dialects.tolerance import (
    HINTS,
    IGNORED_NAMES_MAX,
    Mode,
    Tolerance,
    label_of,
)
from tests.golden.transcripts import DOCUMENT
from tests.tables import each_row
from tests.unit.gateway.dialects.requests import (
    CHAT,
    COMPLETIONS,
    ENDPOINTS,
    HI,
    RESPONSES,
    Endpoint,
)

BOTH = pytest.mark.parametrize("mode", ["standard", "lenient"])
ALL = pytest.mark.parametrize("endpoint", ENDPOINTS.values(), ids=ENDPOINTS)


@ALL
@BOTH
def test_a_hint_is_taken_and_named(endpoint: Endpoint, mode: Mode) -> None:
    """A hint for another model cannot make an answer wrong, and clients send it to every model."""
    call = endpoint.parse(mode, keep_alive="5m", verbosity=None, provider={})

    assert call.ignored == ("keep_alive",)
    assert call.prompts == endpoint.parse().prompts
    assert endpoint.refused("strict", keep_alive="5m").code == "unknown_parameter"


@ALL
def test_an_unknown_field_is_refused_unless_lenient(endpoint: Endpoint) -> None:
    """It could change the answer; the lenient mode says that it had no effect."""
    for mode in ("standard", "strict"):
        refusal = endpoint.refused(mode, modle="m")
        assert (refusal.code, refusal.param) == ("unknown_parameter", "modle")
        assert "'modle'" in refusal.message
    assert endpoint.parse("lenient", modle="m").ignored == ("modle",)


@each_row(
    ("name", "fields", "ignored"),
    [
        ("chat", {"reasoning_effort": "high", "verbosity": "low"}, "reasoning_effort verbosity"),
        ("chat", {"reasoning_effort": "none"}, ""),
        ("chat", {"store": True, "metadata": {"a": "b"}}, "metadata store"),
        ("chat", {"store": False, "service_tier": "auto"}, ""),
        ("chat", {"service_tier": "flex"}, "service_tier"),
        ("chat", {"prediction": {"type": "content", "content": "x"}}, ""),
        ("completions", {"prediction": {"type": "content", "content": "x"}}, "prediction"),
        (
            "chat",
            {"chat_template_kwargs": {"enable_thinking": False}},
            "chat_template_kwargs.enable_thinking",
        ),
        ("chat", {"stream": True, "stream_options": {"new": 1}}, "stream_options.new"),
        (
            "chat",
            {
                "stream": True,
                "stream_options": {"new": 1},
                "messages": [{"role": "assistant", "content": "a", "new": 1}, HI],
            },
            "messages[].new stream_options.new",
        ),
        ("responses", {"reasoning": {"effort": "low"}}, "reasoning.effort"),
        (
            "responses",
            {"reasoning": {"effort": "none", "summary": "auto", "new": 1}},
            "reasoning.summary reasoning.new",
        ),
        ("responses", {"text": {"verbosity": "low"}}, "text.verbosity"),
        ("responses", {"truncation": "auto"}, "truncation"),
        ("responses", {"truncation": "disabled", "store": True}, ""),
        ("responses", {"client_metadata": {"a": 1}}, "client_metadata"),
        ("responses", {"service_tier": "priority"}, "service_tier"),
        ("messages", {"thinking": {"type": "enabled", "budget_tokens": 2048}}, "thinking"),
        ("messages", {"thinking": {"type": "disabled"}, "speed": "standard"}, ""),
        ("messages", {"speed": "fast", "service_tier": "x"}, "service_tier speed"),
        ("messages", {"output_config": {"effort": "newest"}}, "output_config.effort"),
        (
            "messages",
            {"output_config": {"task_budget": {"type": "tokens", "total": 20_000}}},
            "output_config.task_budget",
        ),
        ("messages", {"metadata": {"user_id": "u", "trace": "t"}}, "metadata.trace"),
        (
            "messages",
            {"user_profile_id": "uprof_1", "workspace_id": "wrkspc_1"},
            "user_profile_id workspace_id",
        ),
        (
            "responses",
            {"background": False, "background_options": {"completion_window": "2h"}},
            "background_options",
        ),
        (
            "gemini",
            {"generationConfig": {"routingConfig": {"x": 1}}},
            "generationConfig.routingConfig",
        ),
        ("gemini", {"modelArmorConfig": {"x": "y"}}, "modelArmorConfig"),
        ("gemini", {"serviceTier": "flex", "store": True}, "serviceTier store"),
        ("gemini", {"safetySettings": [{}], "labels": {"a": "b"}}, "safetySettings labels"),
        (
            "gemini",
            {"generationConfig": {"thinkingConfig": {"thinkingLevel": "HIGH"}}},
            "generationConfig.thinkingConfig",
        ),
        ("gemini", {"generationConfig": {"thinkingConfig": {"thinkingBudget": 0}}}, ""),
    ],
)
def test_hints_are_accepted_and_named_in_each_dialect(
    name: str, fields: dict[str, Any], ignored: str
) -> None:
    """Frameworks set them in the app's code, whichever model is behind the name."""
    assert ENDPOINTS[name].parse(**fields).ignored == tuple(ignored.split())


VLLM: dict[str, Any] = {
    "use_beam_search": False,
    "best_of": 1,
    "length_penalty": 1.0,
    "early_stopping": False,
    "stop_token_ids": [],
    "include_stop_str_in_output": False,
    "ignore_eos": False,
    "min_tokens": 0,
    "min_p": 0.0,
    "top_k": 0,
    "repetition_penalty": 1.0,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "truncate_prompt_tokens": None,
    "truncation_side": None,
    "prompt_logprobs": None,
    "allowed_token_ids": None,
    "bad_words": [],
    "echo": False,
    "return_tokens_as_token_ids": None,
    "return_token_ids": None,
    "return_token_offsets": False,
    "return_prompt_text": None,
    "routed_experts_prompt_start": 0,
    "priority": 0,
    "kv_transfer_params": None,
    "vllm_xargs": None,
    "repetition_detection": None,
    "stream_interval": None,
    "thinking_token_budget": None,
    "structured_outputs": None,
}
"""The defaults of vLLM's requests that OpenAI's have not."""
VLLM_CHAT: dict[str, Any] = {
    "add_generation_prompt": True,
    "continue_final_message": False,
    "add_special_tokens": False,
    "documents": None,
    "chat_template": None,
    "chat_template_kwargs": None,
    "media_io_kwargs": None,
    "mm_processor_kwargs": None,
    "include_reasoning": True,
}
SAMPLERS: dict[str, Any] = {
    "no_stop_trim": False,
    "return_hidden_states": False,
    "stop_regex": None,
    "lora_path": None,
    "custom_params": {},
    "typical_p": 1.0,
    "tfs_z": 1,
    "xtc_probability": 0.0,
    "dry_multiplier": 0,
    "dynatemp_range": 0.0,
    "mirostat": 0,
}
"""SGLang's and llama.cpp's defaults."""


@each_row(
    ("name", "defaults"),
    [
        ("chat", {**VLLM, **VLLM_CHAT, **SAMPLERS}),
        ("completions", {**VLLM, **SAMPLERS}),
        ("responses", {**VLLM, **SAMPLERS}),
    ],
)
def test_defaults_of_other_engines_do_nothing(name: str, defaults: dict[str, Any]) -> None:
    """Clients made for them send every field that they know."""
    endpoint = ENDPOINTS[name]
    plain = endpoint.parse()

    assert endpoint.parse(**defaults) == endpoint.parse(
        **{key: defaults[key] for key in ("include_reasoning",) if key in defaults}
    )
    assert endpoint.parse(**defaults).generation == plain.generation


@each_row(
    ("field", "value", "says"),
    [
        ("length_penalty", 0.8, "beam search"),
        ("typical_p", 0.9, "expected 1.0"),
        ("mirostat", 2, "expected 0"),
        ("bad_words", ["x"], "expected null"),
        ("allowed_token_ids", [1], "expected null"),
        ("no_stop_trim", True, "expected false"),
        ("mirostat", False, "expected 0"),
    ],
)
def test_a_setting_of_another_engine_that_does_something_is_named(
    field: str, value: Any, says: str
) -> None:
    """The answer would look as if it were honoured."""
    for name in ("chat", "completions", "responses"):
        refusal = ENDPOINTS[name].refused(**{field: value})

        assert (refusal.param, refusal.code) == (field, "unsupported_parameter")
        assert says in refusal.message
    assert field == "length_penalty" or CHAT.parse("lenient", **{field: value}).ignored == (field,)


LONG_ID = "c" * 4_000
LONG_IDS: dict[str, dict[str, Any]] = {
    "chat": {
        "messages": [
            HI,
            {
                "role": "assistant",
                "tool_calls": [
                    {"id": LONG_ID, "type": "function", "function": {"name": "f", "arguments": ""}}
                ],
            },
            {"role": "tool", "tool_call_id": LONG_ID, "content": "1"},
        ]
    },
    "responses": {
        "input": [
            {"type": "function_call", "call_id": LONG_ID, "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": LONG_ID, "output": "1"},
        ]
    },
    "messages": {
        "messages": [
            HI,
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": LONG_ID, "name": "f", "input": {}}],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": LONG_ID}]},
        ]
    },
    "gemini": {
        "contents": [
            {"role": "model", "parts": [{"functionCall": {"name": "f", "id": LONG_ID}}]},
            {"parts": [{"functionResponse": {"name": "f", "id": LONG_ID}}]},
        ]
    },
}


@pytest.mark.parametrize("name", sorted(LONG_IDS))
def test_ids_of_calls_may_be_long(name: str) -> None:
    """Proxies write a provider's signature, of some thousand characters, into them."""
    result = ENDPOINTS[name].parse(**LONG_IDS[name]).prompts[0].segments[-1]

    assert (result.role, result.answers) == ("tool", LONG_ID)


ANSWERS: dict[str, dict[str, Any]] = {
    "chat": {
        "messages": [
            HI,
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "s"},
                    {"type": "text", "text": "let me see", "annotations": []},
                ],
                "id": "x",
                "images": [],
                "reasoning_details": [{"a": 1}],
                "provider_specific_fields": {"refusal": None},
                "tool_calls": [
                    {
                        "id": "c1",
                        "type": "function",
                        "function": {"name": "f", "arguments": "{}", "thought": "x"},
                        "extra_content": {},
                    }
                ],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "42"},
            {"role": "assistant", "content": "42", "provider_specific_fields": None},
            HI,
        ]
    },
    "responses": {
        "input": [
            HI,
            {
                "type": "message",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "hello", "new": 1}],
                "created_by": "x",
            },
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "new": 1},
            {"type": "function_call_output", "call_id": "c", "output": "42"},
        ]
    },
    "messages": {
        "messages": [
            HI,
            {
                "role": "assistant",
                "id": "msg_1",
                "stop_reason": "end_turn",
                "content": [{"type": "text", "text": "hello", "new": 1}],
            },
            HI,
        ]
    },
    "gemini": {
        "contents": [
            {"role": "user", "parts": [{"text": "hi"}]},
            {"role": "model", "parts": [{"text": "hello", "partMetadata": {}, "new": 1}]},
            {"role": "user", "parts": [{"text": "hi"}]},
        ]
    },
}
IGNORED = {
    "chat": (
        "messages[].content[].annotations",
        "messages[].id",
        "messages[].images",
        "messages[].reasoning_details",
        "messages[].provider_specific_fields",
        "messages[].tool_calls[].function.thought",
        "messages[].tool_calls[].extra_content",
        "messages[].content[].thinking",
    ),
    "responses": ("input[].created_by", "input[].content[].new", "input[].new"),
    "messages": ("messages[].id", "messages[].stop_reason", "messages[].content[].new"),
    "gemini": ("contents[].parts[].new",),
}


@each_row("name", sorted(ANSWERS))
@BOTH
def test_unknown_fields_of_earlier_answers_are_ignored(name: str, mode: Mode) -> None:
    """Clients add fields to the answers that they keep, and send them back as history."""
    call = ENDPOINTS[name].parse(mode, **ANSWERS[name])

    assert set(call.ignored) == set(IGNORED[name])
    assert {segment.text for segment in call.prompts[0].segments} >= {"hi"}
    assert ENDPOINTS[name].refused("strict", **ANSWERS[name]).param


@each_row(
    ("name", "fields"),
    [
        ("chat", {"messages": [{**HI, "cache_controls": {}}]}),
        ("responses", {"input": [{**HI, "cache_controls": {}}]}),
        ("messages", {"messages": [{**HI, "cache_controls": {}}]}),
        ("gemini", {"contents": [{"role": "user", "parts": [{"text": "a", "texts": "b"}]}]}),
        ("gemini", {"generationConfig": {"temprature": 1}}),
        ("responses", {"tools": [{"type": "function", "name": "f", "strikt": True}]}),
        ("messages", {"tools": [{"name": "f", "input_schema": {"type": "object"}, "x": 1}]}),
    ],
)
def test_unknown_fields_elsewhere_are_refused_unless_lenient(
    name: str, fields: dict[str, Any]
) -> None:
    """A typo in a user's message or in a tool is the client's mistake."""
    assert ENDPOINTS[name].refused(**fields).param
    assert len(ENDPOINTS[name].parse("lenient", **fields).ignored) == 1


@each_row(
    ("fields", "equal"),
    [
        ({"repeat_penalty": 1.1}, {"repetition_penalty": 1.1}),
        ({"n_predict": 5}, {"max_tokens": 5}),
        ({"num_predict": -1}, {}),
        ({"max_output_tokens": 5}, {"max_completion_tokens": 5}),
        ({"random_seed": 3}, {"seed": 3}),
    ],
)
def test_aliases_are_honoured_under_our_names(
    fields: dict[str, Any], equal: dict[str, Any]
) -> None:
    """Other engines' clients send the same setting under another name."""
    assert CHAT.parse(**fields) == CHAT.parse(**equal)
    assert CHAT.parse(**fields).ignored == ()


def test_an_alias_may_not_contradict_its_equal() -> None:
    """The client wants two answers; only one can be given."""
    wrong = CHAT.refused(repeat_penalty=1.1, repetition_penalty=1.2)

    assert (wrong.param, "repetition_penalty" in wrong.message) == ("repeat_penalty", True)
    assert CHAT.parse(repeat_penalty=1.1, repetition_penalty=1.1).ignored == ()


def test_limits_of_answers_have_one_meaning_in_every_endpoint() -> None:
    """Clients rename the field when they change the endpoint, or forget to."""
    assert RESPONSES.parse(max_tokens=7).generation.max_tokens == 7
    assert COMPLETIONS.parse(max_completion_tokens=7).generation.max_tokens == 7


@pytest.mark.parametrize(
    "fields",
    [
        {"chat_template_kwargs": {"tools_in_user_message": True}},
        {"use_beam_search": True},
        {"functions": [{"name": "f"}]},
    ],
)
@BOTH
def test_a_field_that_would_change_the_answer_is_refused(
    fields: dict[str, Any], mode: Mode
) -> None:
    """An ignored one would give an answer to another request, in any mode."""
    wrong = CHAT.refused(mode, **fields)

    assert (wrong.code, wrong.param) == ("unsupported_parameter", next(iter(fields)))


def test_names_are_bounded_and_safe_in_a_header() -> None:
    """A client chooses the names, and a header has a limit."""
    tolerance = Tolerance("lenient")
    tolerance.ignore("a\r\nX-Evil: 1")
    for number in range(100):
        tolerance.ignore(f"field_{number}_{'x' * 200}")

    assert len(tolerance.ignored) == IGNORED_NAMES_MAX
    assert tolerance.ignored[0] == "a__X-Evil__1"
    assert len(", ".join(tolerance.ignored)) < 1024


def test_metrics_labels_are_bounded() -> None:
    """Metrics have one series for each label."""
    names = ["reasoning.effort", "messages[].id", "chat_template_kwargs.enable_thinking", "evil"]

    assert [label_of(name) for name in names] == [
        "reasoning",
        "history",
        "enable_thinking",
        "other",
    ]


def test_every_hint_is_documented() -> None:
    """The list is published: docs/dialects.md names each hint."""
    text = DOCUMENT.read_text()

    assert {name for name in HINTS if f"`{name}`" not in text} == set()
