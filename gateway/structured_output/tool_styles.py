"""Detect how a model family writes tool calls, from its chat template.

The markers in a template that supports tools show how the model writes its calls. Templates that
support no tools get the style `FALLBACK`. The module knows no requests; `gateway.prompt.messages`
writes in a style, `tool_call_parser` reads it, `grammars` enforces it.
"""

from __future__ import annotations

import hashlib
from typing import Literal

from msgspec import Struct

CALL_ID_CHARS = 9
"""Length of the call ids that Mistral's templates accept, in characters."""


class ToolStyle(Struct, frozen=True):
    """How one model family writes calls.

    `opening` and `closing` enclose a call, or (`listed`) a JSON list of calls; without a closing
    the call ends with its object. `between` separates forced calls.
    """

    family: Literal["hermes", "llama3", "mistral"]
    opening: str
    closing: str = ""
    arguments: str = "arguments"
    """The name of the arguments member."""
    between: str = "\n"
    listed: bool = False
    bare: bool = False
    """An answer that begins with an object may also be a call without the opening."""
    is_native: bool = True
    """The template writes tools and calls itself."""

    def call_id(self, call_id: str) -> str:
        """Return the id that the template accepts; the same for the call and its result."""
        if self.family != "mistral" or (len(call_id) == CALL_ID_CHARS and call_id.isalnum()):
            return call_id
        return hashlib.sha256(call_id.encode()).hexdigest()[:CALL_ID_CHARS]


HERMES = ToolStyle("hermes", "<tool_call>\n", "\n</tool_call>")
LLAMA3 = ToolStyle("llama3", "<|python_tag|>", arguments="parameters", between="; ", bare=True)
MISTRAL = ToolStyle("mistral", "[TOOL_CALLS]", between=", ", listed=True)
FALLBACK = ToolStyle("hermes", "<tool_call>\n", "\n</tool_call>", is_native=False)


def detect_style(source: str, variables: frozenset[str]) -> ToolStyle:
    """Return the style of a template, from its source and its variables. O(source)."""
    if "tools" not in variables:
        return FALLBACK
    if "[TOOL_CALLS]" in source:
        return MISTRAL
    if "<tool_call>" in source:
        return HERMES
    if "<|python_tag|>" in source or '"parameters": ' in source:
        return LLAMA3
    return HERMES
