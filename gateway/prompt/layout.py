"""Locate each part of a prompt in the rendered template.

The template is rendered with placeholders instead of client text. The text between the placeholders
is the template's own. Comparing it with the rendering of the real text shows how the template wrote
each part: verbatim, trimmed, JSON-escaped, or left out.

Some templates write tools and calls without placeholders. A rendering that stops after such a tool
and one that continues are equal up to the end of that tool. These renderings are short (only the
messages that lead up to the tools) and cached: clients send the same tools again and again.

The module knows no tokens; `gateway.prompt.renderer` turns the pieces into tokens.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Protocol

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from gateway.dialects.canonical import Tool, ToolCall
from gateway.errors import Refusal
from gateway.owner_cache import OwnerCache
from gateway.prompt.messages import TemplateInput, TemplatePart, TemplateTool, template_tool
from gateway.prompt.opaque_text import TRIMMED
from gateway.structured_output.json_text import parse_arguments

PLACEHOLDER_CHARS = ("\ue0f0", "\ue0f1")
_PLACEHOLDER = re.compile("\ue0f0(\\d+)\ue0f1")
_OPAQUE = re.compile(f"\ue0f0(\\d+)({TRIMMED}?)\ue0f1")
END_PLACEHOLDER = "\ue0f0\ue0f1"
"""An empty placeholder: appended to a text, it shows where the text ends in a rendering."""

CACHED_CHARS_MAX = 32 * 2**20
"""How many characters of renderings with tools are cached together."""
SEPARATE_TOOLS_MAX = 512
"""With more tools than this, only the end of the last tool is located."""
PROBE_CHARS_MAX = 4_000_000
"""Characters that may be rendered to locate the tools or the calls of one prompt; the parts that
remain end with the part before them, or all tools with the last one."""

_PROBE_TOOL = template_tool(Tool("another_function"))
_PAST_END = 2**62
"""An offset behind every text."""


class Piece(Struct, frozen=True):
    """A piece of a rendering, in order."""

    text: str
    part: int | None
    """Index of the part, None for template text; template text begins at offset `start` of the
    rendering with placeholders."""
    start: int = 0


def placeholder(part: int) -> str:
    """Return the placeholder for a part's text."""
    return f"\ue0f0{part}\ue0f1"


def split_rendering(
    marked: str, whole: str, parts: Sequence[TemplatePart]
) -> tuple[Piece, ...] | None:
    """Split the rendering `whole` into pieces, using `marked`, the rendering with placeholders.

    Returns None if the template changed a part in an unknown way or wrote a part twice.
    Cost: O(text).
    """
    pieces: list[Piece] = []
    at, seen = 0, set()
    rows = list(_split_placeholders(marked, parts))
    for number, (own, start, part) in enumerate(rows):
        if not whole.startswith(own, at):
            return None
        at += len(own)
        pieces.append(Piece(own, None, start))
        if part is None:
            break
        if part in seen:
            return None
        seen.add(part)
        after = rows[number + 1][0]
        for variant in _variants(parts[part]):
            end = at + len(variant)
            if whole.startswith(variant, at) and whole.startswith(after, end):
                break
        else:
            return None
        pieces.append(Piece(variant, part))
        at = end
    return tuple(pieces) if at == len(whole) else None


class ShapeStep(Struct, frozen=True):
    """One piece of every chat of a shape: template `text`, or a whole part, optionally trimmed."""

    text: str
    part: int | None = None
    is_trimmed: bool = False


def split_shape(marked: str, parts: int) -> tuple[ShapeStep, ...] | None:
    """Split a rendering of opaque texts into steps; None if a part occurs twice.

    Cost: O(text).
    """
    steps: list[ShapeStep] = []
    start, seen = 0, set()
    for match in _OPAQUE.finditer(marked):
        part = int(match[1])
        if part in seen or part >= parts:
            return None
        seen.add(part)
        steps.append(ShapeStep(marked[start : match.start()]))
        steps.append(ShapeStep("", part, bool(match[2])))
        start = match.end()
    return (*steps, ShapeStep(marked[start:]))


def _split_placeholders(
    marked: str, parts: Sequence[TemplatePart]
) -> Iterator[tuple[str, int, int | None]]:
    """Yield (template text, its offset, the part that follows or None)."""
    start = 0
    for match in _PLACEHOLDER.finditer(marked):
        part, end, after = int(match[1]), match.start(), match.end()
        if (
            parts[part].is_call
            and marked.endswith('"', start, end)
            and marked.startswith('"', after)
        ):
            # A template that expects an arguments object writes a placeholder as a quoted string.
            end, after = end - 1, after + 1
        yield marked[start:end], start, part
        start = after
    yield marked[start:], start, None


def _variants(part: TemplatePart) -> Iterator[str]:
    """Yield the forms in which a template may write a part, likeliest first."""
    text = part.text or ""
    yield text
    if not part.is_call:
        yield from (text.strip(), text.rstrip(), text.lstrip())
        yield json.dumps(text, ensure_ascii=False)[1:-1]


def common_prefix_chars(first: str, second: str) -> int:
    """Return how many first characters two texts share. O(log length) comparisons."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def snap_to_word_start(text: str, at: int, words: Collection[str]) -> int:
    """Return `at`, or the start of the special token text that contains `at`."""
    for word in words:
        found = text.find(word, max(0, at - len(word) + 1), at + len(word) - 1)
        if 0 <= found < at < found + len(word):
            at = found
    return at


def arguments_object(_part: int, call: ToolCall) -> object:
    """Return a call's arguments as a template takes them."""
    return parse_arguments(call.arguments)[0]


