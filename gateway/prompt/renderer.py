"""Render a canonical prompt to token ids and boundaries.

Messages pass through the model's chat template with placeholders instead of their contents. The
text between the placeholders is the template's own, where special tokens are meant; the text that
replaces the placeholders is the client's, where special tokens are plain text. Contents may come
out trimmed. Where a template does more to contents (tests them, cuts pieces out), the whole text is
rendered and tokenized at once; contents that spell a special token are then refused, because they
would be indistinguishable from the template's own. The same holds for tools that a template writes
itself. Preparation (`gateway.generation.preparation`) calls it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import filterfalse
from operator import attrgetter
from pathlib import Path
from typing import Literal, Protocol, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from engine.errors import ModelError
from engine.model_store import ModelCard, load_card
from gateway.dialects.canonical import (
    DEFAULT_THINKING,
    Boundary,
    Prompt,
    Rendered,
    Role,
    Segment,
    Thinking,
    ToolCall,
)
from gateway.errors import Kind, Refusal
from gateway.owner_cache import OwnerCache
from gateway.prompt.detokenizer import Detokenizer
from gateway.prompt.layout import (
    END_PLACEHOLDER,
    PLACEHOLDER_CHARS,
    Piece,
    ShapeStep,
    ToolOffsets,
    arguments_object,
    arguments_placeholder,
    placeholder,
    split_rendering,
    split_shape,
)
from gateway.prompt.messages import TemplateInput, TemplateTool, build_template_input
from gateway.prompt.opaque_text import OpaqueText, ReadRecorder
from gateway.prompt.template import ChatTemplate
from gateway.prompt.token_budget import TokenBudget
from gateway.prompt.tokenizer import PieceTokenizer
from gateway.structured_output.grammars import behind_thought, build_grammar
from gateway.structured_output.harmony_grammar import harmony_grammar
from gateway.structured_output.json_text import collect_strings, parse_json
from gateway.structured_output.thinking import ThinkingFormat, detect_thinking
from gateway.structured_output.tool_styles import ToolStyle, detect_style
from gateway.template_date import Calendar

SHAPES_SEGMENTS_MAX, SHAPE_SEGMENTS_MAX = 32_768, 128
"""How many segments the cached chat shapes have together, and the most of one, each a few hundred
bytes. A shape is also cached if the template's output depends on contents."""


_is_thought = attrgetter("is_thought")
Laid = TypeVar("Laid", Piece, ShapeStep)
SegmentShape = tuple[Role, str, str | None, int, str | None]
"""A segment without its text: (role, path, name, message, retention)."""
Variables = tuple[tuple[str, object], ...]
"""Further variables of a template, by name."""
_ShapeKey = tuple[tuple[SegmentShape, ...], bool, bool, Thinking, Variables]


class Encode(Protocol):
    """Tokenizes a piece of one prompt: `PieceTokenizer.encode` for its owner and budget."""

    def __call__(self, text: str, *, specials: bool, is_first: bool = True) -> tuple[int, ...]:
        """Return the token ids of a piece."""


class ChatShape(Struct, frozen=True):
    """The template's output for every chat with the same roles and names: `steps` in order, `inner`
    with the token ids of the template's own pieces when they do not begin the prompt, and
    `boundaries` of the segments, tokens not yet set."""

    steps: tuple[ShapeStep, ...]
    inner: tuple[tuple[int, ...], ...]
    boundaries: tuple[Boundary, ...]
    thought: Literal["", "possible", "open"] = ""
    """As in `Rendered`."""


