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
from gateway.prompt.layout import common, mark, outside_words
from gateway.prompt.messages import TemplateInput, TemplateTool, template_tool
from gateway.structured_output.json_text import arguments_of

REMEMBERED = 256
"""Sets of tools."""
APART_MAX = 512
"""Of more tools than that only the last one's end is looked for."""

_ANOTHER = template_tool(Tool("another_function"))
_NOWHERE = 2**62
"""Behind everything."""


class TemplateRun(Protocol):
    """The template over an arrangement."""

    def __call__(
        self,
        arranged: TemplateInput,
        text_of: Callable[[int], str],
        arguments: Callable[[int, ToolCall], object],
        *,
        opens: bool,
    ) -> str:
        """Raises Refusal."""


class ToolOffsets:
    """For one template. Thread-safe. `words`: special tokens, which are not cut."""

    def __init__(self, run: TemplateRun, words: Collection[str]) -> None:
        self._run = run
        self._words = words
        self._known: OrderedDict[bytes, tuple[tuple[int, ...], str]] = OrderedDict()
        self._lock = threading.Lock()

    def of_tools(self, arranged: TemplateInput, marked: str) -> dict[int, int]:
        """By part: where each tool ends in `marked`.

        New tools cost two short renderings each, known ones nothing.
        """
        if not arranged.tools:
            return {}
        count = next(
            (n for n, message in enumerate(arranged.messages, 1) if message.role != "system"),
            len(arranged.messages),
        )
        head = replace(arranged, messages=arranged.messages[:count])
        ends, beginning = self._remembered(head)
        if not marked.startswith(beginning):
            # It writes its tools further back, before the latest question perhaps.
            ends = (self._last_end(arranged)[0],) * len(arranged.tools)
        return dict(enumerate(ends))

    def _remembered(self, head: TemplateInput) -> tuple[tuple[int, ...], str]:
        """The tools' ends, and the text up to the last of them."""
        key = hashlib.sha256(msgspec.msgpack.encode((head.tools, head.messages))).digest()
        with self._lock:
            if key in self._known:
                self._known.move_to_end(key)
                return self._known[key]
        last, text = self._last_end(head)
        if last == _NOWHERE:
            # Wherever in it they end: not behind it.
            found = (len(text),) * len(head.tools), text
        else:
            found = self._ends(head, last, text), text[:last]
        with self._lock:
            self._known[key] = found
            if len(self._known) > REMEMBERED:
                self._known.popitem(last=False)
        return found

    def _ends(self, head: TemplateInput, last: int, text: str) -> tuple[int, ...]:
        """Each tool is rendered between two others, and what it adds is looked for in `text`. Where
        that is not how the template writes them, all end with the last."""
        shared = (last,) * len(head.tools)
        if len(head.tools) > APART_MAX:
            return shared
        try:
            ends = [self._common(head, head.tools[:1])[0]]
            before = self._common(head, (_ANOTHER,))[0]
            for tool in head.tools[1:]:
                end, alone = self._common(head, (_ANOTHER, tool))
                added = alone[before:end]
                if not text.startswith(added, ends[-1]):
                    return shared
                ends.append(ends[-1] + len(added))
        except Refusal:
            return shared
        return tuple(ends) if ends[-1] == last else shared

    def _last_end(self, arranged: TemplateInput) -> tuple[int, str]:
        """Where the last tool ends, if one more would follow it; and the rendering."""
        text = ""
        try:
            text = self._rendered(arranged)
            longer = self._rendered(replace(arranged, tools=(*arranged.tools, _ANOTHER)))
            without = self._rendered(replace(arranged, tools=arranged.tools[:-1]))
        except Refusal:
            return _NOWHERE, text
        end = outside_words(text, common(text, longer), self._words)
        return end if end > common(text, without) else _NOWHERE, text

    def _common(self, arranged: TemplateInput, tools: tuple[TemplateTool, ...]) -> tuple[int, str]:
        """Where the last of `tools` ends, in the rendering of just these. Raises Refusal."""
        text = self._rendered(replace(arranged, tools=tools))
        longer = self._rendered(replace(arranged, tools=(*tools, _ANOTHER)))
        return outside_words(text, common(text, longer), self._words), text

    def _rendered(self, arranged: TemplateInput) -> str:
        return self._run(arranged, mark, _as_mark, opens=False)

    def of_calls(self, arranged: TemplateInput, marked: str) -> dict[int, int]:
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
