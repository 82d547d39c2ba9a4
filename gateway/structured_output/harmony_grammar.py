"""The grammar of an answer in harmony: messages on channels, with thoughts as the first.

A budget bounds the message on the channel `analysis`; a format holds the message on `final`; a
forced call is a message to `functions.NAME`. The module knows no events and compiles nothing: the
renderer (`gateway.prompt.renderer`) calls it for models whose template writes harmony.
"""

from __future__ import annotations

from collections.abc import Mapping

from engine.api import Grammar
from gateway.dialects.canonical import Prompt, Tool
from gateway.structured_output.grammars import (
    answer_grammar,
    arguments_grammar,
    callable_tools,
    literal,
    marker,
    nested,
    text_rule,
)


def harmony_grammar(
    prompt: Prompt, marker_ids: Mapping[str, int], budget: int | None
) -> Grammar | None:
    """Return the grammar of an answer in harmony; None if any text is allowed. O(schemas).

    `marker_ids`: the markers that are single special tokens; the others are text. `budget`: the
    most tokens of thought, 0 for none; None without a bound. Raises Refusal as `build_grammar`.
    """
    has_tools = bool(prompt.tools) and prompt.tool_choice.mode != "none"
    tools = callable_tools(prompt) if has_tools else ()
    is_forced = has_tools and prompt.tool_choice.mode == "required"
    answer = None if is_forced else answer_grammar(prompt.output_format)
    is_strict = any(tool.strict for tool in tools)
    if not (is_forced or is_strict or answer is not None or budget is not None):
        return None
    return Grammar("lark", _Messages(marker_ids).text(tools, answer, budget, is_forced=is_forced))


class _Messages:
    """Builds the text of a Lark grammar, one rule per line."""

    def __init__(self, marker_ids: Mapping[str, int]) -> None:
        self._marker_ids = marker_ids
        self._rules: list[str] = []

    def text(
        self,
        tools: tuple[Tool, ...],
        answer: Grammar | None,
        budget: int | None,
        *,
        is_forced: bool,
    ) -> str:
        """Return the grammar's text."""
        ends = [] if is_forced else ["final"]
        for number, tool in enumerate(tools):
            ends.append(f"call_{number}")
            self._call(number, tool, is_forced=is_forced)
        start = " | ".join(ends)
        if not is_forced:
            constrain = self._marker("<|constrain|>")
            form = "" if answer is None else f' (/ ?/ {constrain} "json")?'
            self._rule("final", f"{self._header('final', form)} wanted")
            self._rule("wanted", nested(answer))
            if answer is None:  # text before a call would not satisfy a format
                self._message("preamble", "commentary")
                start = f"preamble* ({start})"
        if budget != 0:
            self._message("thought", "analysis", budget)
            start = f"thought? ({start})"
        return "\n".join((f"start: {start}", *self._rules, ""))

    def _call(self, number: int, tool: Tool, *, is_forced: bool) -> None:
        """Add the rule of a call. The recipient is in the role or in the channel."""
        recipient = literal(f" to=functions.{tool.name}")
        form = f'/ ?/ ({self._marker("<|constrain|>")}? "json")?'
        channel, message = self._marker("<|channel|>"), self._marker("<|message|>")
        heads = (
            f'{recipient} {channel} "commentary" {form} {message}',
            f'{channel} "commentary" {recipient} {form} {message}',
        )
        arguments = nested(arguments_grammar(tool, is_forced=is_forced))
        self._rule(f"call_{number}", f"({' | '.join(heads)}) arguments_{number}")
        self._rule(f"arguments_{number}", arguments)

    def _message(self, name: str, channel: str, tokens_max: int | None = None) -> None:
        """Add the rules of a message of text, behind which another message begins."""
        end, begin = self._marker("<|end|>"), self._marker("<|start|>")
        self._rule(name, f'{self._header(channel)} {name}_text {end} {begin} "assistant"')
        self._rules.append(text_rule(f"{name}_text", "<|end|>", self._marker_ids, tokens_max))

    def _header(self, channel: str, form: str = "") -> str:
        return (
            f"{self._marker('<|channel|>')} {literal(channel)}{form} {self._marker('<|message|>')}"
        )

    def _marker(self, text: str) -> str:
        return marker(text, self._marker_ids)

    def _rule(self, name: str, text: str) -> None:
        self._rules.append(f"{name}: {text}")