def arguments_placeholder(part: int, _call: ToolCall) -> object:
    """Return the placeholder for a call's arguments."""
    return placeholder(part)


class TemplateRun(Protocol):
    """Run the template over a template input."""

    def __call__(
        self,
        template_input: TemplateInput,
        text_of: Callable[[int], str],
        arguments: Callable[[int, ToolCall], object],
        *,
        opens_turn: bool,
    ) -> str:
        """Render the messages. Raises Refusal if the template refuses."""


class ToolOffsets:
    """Tool and call offsets of one template. Thread-safe. `words`: texts of special tokens, which
    are never cut."""

    def __init__(self, run: TemplateRun, words: Collection[str]) -> None:
        self._run_template = run
        self._words = words
        self._known: OwnerCache[bytes, tuple[tuple[int, ...], str]] = OwnerCache(CACHED_CHARS_MAX)

    def tool_ends(self, template_input: TemplateInput, marked: str, owner: int) -> dict[int, int]:
        """Return the offset in `marked` at which each tool ends, by part.

        Cost: two short renderings for each new tool, at most `PROBE_CHARS_MAX` characters; a set of
        tools that is cached for `owner` costs one hash.
        """
        if not template_input.tools:
            return {}
        count = next(
            (n for n, message in enumerate(template_input.messages, 1) if message.role != "system"),
            len(template_input.messages),
        )
        head = replace(template_input, messages=template_input.messages[:count])
        ends, beginning = self._cached_ends(head, owner)
        if not marked.startswith(beginning):
            # The template writes its tools elsewhere, perhaps before the latest user message.
            ends = (self._last_end(template_input)[0],) * len(template_input.tools)
        return dict(enumerate(ends))

    def _cached_ends(self, head: TemplateInput, owner: int) -> tuple[tuple[int, ...], str]:
        """Return the tools' end offsets and the text up to the last of them."""
        # As JSON: a schema may have numbers of more than 64 bits.
        written = head.tools, head.messages, head.variables
        key = hashlib.sha256(msgspec.json.encode(written)).digest()
        known = self._known.get(owner, key)
        if known is not None:
            return known
        last, text = self._last_end(head)
        if last == _PAST_END:
            # The end of the last tool is unknown but lies within this text: use its length.
            found = (len(text),) * len(head.tools), text
        else:
            found = self._ends(head, last, text), text[:last]
        self._known.put(owner, key, found, len(found[1]) + 8 * len(found[0]))
        return found

    def _ends(self, head: TemplateInput, last: int, text: str) -> tuple[int, ...]:
        """Locate each tool by rendering it between two others and finding the added text in `text`.

        All tools end with the last one where the template does not write them one after another.
        """
        shared = (last,) * len(head.tools)
        if len(head.tools) > SEPARATE_TOOLS_MAX:
            return shared
        try:
            ends = [self._common(head, head.tools[:1])[0]]
            before, probed = self._common(head, (_PROBE_TOOL,))
            if 4 * (len(head.tools) * len(probed) + len(text)) > PROBE_CHARS_MAX:
                return shared
            for tool in head.tools[1:]:
                end, alone = self._common(head, (_PROBE_TOOL, tool))
                added = alone[before:end]
                if not text.startswith(added, ends[-1]):
                    return shared
                ends.append(ends[-1] + len(added))
        except Refusal:
            return shared
        return tuple(ends) if ends[-1] == last else shared

    def _last_end(self, template_input: TemplateInput) -> tuple[int, str]:
        """Return the offset where the last tool ends if another would follow, and the rendering."""
        text = ""
        try:
            text = self._rendered(template_input)
            longer = self._rendered(
                replace(template_input, tools=(*template_input.tools, _PROBE_TOOL))
            )
            without = self._rendered(replace(template_input, tools=template_input.tools[:-1]))
        except Refusal:
            return _PAST_END, text
        end = snap_to_word_start(text, common_prefix_chars(text, longer), self._words)
        return end if end > common_prefix_chars(text, without) else _PAST_END, text

    def _common(
        self, template_input: TemplateInput, tools: tuple[TemplateTool, ...]
    ) -> tuple[int, str]:
        """Render only `tools`: the offset where the last one ends, and the text. Raises Refusal."""
        text = self._rendered(replace(template_input, tools=tools))
        longer = self._rendered(replace(template_input, tools=(*tools, _PROBE_TOOL)))
        return snap_to_word_start(text, common_prefix_chars(text, longer), self._words), text

    def _rendered(self, template_input: TemplateInput) -> str:
        return self._run_template(
            template_input, placeholder, arguments_placeholder, opens_turn=False
        )

    def call_ends(self, template_input: TemplateInput, marked: str) -> dict[int, int]:
        """Return the offset in `marked` at which each call ends, by part.

        `marked` has no placeholders for calls, so a call ends with its message. Cost: one rendering
        per message with calls, at most `PROBE_CHARS_MAX` characters: the latest messages come
        first, and the calls of those that remain are left out.
        """
        found: dict[int, int] = {}
        budget = PROBE_CHARS_MAX
        for number in reversed(range(len(template_input.messages))):
            message = template_input.messages[number]
            if not message.calls:
                continue
            # Without room for another, only the latest message is located.
            if found and budget < len(marked):
                break
            upto = replace(template_input, messages=template_input.messages[: number + 1])
            try:
                shorter = self._run_template(upto, placeholder, arguments_object, opens_turn=False)
                end = snap_to_word_start(marked, common_prefix_chars(marked, shorter), self._words)
            except Refusal:
                end = _PAST_END
            budget -= len(marked)
            found.update({part: end for part, _ in message.calls})
        return found
