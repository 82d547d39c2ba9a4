"""Thinking in every dialect: what a request asks for, thoughts in answers and in the history."""

from __future__ import annotations

from typing import Any

import anthropic.types
from openai.types.responses import Response

from gateway.dialects.canonical import (
    DEFAULT_THINKING,
    Begin,
    Call,
    ChoiceEnd,
    Delta,
    End,
    Reply,
    Text,
    Thinking,
    Thought,
    UsageRecord,
)
from gateway.dialects.tolerance import without_thinking
from tests.golden.transcripts import events, named_events
from tests.published_schema import violations
from tests.tables import each_row
from tests.unit.gateway.dialects.requests import (
    CHAT,
    ENDPOINTS,
    GEMINI,
    HI,
    MESSAGES,
    RESPONSES,
)

USAGE = UsageRecord(total_in=9, fresh=9, out=7, thinking=4)
ANSWER: list[Delta] = [
    Begin(USAGE),
    Thought(0, "let me "),
    Thought(0, "see"),
    Text(0, "Yes."),
    ChoiceEnd(0, "stop"),
    End(USAGE),
]
chat, responses, messages = CHAT.parse, RESPONSES.parse, MESSAGES.parse


def gemini(**config: Any) -> Call:
    """Return the call of Gemini's smallest request with a generation config."""
    return GEMINI.parse(generationConfig=config)


@each_row(
    ("call", "expected"),
    [
        (chat(), DEFAULT_THINKING),
        (chat(reasoning_effort="low"), Thinking(effort="low")),
        (chat(reasoning_effort="none"), Thinking(effort="none")),
        (chat(chat_template_kwargs={"enable_thinking": False}), Thinking(is_on=False)),
        (chat(enable_thinking=True, thinking_budget=64), Thinking(True, "", 64)),
        (chat(thinking={"type": "enabled", "budget_tokens": 2048}), Thinking(True, "", 2048)),
        (chat(thinking={"type": "disabled"}), Thinking(is_on=False)),
        (
            chat(reasoning={"effort": "high", "exclude": True}),
            Thinking(effort="high", is_shown=False),
        ),
        (chat(reasoning_effort={"some": "thing"}), DEFAULT_THINKING),
        (responses(), DEFAULT_THINKING),
        (responses(reasoning={"effort": "minimal", "summary": "auto"}), Thinking(effort="minimal")),
        (messages(), Thinking(is_on=False, is_shown=False)),
        (messages(thinking={"type": "disabled"}), Thinking(is_on=False, is_shown=False)),
        (
            messages(thinking={"type": "enabled", "budget_tokens": 1024}),
            Thinking(True, "", 1024),
        ),
        (
            messages(thinking={"type": "adaptive"}, output_config={"effort": "high"}),
            Thinking(True, "high"),
        ),
        (gemini(), Thinking(is_shown=False)),
        (gemini(thinkingConfig={"thinkingBudget": 0}), Thinking(budget_tokens=0, is_shown=False)),
        (gemini(thinkingConfig={"thinkingBudget": -1, "includeThoughts": True}), Thinking()),
        (
            gemini(thinkingConfig={"thinkingLevel": "LOW", "includeThoughts": True}),
            Thinking(effort="low"),
        ),
    ],
)
def test_request_says_how_long_to_think(call: Call, expected: Thinking) -> None:
    """Each dialect's own fields, and those that other servers added to OpenAI's."""
    assert call.prompts[0].thinking == expected


@each_row(
    "call",
    [
        chat(reasoning_effort="low", enable_thinking=True),
        chat(chat_template_kwargs={"enable_thinking": False}),
        responses(reasoning={"effort": "high"}),
        messages(thinking={"type": "enabled", "budget_tokens": 1024}),
        gemini(thinkingConfig={"thinkingBudget": 64}),
    ],
)
def test_honoured_fields_are_not_named_as_ignored(call: Call) -> None:
    """A model that thinks honours them; for any other model they are named."""
    assert call.ignored
    assert without_thinking((*call.ignored, "verbosity")) == ("verbosity",)


def test_chat_answers_with_reasoning_content() -> None:
    """The field that vLLM's and DeepSeek's clients read, whole and in pieces."""
    call = chat(stream=True)
    reply = Reply("chatcmpl-1", "m", 1)
    answer = CHAT.unary(call, ANSWER, reply)
    message = answer["choices"][0]["message"]

    assert (message["reasoning_content"], message["content"]) == ("let me see", "Yes.")
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 4
    chunks = events(CHAT.streamed(call, ANSWER, reply))[:-1]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
    assert "".join(d.get("reasoning_content", "") for d in deltas) == "let me see"
    assert "".join(d.get("content") or "" for d in deltas) == "Yes."


