"""How a model thinks before it answers: found out from its chat template, split off its output.

A template that names tags of thoughts belongs to a model that writes them around its own; one that
names channels belongs to harmony (gpt-oss). The variables of a template show how thinking is turned
on and off. The module knows no requests, no events and no tokens: `gateway.prompt.renderer` passes
the variables, `grammars` holds an answer behind its thoughts, and `gateway.generation.choice` has
one splitter per choice, before the parser of tool calls.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Literal, NamedTuple

from msgspec import Struct

from gateway.dialects.canonical import Thinking
from gateway.structured_output.tool_call_parser import Cut, overlap

OFF_EFFORTS = frozenset({"none", "minimal"})
"""Efforts at which a model that can answer at once does so."""

EFFORT_TOKENS: Mapping[str, int] = {"low": 1_024}
"""Tokens of thought at an effort, for templates that do not read the effort themselves. Other
efforts have no bound of their own."""

HARMONY_EFFORTS: Mapping[str, str] = {"none": "low", "minimal": "low", "xhigh": "high"}
"""Efforts that harmony's templates do not know, by what they know."""


class ThinkingFormat(Struct, frozen=True):
    """How one model thinks."""

    kind: Literal["none", "tags", "harmony"] = "none"
    """"none", "tags" (between `opening` and `closing`), or "harmony" (channels)."""
    opening: str = ""
    closing: str = ""
    switch: str = ""
    """The template variable that turns thinking on or off, "" if there is none."""
    reads_effort: bool = False
    """The template reads `reasoning_effort`."""
    history: str = ""
    """The key under which the template takes the thoughts of an earlier answer, "" if it takes
    none."""

    @property
    def markers(self) -> tuple[str, ...]:
        """Return the texts around thoughts that may be special tokens."""
        if self.kind == "harmony":
            return HARMONY_MARKERS
        return (self.opening, self.closing) if self.kind == "tags" else ()

    def variables(self, wanted: Thinking) -> tuple[tuple[str, object], ...]:
        """Return the template variables for what a call asks for; none for the model's default."""
        found: list[tuple[str, object]] = []
        if self.switch and (is_on := wanted.is_on_for(OFF_EFFORTS)) is not None:
            found.append((self.switch, is_on))
        if self.reads_effort and wanted.effort:
            found.append(("reasoning_effort", HARMONY_EFFORTS.get(wanted.effort, wanted.effort)))
        return tuple(found)

    def budget(self, wanted: Thinking) -> int | None:
        """Return the most tokens of thought, None without a bound."""
        if wanted.budget_tokens is not None:
            return wanted.budget_tokens
        return None if self.reads_effort else EFFORT_TOKENS.get(wanted.effort)


HARMONY_MARKERS = (
    *("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"),
    *("<|end|>", "<|call|>", "<|return|>"),
)
NO_THINKING = ThinkingFormat()

_TAGS = (
    ("<think>", "</think>"),
    ("<seed:think>", "</seed:think>"),
    ("<mm:think>", "</mm:think>"),
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
)
"""The tags of Qwen3 and many others, Seed-OSS, MiniMax-M3, Magistral, and Command A Reasoning."""


def detect_thinking(source: str, variables: frozenset[str]) -> ThinkingFormat:
    """Return the format of a template, from its source and its variables. O(source)."""
    if "<|channel|>" in source and "<|message|>" in source:
        history = "thinking" if ".thinking" in source else ""
        return ThinkingFormat("harmony", reads_effort=True, history=history)
    tags = next((pair for pair in _TAGS if any(tag in source for tag in pair)), None)
    if tags is None:
        return NO_THINKING
    switches = [name for name in ("enable_thinking", "thinking") if name in variables]
    return ThinkingFormat(
        "tags",
        *tags,
        switch=switches[0] if switches else "",
        reads_effort="reasoning_effort" in variables,
        history="reasoning_content" if "reasoning_content" in source else "",
    )


_SPACE = " \t\r\n"


class Split(NamedTuple):
    """What a piece of output is: a `thought`, or `text` of the answer."""

    thought: str = ""
    text: str = ""


