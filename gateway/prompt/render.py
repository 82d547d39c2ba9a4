"""From a canonical prompt to token ids and boundaries.

Messages go through the model's template with marks in place of their contents; the text between
the marks is the template's, where special tokens are meant, and what replaces the marks is the
client's, where they are only text. Where a template does something to contents that marks would
not survive (trims them, asks what is in them), the whole text is rendered and tokenized at once;
contents that spell a special token are refused then: they could not be told from its own.
"""

from __future__ import annotations

import re
from pathlib import Path

from engine.model_store import ModelCard, load_card
from gateway.dialects.canonical import Boundary, Prompt, Rendered, Segment
from gateway.errors import Kind, Refusal
from gateway.prompt.detokenizer import Detokenizer
from gateway.prompt.template import ChatTemplate
from gateway.prompt.tokenizer import PieceTokenizer

_MARK = re.compile("\ue0f0(\\d+)\ue0f1")
_MARK_SIGNS = frozenset("\ue0f0\ue0f1")


class Renderer:
    """Template and tokenizer of one model. Thread-safe."""

    def __init__(self, card: ModelCard) -> None:
        self.card = card
        self.tokenizer = PieceTokenizer(card.tokenizer_path, card.special_token_ids)
        self._template = ChatTemplate(card.template_path.read_text())
        self._token_texts = self.tokenizer.special_texts()

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

    def detokenizer(self, stops: tuple[str, ...] = ()) -> Detokenizer:
        """For one choice's text."""
        return Detokenizer(self.tokenizer.token_bytes, stops)

    def special_text(self, token_id: int) -> str:
        """How the template writes a special token; nothing for others."""
        return self._text_of(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token."""
        return self.tokenizer.token_bytes(token_id)

    def render(self, prompt: Prompt) -> Rendered:
        """Token ids. CPU-bound: about 1 ms per 1,000 new words. Raises Refusal."""
        start: tuple[int, ...] = ()
        if self.card.add_bos and self.card.bos_token_id is not None:
            start = (self.card.bos_token_id,)
        if prompt.token_ids is not None:
            return Rendered(prompt.token_ids)
        if prompt.text is not None:
            _check_text(prompt.text, "prompt")
            return Rendered(start + self.tokenizer.encode(prompt.text, specials=True))
        for segment in prompt.segments:
            _check_text(segment.text, segment.path)
        return self._chat(prompt)

    def _chat(self, prompt: Prompt) -> Rendered:
        segments = prompt.segments
        marked = self._apply(segments, [f"\ue0f0{i}\ue0f1" for i in range(len(segments))], prompt)
        whole = self._apply(segments, [segment.text for segment in segments], prompt)
        pieces = _MARK.split(marked)
        numbers = [int(number) for number in pieces[1::2]]
        if numbers != list(range(len(segments))):
            return self._at_once(prompt, whole)
        texts = [segments[n // 2].text if n % 2 else piece for n, piece in enumerate(pieces)]
        if "".join(texts) != whole:
            return self._at_once(prompt, whole)
        ids: list[int] = []
        boundaries = []
        for n, text in enumerate(texts):
            ids.extend(self.tokenizer.encode(text, specials=n % 2 == 0))
            if n % 2:
                segment = segments[numbers[n // 2]]
                boundaries.append(Boundary(len(ids), segment.path, segment.retention))
        return Rendered(tuple(ids), tuple(boundaries))

    def _at_once(self, prompt: Prompt, whole: str) -> Rendered:
        for segment in prompt.segments:
            for special in self._token_texts.values():
                if special in segment.text:
                    message = (
                        f"{segment.path}: it contains {special!r}, which this model's template"
                    )
                    raise Refusal(
                        Kind.BAD,
                        "invalid_value",
                        message + " cannot tell from its own.",
                        param=segment.path,
                    )
        ids = self.tokenizer.encode(whole, specials=True)
        last = prompt.segments[-1]
        return Rendered(ids, (Boundary(len(ids), last.path, last.retention),))

    def _apply(self, segments: tuple[Segment, ...], texts: list[str], prompt: Prompt) -> str:
        """The template over messages; parts of one message are joined."""
        messages: list[dict[str, object]] = []
        last = -1
        for segment, text in zip(segments, texts, strict=True):
            if segment.message == last:
                messages[-1]["content"] = f"{messages[-1]['content']}{text}"
                continue
            last = segment.message
            role = "system" if segment.role == "developer" else segment.role
            message: dict[str, object] = {"role": role, "content": text}
            if segment.name is not None:
                message["name"] = segment.name
            messages.append(message)
        return self._template.render(
            messages,
            add_generation_prompt=prompt.add_generation_prompt,
            tools=None,
            documents=None,
            bos_token=self._text_of(self.card.bos_token_id),
            eos_token=self._text_of(next(iter(self.card.stop_token_ids), None)),
        )

    def _text_of(self, token_id: int | None) -> str:
        return self._token_texts.get(token_id, "") if token_id is not None else ""


def _check_text(text: str, path: str) -> None:
    if not _MARK_SIGNS.isdisjoint(text):
        message = f"{path}: the private-use characters U+E0F0 and U+E0F1 are not taken."
        raise Refusal(Kind.BAD, "invalid_value", message, param=path)
    try:
        text.encode()
    except UnicodeEncodeError:
        message = f"{path}: it is not valid Unicode (a lone surrogate)."
        raise Refusal(Kind.BAD, "invalid_value", message, param=path) from None