def test_responses_answer_with_a_reasoning_item() -> None:
    """It satisfies OpenAI's published schema, whole and as events, and the SDK's types."""
    call = responses(stream=True)
    reply = Reply("resp_1", "m", 1)
    answer = RESPONSES.unary(call, ANSWER, reply)
    thought, message = answer["output"]

    assert violations(answer, "Response") == []
    assert (thought["type"], message["type"]) == ("reasoning", "message")
    assert thought["content"] == [{"type": "reasoning_text", "text": "let me see"}]
    assert thought["id"] != message["id"]
    assert answer["usage"]["output_tokens_details"]["reasoning_tokens"] == 4
    assert Response.model_validate(answer).output_text == "Yes."
    found = named_events(RESPONSES.streamed(call, ANSWER, reply))
    for _, event in found:
        assert violations(event, "ResponseStreamEvent") == []
    kinds = [name for name, _ in found]
    assert kinds.count("response.reasoning_text.delta") == 2
    assert kinds.index("response.reasoning_text.done") < kinds.index("response.output_text.delta")


def test_messages_answer_with_a_signed_thinking_block() -> None:
    """The block comes first, and its signature closes it in the stream."""
    call = messages(thinking={"type": "enabled", "budget_tokens": 1024})
    reply = Reply("msg_1", "m", 1)
    message = anthropic.types.Message.model_validate(MESSAGES.unary(call, ANSWER, reply))
    thought, text = message.content

    assert isinstance(thought, anthropic.types.ThinkingBlock)
    assert isinstance(text, anthropic.types.TextBlock)
    assert (thought.thinking, text.text) == ("let me see", "Yes.")
    assert thought.signature
    found = events(MESSAGES.streamed(call, ANSWER, reply))
    deltas = [e["delta"]["type"] for e in found if e["type"] == "content_block_delta"]
    assert deltas == ["thinking_delta", "thinking_delta", "signature_delta", "text_delta"]
    stops = [e["index"] for e in found if e["type"] == "content_block_stop"]
    assert stops == [0, 1]


def test_gemini_answers_with_parts_that_are_thoughts() -> None:
    """Thoughts and text stay apart, and their tokens are counted apart."""
    call = gemini(thinkingConfig={"includeThoughts": True})
    answer = GEMINI.unary(call, ANSWER, Reply("g", "m", 1))

    assert answer["candidates"][0]["content"]["parts"] == [
        {"text": "let me see", "thought": True},
        {"text": "Yes."},
    ]
    usage = answer["usageMetadata"]
    assert (usage["thoughtsTokenCount"], usage["candidatesTokenCount"]) == (4, 3)
    assert usage["totalTokenCount"] == 16


HISTORIES: dict[str, dict[str, Any]] = {
    "chat": {
        "messages": [HI, {"role": "assistant", "content": "Yes.", "reasoning_content": "see"}, HI]
    },
    "responses": {
        "input": [
            HI,
            {
                "type": "reasoning",
                "id": "rs_1",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": "see"}],
            },
            {"type": "message", "role": "assistant", "content": "Yes."},
            HI,
        ]
    },
    "messages": {
        "messages": [
            HI,
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "see", "signature": "s"},
                    {"type": "text", "text": "Yes."},
                ],
            },
            HI,
        ]
    },
    "gemini": {
        "contents": [
            {"parts": [{"text": "hi"}]},
            {"role": "model", "parts": [{"text": "see", "thought": True}, {"text": "Yes."}]},
            {"parts": [{"text": "hi"}]},
        ]
    },
}


@each_row("name", HISTORIES)
def test_thoughts_of_the_history_belong_to_their_answer(name: str) -> None:
    """One message of a thought and a text, in every dialect."""
    segments = ENDPOINTS[name].parse(**HISTORIES[name]).prompts[0].segments

    found = [(s.role, s.text, s.message, s.is_thought) for s in segments]
    assert found == [
        ("user", "hi", 0, False),
        ("assistant", "see", 1, True),
        ("assistant", "Yes.", 1, False),
        ("user", "hi", 2, False),
    ]
