"""What a choice's text is: words for the reader, tool calls, JSON in the format that was asked for.

It stands between a choice's text and the deltas: it takes calls out as they come, and looks at a
finished text once more. It changes nothing of what the model wrote. `stream` has one per choice.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from itertools import count

from gateway.dialects.canonical import CallText, Delta, OutputFormat, Prompt, Text, TokenText
from gateway.prompt import Renderer
from gateway.structured_output.grammars import callable_tools
from gateway.structured_output.output_check import satisfies
from gateway.structured_output.tool_call_parser import ParsedPiece, ParsedText, ToolCallParser


def call_ids(request_id: str, index: int) -> Callable[[], str]:
    """Ids of the calls of one choice: as unguessable as the request's, the same streamed or not."""
    numbers = count()

    def made() -> str:
        text = f"{request_id}/{index}/{next(numbers)}"
        return f"call_{hashlib.sha256(text.encode()).hexdigest()[:24]}"

    return made


class OutputParser:
    """One choice's. `reads_calls`: tools may be called; `parallel`: more than once. `is_full`: the
    one call that was wanted is there, the rest is of no use."""

    def __init__(
        self, index: int, prompt: Prompt, renderer: Renderer, make_id: Callable[[], str]
    ) -> None:
        self._index = index
        self._format = prompt.output_format
        self._texts: list[str] = []
        self._tokens: list[TokenText] = []
        self.parallel = prompt.tool_choice.parallel
        # With the choice "none" tools stand in the prompt, and calls in the answer are only text.
        self.reads_calls = bool(prompt.tools) and prompt.tool_choice.mode != "none"
        self._reader: ToolCallParser | None = None
        if self.reads_calls:
            self._reader = ToolCallParser(
                renderer.tool_style,
                [tool.name for tool in callable_tools(prompt)],
                make_id,
                parallel=self.parallel,
            )

    @property
    def is_full(self) -> bool:
        """Nothing more is wanted."""
        return self._reader is not None and self._reader.is_full

    @property
    def calls(self) -> int:
        """How many calls have begun."""
        return 0 if self._reader is None else self._reader.calls

    @property
    def has_calls(self) -> bool:
        """Was any tool called?"""
        return self.calls > 0

    @property
    def is_holding(self) -> bool:
        """Is there text that is neither given out nor a whole call?"""
        return self._reader is not None and not self._reader.is_idle

    def push(self, text: Text) -> list[Delta]:
        """Deltas that are certain now."""
        if self._reader is None:
            self._note(text.text)
            return [text]
        self._tokens.extend(text.tokens)
        return self._deltas(self._reader.push(text.text))

    def finish(self) -> list[Delta]:
        """What was held back: no more text comes."""
        deltas = [] if self._reader is None else self._deltas(self._reader.finish())
        if self._tokens and not self.has_calls:
            deltas.append(Text(self._index, "", self._taken()))
        return deltas

    def is_as_asked(self) -> bool:
        """Does the whole text, if it is no call, satisfy its format?"""
        return self.has_calls or satisfies("".join(self._texts), self._format)

    def _deltas(self, found: list[ParsedPiece]) -> list[Delta]:
        deltas: list[Delta] = []
        for piece in found:
            if isinstance(piece, ParsedText):
                self._note(piece.text)
                deltas.append(Text(self._index, piece.text, self._taken()))
            else:
                self._tokens.clear()  # they spelt a call: no text goes with them
                deltas.append(
                    CallText(self._index, piece.call, piece.call_id, piece.name, piece.arguments)
                )
        return deltas

    def _note(self, text: str) -> None:
        if self._format != _ANY:
            self._texts.append(text)

    def _taken(self) -> tuple[TokenText, ...]:
        tokens, self._tokens = tuple(self._tokens), []
        return tokens


_ANY = OutputFormat()
