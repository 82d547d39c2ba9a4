"""From a canonical prompt to token ids and boundaries.

Messages go through the model's template with marks in place of their contents; the text between
the marks is the template's, where special tokens are meant, and what replaces the marks is the
client's, where they are only text. Contents may come out trimmed. Where a template does more to
them (asks what is in them, cuts pieces out), the whole text is rendered and tokenized at once;
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
_MARK_SIGNS = ("\ue0f0", "\ue0f1")


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
            self._check_name(segment)
        return self._chat(prompt)

    def _chat(self, prompt: Prompt) -> Rendered:
        segments = prompt.segments
        marked = self._apply(segments, [f"\ue0f0{i}\ue0f1" for i in range(len(segments))], prompt)
        whole = self._apply(segments, [segment.text for segment in segments], prompt)
        pieces = _MARK.split(marked)
        texts = None
        if pieces[1::2] == [str(number) for number in range(len(segments))]:
            texts = _aligned(whole, pieces[::2], [segment.text for segment in segments])
        if texts is None:
            return self._at_once(prompt, whole)
        ids: list[int] = list(self.tokenizer.encode(pieces[0], specials=True))
        boundaries = []
        for segment, text, after in zip(segments, texts, pieces[2::2], strict=True):
            ids.extend(self.tokenizer.encode(text, specials=False, is_first=not ids))
            boundaries.append(Boundary(len(ids), segment.path, segment.retention))
            ids.extend(self.tokenizer.encode(after, specials=True, is_first=not ids))
        return Rendered(tuple(ids), tuple(boundaries))

    def _at_once(self, prompt: Prompt, whole: str) -> Rendered:
        texts = [segment.text for segment in prompt.segments]
        joined = ("".join(texts), "".join(text.strip() for text in texts))
        for special in self._token_texts.values():
            if special in joined[0] or special in joined[1]:
                message = (
                    f"The messages contain {special!r}, which this model's template cannot tell"
                    " from its own."
                )
                raise Refusal(Kind.BAD, "invalid_value", message, param="messages")
        ids = self.tokenizer.encode(whole, specials=True)
        last = prompt.segments[-1]
        return Rendered(ids, (Boundary(len(ids), last.path, last.retention),))

    def _check_name(self, segment: Segment) -> None:
        """A name is written by the template, where special tokens are meant: it may hold none."""
        path = f"messages[{segment.message}].name"
        _check_text(segment.name or "", path)
        for special in self._token_texts.values():
            if special in (segment.name or ""):
                message = f"{path}: it contains {special!r}."
                raise Refusal(Kind.BAD, "invalid_value", message, param=path)

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


def _aligned(whole: str, pieces: list[str], texts: list[str]) -> list[str] | None:
    """What became of each text between the template's pieces: itself, or trimmed; else None."""
    if not whole.startswith(pieces[0]):
        return None
    at, found = len(pieces[0]), []
    for text, after in zip(texts, pieces[1:], strict=True):
        for variant in (text, text.strip(), text.rstrip(), text.lstrip()):
            end = at + len(variant)
            if whole.startswith(variant, at) and whole.startswith(after, end):
                break
        else:
            return None
        found.append(variant)
        at = end + len(after)
    return found if at == len(whole) else None


def _check_text(text: str, path: str) -> None:
    if any(sign in text for sign in _MARK_SIGNS):
        message = f"{path}: the private-use characters U+E0F0 and U+E0F1 are not taken."
        raise Refusal(Kind.BAD, "invalid_value", message, param=path)
    try:
        text.encode()
    except UnicodeEncodeError:
        message = f"{path}: it is not valid Unicode (a lone surrogate)."
        raise Refusal(Kind.BAD, "invalid_value", message, param=path) from None