class Renderer:
    """The chat template and tokenizer of one model. Thread-safe."""

    def __init__(self, card: ModelCard, calendar: Calendar | None = None) -> None:
        """`calendar`: says what day it is to templates that ask; None: by the machine's clock.
        Raises ModelError for a tokenizer or a template that cannot be used."""
        self.card = card
        try:
            self.tokenizer = PieceTokenizer(card.tokenizer_path, card.special_token_ids)
            source = self.template_source = card.template_path.read_text()
            self._template = ChatTemplate(source, calendar=calendar)
        except Exception as error:  # the tokenizers' library raises nothing narrower
            told = " ".join(str(error).split())[:500]
            raise ModelError("corrupt", f"{card.source} cannot be used: {told}") from error
        self.tool_style: ToolStyle = detect_style(source, self._template.variables)
        self.thinking: ThinkingFormat = detect_thinking(source, self._template.variables)
        self._token_texts = self.tokenizer.special_texts()
        self._has_system = self.tool_style.is_native or self._shows_system()
        self._offsets = ToolOffsets(self._run_template, frozenset(self._token_texts.values()))
        self._shapes: OwnerCache[_ShapeKey, tuple[ChatShape | None]] = OwnerCache(
            SHAPES_SEGMENTS_MAX
        )
        markers = (self.tool_style.opening.strip(), self.tool_style.closing.strip())
        self._markers = {i: text for i, text in self._token_texts.items() if text in markers}
        # Each output token is looked up here: a list access instead of a Python call.
        spelt = self.tokenizer.spell(card.config.vocab)
        self.token_bytes_max = max(map(len, spelt))
        thoughts = {i: t for i, t in self._token_texts.items() if t in self.thinking.markers}
        self._token_bytes = {
            (False, False): _spell(spelt),
            (False, True): _spell(spelt, thoughts),
            (True, False): _spell(spelt, self._markers),
            (True, True): _spell(spelt, self._markers, thoughts),
        }
        self._marker_ids = {t: i for table in (self._markers, thoughts) for i, t in table.items()}

    @classmethod
    def load(cls, folder: Path) -> Renderer:
        """Load a prepared model folder. Raises ModelError."""
        return cls(load_card(folder))

    def detokenizer(
        self,
        stops: tuple[str, ...] = (),
        *,
        shows_markers: bool = False,
        shows_thoughts: bool = False,
    ) -> Detokenizer:
        """Return a detokenizer for one choice. `shows_markers` and `shows_thoughts`: special tokens
        that open or close a tool call, or a thought, become part of the text."""
        return Detokenizer(self._token_bytes[shows_markers, shows_thoughts], stops)

    @property
    def start_ids(self) -> tuple[int, ...]:
        """The token ids that the model expects before a text; templates write their own."""
        first = self.card.bos_token_id
        return (first,) if self.card.add_bos and first is not None else ()

    def special_text(self, token_id: int | None) -> str:
        """Return how the template writes a special token; "" for other tokens and for none."""
        return "" if token_id is None else self._token_texts.get(token_id, "")

    def render(self, prompt: Prompt, owner: int = 0, budget: TokenBudget | None = None) -> Rendered:
        """Return token ids, boundaries and grammar. CPU-bound: about 1 ms per 1,000 new words.

        `owner`: whose cached pieces, shapes and tools may be found. Raises Refusal if the prompt
        cannot be rendered, and what `budget` raises.
        """
        encode: Encode = partial(self.tokenizer.encode, owner=owner, budget=budget)
        grammar = build_grammar(prompt, self.tool_style, self._marker_ids)
        if prompt.token_ids is not None:
            return Rendered(prompt.token_ids, grammar=grammar)
        if prompt.text is not None:
            _check_text(prompt.text, "prompt")
            ids = self.start_ids + encode(prompt.text, specials=True)
            return Rendered(ids, grammar=grammar)
        if not self.thinking.history and any(map(_is_thought, prompt.segments)):
            prompt = replace(prompt, segments=tuple(filterfalse(_is_thought, prompt.segments)))
        for segment in prompt.segments:
            _check_text(segment.text, segment.path)
            if not _is_plain(segment) or segment.name is not None:
                self._check_names(segment)
        shape = self._shape_of(prompt, owner, encode)
        if shape is None:
            rendered, text = self._render_full(prompt, owner, encode)
            if thought := self._thought_after(prompt, text):
                rendered = replace(rendered, thought=thought)
        else:
            rendered = _render_shape(prompt, shape, encode)
        if rendered.thought and self.thinking.kind == "harmony":
            tokens_max = self.thinking.budget(prompt.thinking)
            grammar = harmony_grammar(prompt, self._marker_ids, tokens_max)
        elif rendered.thought:
            grammar = behind_thought(
                grammar, self.thinking, rendered.thought, self._marker_ids, prompt.thinking
            )
        return rendered if grammar is None else replace(rendered, grammar=grammar)

    def encode_text(self, text: str, path: str, owner: int, budget: TokenBudget) -> tuple[int, ...]:
        """Return the token ids of a plain text that the model may write, without special tokens.

        `path`: its field, for errors. Raises Refusal, and what `budget` raises.
        """
        _check_text(text, path)
        encode = self.tokenizer.encode
        return encode(text, specials=False, is_first=False, owner=owner, budget=budget)

    def uncached_chars(self, prompt: Prompt, owner: int = 0) -> int:
        """Return how many characters of a chat's texts and calls are not cached for the owner.

        Hashes the texts: O(characters), about 1 ns each.
        """
        new = 0
        for segment in prompt.segments:
            if not self.tokenizer.is_cached(segment.text, specials=False, owner=owner):
                new += len(segment.text)
            if segment.call is not None:
                new += len(segment.call.arguments)
        return new

    def _shows_system(self) -> bool:
        """Return whether the template writes a system message: Gemma 2's refuses one, and others
        drop it. One that renders no message of a user either says nothing."""
        messages: list[dict[str, object]] = [
            {"role": "system", "content": "said-by-system"},
            {"role": "user", "content": "u"},
        ]
        render = partial(self._apply, tools=None, opens_turn=True, variables=())
        try:
            render(messages[1:])
        except Refusal:
            return True
        try:
            return "said-by-system" in render(messages)
        except Refusal:
            return False

    # -- client text that must not occur --------------------------------------------------------

    def _check_tools(self, prompt: Prompt, template_input: TemplateInput) -> None:
        """Refuse tools if their text spells a special token: the template writes them as its
        own."""
        for tool, written in zip(prompt.tools, template_input.tools, strict=False):
            schema = collect_strings(written["function"]["parameters"])
            self._check_words("".join((tool.name, tool.description, *schema)), tool.path)
        for part in template_input.parts[: 0 if template_input.tools else len(prompt.tools) + 1]:
            _check_text(part.text or "", part.boundary.path if part.boundary else "tools")

    def _check_names(self, segment: Segment) -> None:
        """Refuse names and ids that spell a special token: the template writes them as its own."""
        path = f"messages[{segment.message}].name"
        self._check_words(segment.name or "", path)
        self._check_words(segment.answers or "", segment.path)
        if segment.call is not None:
            call = segment.call
            _check_text(
                call.arguments + "".join(collect_strings(parse_json(call.arguments))), segment.path
            )
            self._check_words(call.name, segment.path)
            self._check_words(call.call_id, segment.path)

    def _check_words(self, text: str, path: str) -> None:
        if not text:
            return  # most messages have no name
        _check_text(text, path)
        if (special := self.tokenizer.special_words.search(text)) is not None:
            message = f"{path}: must not contain the special token {special[0]!r}."
            raise Refusal(Kind.BAD, "invalid_value", message, param=path)

    # -- chats of a cached shape ----------------------------------------------------------------

    def _shape_of(self, prompt: Prompt, owner: int, encode: Encode) -> ChatShape | None:
        """Return the chat's shape; None if the template's output depends on its contents."""
        segments = prompt.segments
        if prompt.tools or len(segments) > SHAPE_SEGMENTS_MAX or self._template.has_captures:
            return None
        if not all(map(_is_plain, segments)):
            return None
        if not self._has_system and any(s.role in ("system", "developer") for s in segments):
            return None
        bare = tuple([(s.role, s.path, s.name, s.message, s.retention) for s in segments])
        wanted = prompt.thinking if self.thinking.kind != "none" else DEFAULT_THINKING
        dated = self._template.date_variables()
        key = (bare, prompt.add_generation_prompt, prompt.continues, wanted, dated)
        known = self._shapes.get(owner, key)
        if known is None:
            known = (self._shape(*key, encode),)
            self._shapes.put(owner, key, known, 1 + len(segments))
        return known[0]

    def _shape(
        self,
        bare: tuple[SegmentShape, ...],
        opens_turn: bool,
        continues: bool,
        thinking: Thinking,
        dated: Variables,
        encode: Encode,
    ) -> ChatShape | None:
        """Render opaque texts; None if the template reads them or refuses."""
        segments = tuple(
            Segment(role, "", path, name, message, retention)
            for role, path, name, message, retention in bare
        )
        prompt = Prompt(
            segments, add_generation_prompt=opens_turn, continues=continues, thinking=thinking
        )
        template_input = build_template_input(prompt, self.tool_style, self.thinking)
        recorder = ReadRecorder()
        messages = template_input.for_template(self.tool_style, placeholder, arguments_placeholder)
        for message, template_message in zip(messages, template_input.messages, strict=True):
            is_whole = len(template_message.parts) == 1
            message["content"] = OpaqueText(str(message["content"]), recorder, is_whole=is_whole)
        try:
            text = self._apply(
                messages,
                None,
                opens_turn=opens_turn and not _is_open_ended(prompt),
                variables=(*template_input.variables, *dated),
            )
        except Refusal:
            return None
        steps = split_shape(text, len(segments))
        if recorder.was_read or steps is None:
            return None
        if _is_open_ended(prompt):
            steps = _drop_after(steps, len(segments) - 1)
        inner = [encode(step.text, specials=True, is_first=False) for step in steps]
        tail = steps[-1].text if steps and steps[-1].part is None else ""
        thought = self._thought_after(prompt, tail)
        return ChatShape(steps, tuple(inner), _boundaries_at(template_input, {}), thought)

    # -- all other prompts ----------------------------------------------------------------------

    def _render_full(self, prompt: Prompt, owner: int, encode: Encode) -> tuple[Rendered, str]:
        """Return the rendered prompt, and its text as the template writes it."""
        template_input = build_template_input(
            prompt, self.tool_style, self.thinking, has_system=self._has_system
        )
        variables = (*template_input.variables, *self._template.date_variables())
        template_input = replace(template_input, variables=variables)
        self._check_tools(prompt, template_input)
        texts = [part.text or "" for part in template_input.parts]
        opens_turn = prompt.add_generation_prompt and not _is_open_ended(prompt)
        whole = self._run_template(
            template_input, texts.__getitem__, arguments_object, opens_turn=opens_turn
        )
        marked, pieces = self._split_with_call_placeholders(
            template_input, whole, opens_turn=opens_turn
        )
        unmarked: dict[int, int] = {}
        if pieces is None:
            marked = self._run_template(
                template_input, placeholder, arguments_object, opens_turn=opens_turn
            )
            pieces = split_rendering(marked, whole, template_input.parts)
            if pieces is None:
                return self._render_unsplit(prompt, template_input, whole, encode), whole
            self._check_all(prompt, template_input, calls_only=True)
            unmarked = self._offsets.call_ends(template_input, marked)
        offsets = {**self._offsets.tool_ends(template_input, marked, owner), **unmarked}
        if _is_open_ended(prompt):
            pieces = _drop_after(pieces, len(template_input.parts) - 1)
        return _tokens(template_input, pieces, offsets, len(marked), encode), whole

    def _thought_after(self, prompt: Prompt, tail: str) -> Literal["", "possible", "open"]:
        """Return whether the answer thinks, from the template's own last text."""
        if self.thinking.kind == "none" or not prompt.add_generation_prompt:
            return ""
        if _is_open_ended(prompt):
            return ""
        if self.thinking.kind == "harmony":
            return "possible"
        end = tail.rstrip()
        if end.endswith(self.thinking.opening):
            return "open"
        return "" if end.endswith(self.thinking.closing) else "possible"

    def _split_with_call_placeholders(
        self, template_input: TemplateInput, whole: str, *, opens_turn: bool
    ) -> tuple[str, tuple[Piece, ...] | None]:
        """Render placeholders instead of call arguments; "" and None if the template refuses."""
        try:
            marked = self._run_template(
                template_input, placeholder, arguments_placeholder, opens_turn=opens_turn
            )
        except Refusal:
            return "", None
        return marked, split_rendering(marked, whole, template_input.parts)

    def _render_unsplit(
        self, prompt: Prompt, template_input: TemplateInput, whole: str, encode: Encode
    ) -> Rendered:
        self._check_all(prompt, template_input)
        if _is_open_ended(prompt):
            last = len(template_input.parts) - 1
            texts = [part.text or "" for part in template_input.parts]
            texts[last] += END_PLACEHOLDER
            whole = self._run_template(
                template_input, texts.__getitem__, arguments_object, opens_turn=False
            )
            whole = whole.partition(END_PLACEHOLDER)[0]
        ids = encode(whole, specials=True)
        last_mark = next(
            (part.boundary for part in reversed(template_input.parts) if part.boundary), None
        )
        if last_mark is None:
            return Rendered(ids)
        return Rendered(ids, (replace(last_mark, tokens=len(ids)),))

    def _check_all(
        self, prompt: Prompt, template_input: TemplateInput, *, calls_only: bool = False
    ) -> None:
        """Refuse texts that contain special tokens: they would look like the template's own."""
        texts = [p.text or "" for p in template_input.parts if p.is_call or not calls_only]
        for joined in ("".join(texts), "".join(text.strip() for text in texts)):
            if (special := self.tokenizer.special_words.search(joined)) is not None:
                message = (
                    f"The messages contain {special[0]!r}, which this model's template cannot"
                    " distinguish from its own special tokens."
                )
                raise Refusal(Kind.BAD, "invalid_value", message, param=prompt.field)

    def _run_template(
        self,
        template_input: TemplateInput,
        text_of: Callable[[int], str],
        arguments: Callable[[int, ToolCall], object],
        *,
        opens_turn: bool,
    ) -> str:
        """Run the template over the messages."""
        messages = template_input.for_template(self.tool_style, text_of, arguments)
        return self._apply(
            messages,
            list(template_input.tools) or None,
            opens_turn=opens_turn,
            variables=template_input.variables,
        )

    def _apply(
        self,
        messages: Sequence[dict[str, object]],
        tools: list[TemplateTool] | None,
        *,
        opens_turn: bool,
        variables: Variables,
    ) -> str:
        return self._template.render(
            messages,
            **dict(variables),
            add_generation_prompt=opens_turn,
            tools=tools,
            documents=None,
            bos_token=self.special_text(self.card.bos_token_id),
            eos_token=self.special_text(self.card.eos_token_id),
        )