class _HeldOutput:
    """The output of one choice that is not yet known to be thought or text.

    `_held` is searched at each push; `_before` precedes it and is searched no more.
    """

    def __init__(
        self, place: Literal["start", "header", "thought", "after", "text", "call"]
    ) -> None:
        self._place = place
        self._before: list[str] = []
        self._held = ""

    @property
    def is_undecided(self) -> bool:
        """Whether the text so far may yet be a thought, a header or text."""
        return self._place == "start"

    @property
    def is_answering(self) -> bool:
        """Whether the text so far ends inside the answer."""
        return self._place == "text"

    @property
    def is_holding(self) -> bool:
        """Whether text is held back."""
        return bool(self._held or self._before)

    def _keep(self, chars: int) -> None:
        """Move so many held characters to `_before`."""
        if chars:
            self._before.append(self._held[:chars])
            self._held = self._held[chars:]

    def _release(self, text: str) -> str:
        """Return what was kept before the held text, and `text`."""
        released = "".join((*self._before, text))
        self._before.clear()
        return released


class ThinkingSplitter(_HeldOutput):
    """Splits the text of one choice of a model that thinks between tags.

    `is_open`: the prompt ends inside a thought, because the template wrote the opening tag.
    Otherwise only an answer that begins with the opening tag has a thought. White space around the
    thought belongs to neither. Cost: O(1) per character.
    """

    def __init__(self, style: ThinkingFormat, *, is_open: bool) -> None:
        super().__init__("thought" if is_open else "start")
        self._opening, self._closing = style.opening, style.closing
        self._is_at_begin = True

    @property
    def is_thinking(self) -> bool:
        """Whether the text so far ends inside a thought."""
        return self._place == "thought"

    @property
    def may_think(self) -> bool:
        """Whether a thought may still begin or go on."""
        return self._place in ("start", "thought")

    def push(self, text: str) -> Split:
        """Return the thought and the text that are certain after more text."""
        if self._place == "text":
            return Split(text=text)
        self._held += text
        if self._place == "start" and not self._begin():
            return Split()
        thought = self._take_thought() if self._place == "thought" else ""
        return Split(thought, self._take_text())

    def finish(self, cut: Cut = "") -> Split:
        """Return what was held back; no more text follows. A thought may be cut off.

        At a limit, a part of a tag is dropped: it is markup.
        """
        rest, place = self._release(self._held), self._place
        self._held = ""
        if cut == "limit" and place in ("start", "thought"):
            return Split()
        return Split(thought=rest) if place == "thought" else Split(text=rest)

    def _begin(self) -> bool:
        """Decide whether the answer begins with a thought; False while that is not certain."""
        begun = self._held.lstrip(_SPACE)
        self._keep(len(self._held) - len(begun))
        if begun.startswith(self._opening):
            self._held = begun[len(self._opening) :]
            self._before.clear()
            self._place = "thought"
        elif self._opening.startswith(begun):
            return False
        else:
            self._place = "text"
        return True

    def _take_thought(self) -> str:
        if self._is_at_begin:
            self._held = self._held.lstrip(_SPACE)
            self._is_at_begin = not self._held
        at = self._held.find(self._closing)
        end = at if at >= 0 else len(self._held) - overlap(self._held, self._closing)
        body = self._held[:end].rstrip(_SPACE)
        thought = self._release(body) if body else ""
        if at >= 0:
            self._held = self._held[at + len(self._closing) :]
            self._before.clear()
            self._place = "after"
        else:
            self._held = self._held[len(body) :]
            self._keep(end - len(body))
        return thought

    def _take_text(self) -> str:
        """Return text of the answer, without the white space between it and the thought."""
        if self._place == "after":
            self._held = self._held.lstrip(_SPACE)
            if not self._held:
                return ""
            self._place = "text"
        if self._place != "text":
            return ""
        text, self._held = self._release(self._held), ""
        return text


