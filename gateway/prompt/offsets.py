"""Where a template has finished writing a tool or a call that no mark can stand for.

Up to there a rendering that stops behind it and one that goes on are the same. Those renderings
are short (what leads up to the tools) and remembered: a client sends the same tools again and
again. It knows no tokens; `render` cuts its pieces at these places.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection
from typing import Protocol

import msgspec
from msgspec.structs import replace

from gateway.dialects.canonical import Tool, ToolCall
from gateway.errors import Refusal
from gateway.prompt.arrangement import Arrangement, template_tool
from gateway.prompt.json_text import arguments_of
from gateway.prompt.layout import common, mark, outside_words

REMEMBERED = 256
"""Sets of tools."""

_ANOTHER = template_tool(Tool("another_function"))
_NOWHERE = 2**62
"""Behind everything."""


class Run(Protocol):
    """The template over an arrangement."""

    def __call__(
        self,
        arranged: Arrangement,
        text_of: Callable[[int], str],
        arguments: Callable[[int, ToolCall], object],
        *,
        opens: bool,
    ) -> str:
        """Raises Refusal."""


class Offsets:
    """For one template. Thread-safe. `words`: special tokens, which are not cut."""

    def __init__(self, run: Run, words: Collection[str]) -> None:
        self._run = run
        self._words = words
        self._known: OrderedDict[bytes, tuple[tuple[int, ...], str]] = OrderedDict()
        self._lock = threading.Lock()

    def of_tools(self, arranged: Arrangement, marked: str) -> dict[int, int]:
        """By part: where each tool ends in `marked`.

        New tools cost a short rendering each, known ones nothing.
        """
        if not arranged.tools:
            return {}
        count = next(
            (n for n, message in enumerate(arranged.messages, 1) if message.role != "system"),
            len(arranged.messages),
        )
        head = replace(arranged, messages=arranged.messages[:count])
        ends, beginning = self._remembered(head)
        if not marked.startswith(beginning) or list(ends) != sorted(set(ends)):
            # It writes its tools further back, before the latest question perhaps.
            ends, _ = self._tool_ends(arranged)
        return dict(enumerate(ends))

    def _remembered(self, head: Arrangement) -> tuple[tuple[int, ...], str]:
        key = hashlib.sha256(msgspec.msgpack.encode((head.tools, head.messages))).digest()
        with self._lock:
            if key in self._known:
                self._known.move_to_end(key)
                return self._known[key]
        found = self._tool_ends(head)
        with self._lock:
            self._known[key] = found
            if len(self._known) > REMEMBERED:
                self._known.popitem(last=False)
        return found

    def _tool_ends(self, arranged: Arrangement) -> tuple[tuple[int, ...], str]:
        """The ends, and the text up to the last of them."""
        tools = (*arranged.tools, _ANOTHER)
        ends = []
        try:
            text = self._rendered(replace(arranged, tools=tools[:1]))
            for count in range(2, len(tools) + 1):
                longer = self._rendered(replace(arranged, tools=tools[:count]))
                ends.append(outside_words(longer, common(text, longer), self._words))
                text = longer
        except Refusal:
            # Not with every number of tools: then all end with the prompt.
            return (_NOWHERE,) * len(arranged.tools), ""
        return tuple(ends), text[: ends[-1]]

    def _rendered(self, arranged: Arrangement) -> str:
        return self._run(arranged, mark, _as_mark, opens=False)

    def of_calls(self, arranged: Arrangement, marked: str) -> dict[int, int]:
        """By part: where each call ends in `marked`, which has no marks for them: at the end of its
        message. A rendering each."""
        found = {}
        for number, message in enumerate(arranged.messages):
            if not message.calls:
                continue
            upto = replace(arranged, messages=arranged.messages[: number + 1])
            try:
                shorter = self._run(upto, mark, _as_object, opens=False)
                end = outside_words(marked, common(marked, shorter), self._words)
            except Refusal:
                end = _NOWHERE
            found.update({part: end for part, _ in message.calls})
        return found


def _as_object(_part: int, call: ToolCall) -> object:
    return arguments_of(call.arguments)[0]


def _as_mark(part: int, _call: ToolCall) -> object:
    return mark(part)