def _render_shape(prompt: Prompt, shape: ChatShape, encode: Encode) -> Rendered:
    ids: list[int] = []
    ends = [0] * len(prompt.segments)
    for step, known in zip(shape.steps, shape.inner, strict=True):
        if step.part is None:
            ids += known if ids else encode(step.text, specials=True)
            continue
        text = prompt.segments[step.part].text
        ids += encode(text.strip() if step.is_trimmed else text, specials=False, is_first=not ids)
        ends[step.part] = len(ids)
    boundaries = _located(zip(shape.boundaries, ends, strict=True))
    return Rendered(tuple(ids), boundaries, thought=shape.thought)


def _spell(spelt: list[bytes], *tables: Mapping[int, str]) -> Callable[[int], bytes]:
    """Return the bytes of each token; `tables`: special tokens that are text."""
    shown = {i: text.encode() for table in tables for i, text in table.items()}
    if not shown:
        return spelt.__getitem__
    return [plain or shown.get(i, b"") for i, plain in enumerate(spelt)].__getitem__


def _tokens(
    template_input: TemplateInput,
    pieces: Sequence[Piece],
    offsets: dict[int, int],
    length: int,
    encode: Encode,
) -> Rendered:
    """Tokenize piece by piece; cut template text at `offsets` (by part) too."""
    ids: list[int] = []
    ends: dict[int, int] = {}
    cuts = deque(sorted((offset, part) for part, offset in offsets.items() if offset < length))
    for piece in pieces:
        if piece.part is not None:
            ids.extend(encode(piece.text, specials=False, is_first=not ids))
            ends[piece.part] = len(ids)
            continue
        at = 0
        while cuts and cuts[0][0] <= piece.start + len(piece.text):
            offset, part = cuts.popleft()
            upto = max(at, offset - piece.start)
            ids.extend(encode(piece.text[at:upto], specials=True, is_first=not ids))
            at, ends[part] = upto, len(ids)
        ids.extend(encode(piece.text[at:], specials=True, is_first=not ids))
    # A part without an end so far ends with the prompt.
    ends.update({part: len(ids) for part in offsets if part not in ends})
    return Rendered(tuple(ids), _boundaries_at(template_input, ends))


