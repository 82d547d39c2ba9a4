"""How a model family writes tool calls: found out from its chat template.

Templates that write tools themselves show by their markers what the model answers with. Templates
that know no tools get a style of our own (`fallback`). It knows no requests; `arrangement` writes
in a style, `call_reader` reads it, `grammars` forces it.
"""

from __future__ import annotations

import hashlib
from typing import Literal

from msgspec import Struct

CALL_ID_SIGNS = 9
"""Mistral's templates take call ids of this length and no others."""


class ToolStyle(Struct, frozen=True):
    """One family's way of writing calls.

    `opening` and `closing` stand around a call, or (`listed`) around a JSON list of them; without
    a closing the call ends where its object does. `bare`: an answer that begins with an object may
    be a call, too, without the opening. `arguments`: the name of that member. `between` separates
    calls that are forced. `is_native`: the template writes tools and calls by itself.
    """

    family: Literal["hermes", "llama3", "mistral"]
    opening: str
    closing: str = ""
    arguments: str = "arguments"
    between: str = "\n"
    listed: bool = False
    bare: bool = False
    is_native: bool = True

    def call_id(self, call_id: str) -> str:
        """The id as the template takes it; the same for the call and its result."""
        if self.family != "mistral" or (len(call_id) == CALL_ID_SIGNS and call_id.isalnum()):
            return call_id
        return hashlib.sha256(call_id.encode()).hexdigest()[:CALL_ID_SIGNS]


HERMES = ToolStyle("hermes", "<tool_call>\n", "\n</tool_call>")
LLAMA3 = ToolStyle("llama3", "<|python_tag|>", arguments="parameters", between="; ", bare=True)
MISTRAL = ToolStyle("mistral", "[TOOL_CALLS]", between=", ", listed=True)
FALLBACK = ToolStyle("hermes", "<tool_call>\n", "\n</tool_call>", is_native=False)


def style_of(source: str, variables: frozenset[str]) -> ToolStyle:
    """Which style a template has: its text and the variables that it asks for. O(text)."""
    if "tools" not in variables:
        return FALLBACK
    if "[TOOL_CALLS]" in source:
        return MISTRAL
    if "<tool_call>" in source:
        return HERMES
    if "<|python_tag|>" in source or '"parameters": ' in source:
        return LLAMA3
    return HERMES
