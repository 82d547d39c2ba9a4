"""From a canonical prompt to token ids and boundaries.

Messages go through the model's template with marks in place of their contents; the text between
the marks is the template's, where special tokens are meant, and what replaces the marks is the
client's, where they are only text. Contents may come out trimmed. Where a template does more to
them (asks what is in them, cuts pieces out), the whole text is rendered and tokenized at once;
contents that spell a special token are refused then: they could not be told from its own. The same
goes for tools, which templates write as a whole.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

from msgspec import Struct
from msgspec.structs import replace

from engine.model_store import ModelCard, load_card
from gateway.dialects.canonical import Boundary, Prompt, Rendered, Role, Segment, ToolCall
from gateway.errors import Kind, Refusal
from gateway.prompt.detokenizer import Detokenizer
from gateway.prompt.layout import LAST, MARK_SIGNS, Piece, Step, lay_out, mark, steps_of
from gateway.prompt.messages import TemplateInput, TemplateTool, arrange
from gateway.prompt.opaque_text import Glance, Opaque
from gateway.prompt.template import ChatTemplate
from gateway.prompt.tokenizer import PieceTokenizer
from gateway.prompt.tool_offsets import ToolOffsets
from gateway.structured_output.grammars import grammar_of
from gateway.structured_output.json_text import arguments_of, parsed, strings
from gateway.structured_output.tool_styles import ToolStyle, style_of

SHAPES_MAX, SHAPE_MESSAGES_MAX = 256, 128
"""How many shapes of chats are remembered, and up to how many segments."""


Laid = TypeVar("Laid", Piece, Step)
Bare = tuple[Role, str, str | None, int, str | None]
"""A segment without its text: role, path, name, message, retention."""


class Shape(Struct, frozen=True):
    """What the template makes of any chat with these roles and names: `steps` in its order, the
    token ids of its own pieces where something stands before them, and where each segment ends,
    without tokens."""

    steps: tuple[Step, ...]
    inner: tuple[tuple[int, ...], ...]
    boundaries: tuple[Boundary, ...]


class Renderer:
    """Template and tokenizer of one model. Thread-safe."""

    def __init__(self, card: ModelCard) -> None:
        self.card = card
        self.tokenizer = PieceTokenizer(card.tokenizer_path, card.special_token_ids)
        source = card.template_path.read_text()
        self._template = ChatTemplate(source)
        self.tool_style: ToolStyle = style_of(source, self._template.variables)
        self._token_texts = self.tokenizer.special_texts()
        words = [text for text in self._token_texts.values() if text]
        self._special_words = re.compile("|".join(map(re.escape, words)) or "(?!)")
        self._offsets = ToolOffsets(self._run, frozenset(self._token_texts.values()))
        self._shapes = lru_cache(SHAPES_MAX)(self._shape)
        markers = (self.tool_style.opening.strip(), self.tool_style.closing.strip())
        self._markers = {i: text for i, text in self._token_texts.items() if text in markers}
        # Each token of an answer is looked up: in a list of all, without a call of ours.
        spelt = list(map(self.tokenizer.token_bytes, range(card.config.vocab)))
        marked = [plain or self._markers.get(i, "").encode() for i, plain in enumerate(spelt)]
        self._spelt, self._marked = spelt.__getitem__, marked.__getitem__

    @classmethod
    def load(cls, folder: Path) -> Renderer:
        """From a prepared model folder. Raises ModelError, ValueError for an unusable template."""
        return cls(load_card(folder))

    @property
    def template_digest(self) -> str:
        """Part of every namespace: another template never meets these prefixes."""
        return self.card.template_digest

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The model's own end tokens."""
        return self.card.stop_token_ids

    def detokenizer(
        self, stops: tuple[str, ...] = (), *, shows_markers: bool = False
    ) -> Detokenizer:
        """For one choice's text. `shows_markers`: special tokens that open or close a tool call are
        part of it."""
        return Detokenizer(self._marked if shows_markers else self._spelt, stops)

    def special_text(self, token_id: int) -> str:
        """How the template writes a special token; nothing for others."""
        return self._text_of(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token."""
        return self.tokenizer.token_bytes(token_id)

    def render(self, prompt: Prompt) -> Rendered:
        """Token ids, boundaries, grammar. CPU-bound: about 1 ms per 1,000 new words.

        Raises Refusal.
        """
        grammar = grammar_of(prompt, self.tool_style, self._marker_ids())
        start: tuple[int, ...] = ()
        if self.card.add_bos and self.card.bos_token_id is not None:
            start = (self.card.bos_token_id,)
        if prompt.token_ids is not None:
            return Rendered(prompt.token_ids, grammar=grammar)
        if prompt.text is not None:
            _check_text(prompt.text, "prompt")
            ids = start + self.tokenizer.encode(prompt.text, specials=True)
            return Rendered(ids, grammar=grammar)
        for segment in prompt.segments:
            _check_text(segment.text, segment.path)
            if not _is_plain(segment) or segment.name is not None:
                self._check_names(segment)
        shape = self._shape_of(prompt)
        found = self._chat(prompt) if shape is None else self._shaped(prompt, shape)
        return found if grammar is None else replace(found, grammar=grammar)

    def new_signs(self, prompt: Prompt) -> int:
        """Of a chat's texts and calls, the characters that were not tokenized lately. They are
        hashed: O(characters), at about 1 ns."""
        new = 0
        for segment in prompt.segments:
            if not self.tokenizer.knows(segment.text, specials=False):
                new += len(segment.text)
            if segment.call is not None:
                new += len(segment.call.arguments)
        return new

    # -- what may not be there ------------------------------------------------------------------

    def _check_tools(self, prompt: Prompt, arranged: TemplateInput) -> None:
        """Where a template writes tools, their words stand among its own."""
        for tool, written in zip(prompt.tools, arranged.tools, strict=False):
            schema = strings(written["function"]["parameters"])
            self._check_words("".join((tool.name, tool.description, *schema)), tool.path)
        for part in arranged.parts[: 0 if arranged.tools else len(prompt.tools) + 1]:
            _check_text(part.text or "", part.boundary.path if part.boundary else "tools")

    def _check_names(self, segment: Segment) -> None:
        """The template writes names and ids between its own tokens: they may hold none."""
        path = f"messages[{segment.message}].name"
        self._check_words(segment.name or "", path)
        self._check_words(segment.answers or "", segment.path)
        if segment.call is not None:
            call = segment.call
            _check_text(call.arguments + "".join(strings(parsed(call.arguments))), segment.path)
            self._check_words(call.name, segment.path)
            self._check_words(call.call_id, segment.path)

    def _check_words(self, text: str, path: str) -> None:
        if not text:
            return  # most messages have no name
        _check_text(text, path)
        if (special := self._special_words.search(text)) is not None:
            message = f"{path}: it contains {special[0]!r}."
            raise Refusal(Kind.BAD, "invalid_value", message, param=path)

    # -- chats of a known shape -----------------------------------------------------------------

    def _shape_of(self, prompt: Prompt) -> Shape | None:
        """None where the text of its messages, tools or calls matters to the template."""
        segments = prompt.segments
        if prompt.tools or len(segments) > SHAPE_MESSAGES_MAX or self._template.has_captures:
            return None
        if not all(map(_is_plain, segments)):
            return None
        bare = tuple([(s.role, s.path, s.name, s.message, s.retention) for s in segments])
        return self._shapes(bare, prompt.add_generation_prompt, prompt.continues)

    def _shape(self, bare: tuple[Bare, ...], opens: bool, continues: bool) -> Shape | None:
        """The template over texts that it cannot look at; None if it tries to, or refuses."""
        segments = tuple(
            Segment(role, "", path, name, message, retention)
            for role, path, name, message, retention in bare
        )
        prompt = Prompt(segments, add_generation_prompt=opens, continues=continues)
        arranged, glance = arrange(prompt, self.tool_style), Glance()
        messages = arranged.for_template(self.tool_style, mark, _as_mark)
        for message, arranged_as in zip(messages, arranged.messages, strict=True):
            is_whole = len(arranged_as.parts) == 1
            message["content"] = Opaque(str(message["content"]), glance, is_whole=is_whole)
        try:
            text = self._apply(messages, None, opens=opens and not _continues(prompt))
        except Refusal:
            return None
        steps = steps_of(text, len(segments))
        if glance.was_taken or steps is None:
            return None
        if _continues(prompt):
            steps = _open_ended(steps, len(segments) - 1)
        encode = self.tokenizer.encode
        inner = [encode(step.text, specials=True, is_first=False) for step in steps]
        return Shape(steps, tuple(inner), _boundaries(arranged, {}))

    def _shaped(self, prompt: Prompt, shape: Shape) -> Rendered:
        ids: list[int] = []
        ends = [0] * len(prompt.segments)
        encode = self.tokenizer.encode
        for step, known in zip(shape.steps, shape.inner, strict=True):
            if step.part is None:
                ids += known if ids else encode(step.text, specials=True)
                continue
            text = prompt.segments[step.part].text
            ids += encode(
                text.strip() if step.is_trimmed else text, specials=False, is_first=not ids
            )
            ends[step.part] = len(ids)
        furthest, found = 0, []
        for boundary, end in zip(shape.boundaries, ends, strict=True):
            furthest = max(furthest, end)
            found.append(replace(boundary, tokens=furthest))
        return Rendered(tuple(ids), tuple(found))

    # -- all others -----------------------------------------------------------------------------

    def _chat(self, prompt: Prompt) -> Rendered:
        arranged = arrange(prompt, self.tool_style)
        self._check_tools(prompt, arranged)
        texts = [part.text or "" for part in arranged.parts]
        opens = prompt.add_generation_prompt and not _continues(prompt)
        whole = self._run(arranged, texts.__getitem__, _as_object, opens=opens)
        marked, pieces = self._with_marked_calls(arranged, whole, opens=opens)
        unmarked: dict[int, int] = {}
        if pieces is None:
            marked = self._run(arranged, mark, _as_object, opens=opens)
            pieces = lay_out(marked, whole, arranged.parts)
            if pieces is None:
                return self._at_once(prompt, arranged, whole)
            self._check_all(prompt, arranged, calls_only=True)
            unmarked = self._offsets.of_calls(arranged, marked)
        offsets = {**self._offsets.of_tools(arranged, marked), **unmarked}
        if _continues(prompt):
            pieces = _open_ended(pieces, len(arranged.parts) - 1)
        return self._tokens(arranged, pieces, offsets, len(marked))

    def _with_marked_calls(
        self, arranged: TemplateInput, whole: str, *, opens: bool
    ) -> tuple[str, tuple[Piece, ...] | None]:
        """What a template makes of marks in place of arguments; it may not take them for any."""
        try:
            marked = self._run(arranged, mark, _as_mark, opens=opens)
        except Refusal:
            return "", None
        return marked, lay_out(marked, whole, arranged.parts)

    def _tokens(
        self,
        arranged: TemplateInput,
        pieces: Sequence[Piece],
        offsets: dict[int, int],
        length: int,
    ) -> Rendered:
        """Piece by piece; the template's own are cut at `offsets` (by part), too."""
        ids: list[int] = []
        ends: dict[int, int] = {}
        cuts = sorted((offset, part) for part, offset in offsets.items() if offset < length)
        for piece in pieces:
            if piece.part is not None:
                ids.extend(self.tokenizer.encode(piece.text, specials=False, is_first=not ids))
                ends[piece.part] = len(ids)
                continue
            at = 0
            while cuts and cuts[0][0] <= piece.start + len(piece.text):
                offset, part = cuts.pop(0)
                upto = max(at, offset - piece.start)
                text = piece.text[at:upto]
                ids.extend(self.tokenizer.encode(text, specials=True, is_first=not ids))
                at, ends[part] = upto, len(ids)
            text = piece.text[at:]
            ids.extend(self.tokenizer.encode(text, specials=True, is_first=not ids))
        # What has no end here by now ends with the prompt.
        ends.update({part: len(ids) for part in offsets if part not in ends})
        return Rendered(tuple(ids), _boundaries(arranged, ends))

    def _at_once(self, prompt: Prompt, arranged: TemplateInput, whole: str) -> Rendered:
        self._check_all(prompt, arranged)
        if _continues(prompt):
            last = len(arranged.parts) - 1
            texts = [part.text or "" for part in arranged.parts]
            texts[last] += LAST
            whole = self._run(arranged, texts.__getitem__, _as_object, opens=False)
            whole = whole.partition(LAST)[0]
        ids = self.tokenizer.encode(whole, specials=True)
        last_mark = next(
            (part.boundary for part in reversed(arranged.parts) if part.boundary), None
        )
        if last_mark is None:
            return Rendered(ids)
        return Rendered(ids, (replace(last_mark, tokens=len(ids)),))

    def _check_all(
        self, prompt: Prompt, arranged: TemplateInput, *, calls_only: bool = False
    ) -> None:
        """Refuse what could not be told from the template's own."""
        texts = [p.text or "" for p in arranged.parts if p.is_call or not calls_only]
        for joined in ("".join(texts), "".join(text.strip() for text in texts)):
            if (special := self._special_words.search(joined)) is not None:
                message = (
                    f"The messages contain {special[0]!r}, which this model's template cannot tell"
                    " from its own."
                )
                raise Refusal(Kind.BAD, "invalid_value", message, param=prompt.field)

    def _run(
        self,
        arranged: TemplateInput,
        text_of: Callable[[int], str],
        arguments: Callable[[int, ToolCall], object],
        *,
        opens: bool,
    ) -> str:
        """The template over messages."""
        messages = arranged.for_template(self.tool_style, text_of, arguments)
        return self._apply(messages, list(arranged.tools) or None, opens=opens)

    def _apply(
        self,
        messages: Sequence[dict[str, object]],
        tools: list[TemplateTool] | None,
        *,
        opens: bool,
    ) -> str:
        return self._template.render(
            messages,
            add_generation_prompt=opens,
            tools=tools,
            documents=None,
            bos_token=self._text_of(self.card.bos_token_id),
            eos_token=self._text_of(next(iter(self.card.stop_token_ids), None)),
        )

    def _marker_ids(self) -> dict[str, int]:
        return {text: token_id for token_id, text in self._markers.items()}

    def _text_of(self, token_id: int | None) -> str:
        return self._token_texts.get(token_id, "") if token_id is not None else ""


def _as_object(_part: int, call: ToolCall) -> object:
    return arguments_of(call.arguments)[0]


def _as_mark(part: int, _call: ToolCall) -> object:
    return mark(part)


def _continues(prompt: Prompt) -> bool:
    """Is the last message left open? It is the assistant's, and text."""
    last = prompt.segments[-1] if prompt.segments else None
    return prompt.continues and last is not None and last.call is None and last.role == "assistant"


def _open_ended(pieces: Sequence[Laid], last: int) -> tuple[Laid, ...]:
    """Without what the template writes behind the last part."""
    for number, piece in enumerate(pieces):
        if piece.part == last:
            return tuple(pieces[: number + 1])
    return tuple(pieces)


def _boundaries(arranged: TemplateInput, ends: dict[int, int]) -> tuple[Boundary, ...]:
    """In API order; where the template writes in another one, the furthest end so far. A part that
    the template leaves out ends with the one before it."""
    furthest, found = 0, []
    for number, part in enumerate(arranged.parts):
        furthest = max(furthest, ends.get(number, 0))
        if part.boundary is not None:
            found.append(replace(part.boundary, tokens=furthest))
    return tuple(found)


def _is_plain(segment: Segment) -> bool:
    """Only a text, which answers no call."""
    return segment.call is None and segment.answers is None


def _check_text(text: str, path: str) -> None:
    if MARK_SIGNS[0] in text or MARK_SIGNS[1] in text:
        message = f"{path}: the private-use characters U+E0F0 and U+E0F1 are not taken."
        raise Refusal(Kind.BAD, "invalid_value", message, param=path)
    try:
        text.encode()
    except UnicodeEncodeError:
        message = f"{path}: it is not valid Unicode (a lone surrogate)."
        raise Refusal(Kind.BAD, "invalid_value", message, param=path) from None