def _is_open_ended(prompt: Prompt) -> bool:
    """Whether the prompt ends with an open assistant message of text."""
    last = prompt.segments[-1] if prompt.segments else None
    return prompt.continues and last is not None and last.call is None and last.role == "assistant"


def _drop_after(pieces: Sequence[Laid], last: int) -> tuple[Laid, ...]:
    """Drop the text that the template writes after the last part."""
    for number, piece in enumerate(pieces):
        if piece.part == last:
            return tuple(pieces[: number + 1])
    return tuple(pieces)


def _boundaries_at(template_input: TemplateInput, ends: dict[int, int]) -> tuple[Boundary, ...]:
    """Return the boundaries of a prompt with parts that end here; a part that the template leaves
    out ends with the part before it."""
    return _located(
        (part.boundary, ends.get(number, 0)) for number, part in enumerate(template_input.parts)
    )


def _located(parts: Iterable[tuple[Boundary | None, int]]) -> tuple[Boundary, ...]:
    """Return the boundaries in API order with their ends. A template that reorders parts gives the
    furthest end so far."""
    furthest, found = 0, []
    for boundary, end in parts:
        furthest = max(furthest, end)
        if boundary is not None:
            own = end if end < furthest else 0
            found.append(replace(boundary, tokens=furthest, own_tokens=own))
    return tuple(found)


def _is_plain(segment: Segment) -> bool:
    """Whether the segment is only text: no call, no call's result and no thought."""
    return segment.call is None and segment.answers is None and not segment.is_thought


def _check_text(text: str, path: str) -> None:
    if PLACEHOLDER_CHARS[0] in text or PLACEHOLDER_CHARS[1] in text:
        message = f"{path}: must not contain the private-use characters U+E0F0 or U+E0F1."
        raise Refusal(Kind.BAD, "invalid_value", message, param=path)
    try:
        text.encode()
    except UnicodeEncodeError:
        message = f"{path}: invalid Unicode: it contains a lone surrogate."
        raise Refusal(Kind.BAD, "invalid_value", message, param=path) from None
