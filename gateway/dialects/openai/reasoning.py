"""How much an OpenAI request asks the model to think: its own fields and those of other servers.

The fields are hints: a value of another form asks for nothing and is no error. `openai.chat` and
`openai.responses` read them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway.dialects.canonical import Thinking

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")
"""Efforts from no thinking to the longest."""

_SWITCHES = ("enable_thinking", "think", "thinking")
_OFF, _ON = ("disabled", "off"), ("enabled", "on", "adaptive")


def thinking_of(hints: Mapping[str, Any]) -> Thinking:
    """Return what the hints of a request ask for.

    Read are `reasoning_effort`; `reasoning` with `effort`, `max_tokens`, `enabled` and `exclude`;
    `thinking`, true or false, or an object with `type` and `budget_tokens`; `enable_thinking`,
    `think`, `thinking_budget`, vLLM's `thinking_token_budget`, `include_reasoning`; and the same in
    `chat_template_kwargs`.
    """
    flat = {**_object(hints.get("chat_template_kwargs")), **hints}
    reasoning, thinking = _object(flat.get("reasoning")), _object(flat.get("thinking"))
    effort = flat.get("reasoning_effort") or reasoning.get("effort")
    budgets = (
        *(flat.get("thinking_budget"), flat.get("thinking_token_budget")),
        *(thinking.get("budget_tokens"), reasoning.get("max_tokens")),
    )
    switches = [flat.get(name) for name in _SWITCHES] + [reasoning.get("enabled")]
    is_on = next((value for value in switches if isinstance(value, bool)), None)
    if thinking.get("type") in _OFF:
        is_on = False
    elif thinking.get("type") in _ON:
        is_on = True
    is_hidden = flat.get("include_reasoning") is False or reasoning.get("exclude") is True
    return Thinking(
        is_on=is_on,
        effort=effort if effort in EFFORTS else "",
        budget_tokens=next((b for b in budgets if type(b) is int and b >= 0), None),
        is_shown=not is_hidden,
    )


def _object(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}