_HEADERS = ("<|channel|>", "<|start|>", "to=functions.")
"""How the first message may begin: the prompt wrote its role, or a recipient follows the role."""
_HEADER_END = "<|message|>"
_MESSAGE_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")


class HarmonySplitter(_HeldOutput):
    """Splits the text of one choice of a model that writes harmony: messages on channels.

    `analysis` is thought, `final` and preambles are text. A call, which is a message to
    `functions.NAME`, becomes text in `style`, which the parser of tool calls reads. Text without a
    channel is text. Cost: O(1) per character.
    """

    def __init__(self, opening: str, closing: str, arguments: str) -> None:
        super().__init__("start")
        self._opening, self._closing, self._arguments = opening, closing, arguments

    @property
    def is_thinking(self) -> bool:
        """Whether the text so far ends inside a thought or before a message."""
        return self._place in ("header", "thought")

    @property
    def may_think(self) -> bool:
        """Whether a thought may begin or go on before more text."""
        return self._place in ("start", "header", "thought")

    @property
    def is_holding(self) -> bool:
        """Whether text is held back, or the end of a call."""
        return super().is_holding or self._place == "call"

    def push(self, text: str) -> Split:
        """Return the thought and the text that are certain after more text."""
        self._held += text
        thoughts: list[str] = []
        texts: list[str] = []
        while self._advance(thoughts, texts):
            pass
        return Split("".join(thoughts), "".join(texts))

    def finish(self, cut: Cut = "") -> Split:
        """Return what was held back; no more text follows.

        A call is closed, since the token that ends it is silent, unless the output is cut off: a
        brace would make the part of the arguments that was written look complete. At a limit, a
        part of a marker is dropped.
        """
        rest, self._held = self._release("" if cut == "limit" else self._held), ""
        place, self._place = self._place, "text"
        if place == "thought":
            return Split(thought=rest)
        if place == "call":
            return Split(text=rest if cut else rest + "}" + self._closing)
        return Split(text="" if place == "header" else rest)

    def _advance(self, thoughts: list[str], texts: list[str]) -> bool:
        """Take one piece; False if more text is needed."""
        if self._place == "start":
            return self._begin()
        if self._place == "header":
            return self._read_header(texts)
        found = [(at, m) for m in _MESSAGE_ENDS if (at := self._held.find(m)) >= 0]
        into = thoughts if self._place == "thought" else texts
        if found:
            at, marker = min(found)
            into.append(self._held[:at])
            if self._place == "call":
                texts.append("}" + self._closing)
            is_ended = marker in _MESSAGE_ENDS[:3]
            self._held = self._held[at + len(marker) if is_ended else at :]
            self._place = "header"
            return True
        keep = max(overlap(self._held, marker) for marker in _MESSAGE_ENDS)
        into.append(self._held[: len(self._held) - keep])
        self._held = self._held[len(self._held) - keep :]
        return False

    def _begin(self) -> bool:
        """Decide whether the output begins with a header; False while that is not certain."""
        begun = self._held.lstrip(_SPACE)
        self._keep(len(self._held) - len(begun))
        if any(head.startswith(begun) for head in _HEADERS):
            return False  # also for no text so far
        if begun.startswith(_HEADERS):
            self._place = "header"
        else:
            self._place, self._held = "text", self._release(begun)
        return True

    def _read_header(self, texts: list[str]) -> bool:
        at = self._held.find(_HEADER_END)
        if at < 0:
            self._keep(len(self._held) - overlap(self._held, _HEADER_END))
            return False
        header = self._release(self._held[:at])
        self._held = self._held[at + len(_HEADER_END) :]
        channel = header.rpartition("<|channel|>")[2].split("<|")[0].split(" ")[0].strip()
        recipient = header.partition("to=")[2].split("<|")[0].split(" ")[0].strip()
        if recipient.startswith("functions."):
            name = json.dumps(recipient.removeprefix("functions."), ensure_ascii=False)
            texts.append(f'{self._opening}{{"name": {name}, "{self._arguments}": ')
            self._place = "call"
        else:
            self._place = "thought" if channel == "analysis" else "text"
        return True
