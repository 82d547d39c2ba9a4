"""A text that a template may write and join but not look at.

Rendered with such texts in place of contents, a template shows what it does to any contents: chats
of one shape then need no further rendering. Whatever would depend on the text (a comparison, its
length, its truth, a cut, a method) is noted and fails, even where Jinja would swallow the failure,
and the chat is rendered in full. `trim` of a whole content is the one thing that is done to it. It
knows no template; `sandbox` lets it through, `render` makes it.
"""

from __future__ import annotations

from typing import Any, Never

TRIMMED = "\ue0f2"
"""Stands inside a mark whose text is trimmed."""


class Glance:
    """Was any text of one rendering looked at?"""

    __slots__ = ("was_taken",)

    def __init__(self) -> None:
        self.was_taken = False


class Opaque:
    """Marks and what was joined to them; `is_whole`: nothing but one mark. No attribute of it has a
    name that a template could ask for."""

    __slots__ = ("_glance", "_is_whole", "_text")

    def __init__(self, text: str, glance: Glance, *, is_whole: bool = False) -> None:
        self._text = text
        self._glance = glance
        self._is_whole = is_whole

    def __add__(self, other: object) -> Opaque:
        return self._joined(self, other)

    def __radd__(self, other: object) -> Opaque:
        return self._joined(other, self)

    def _joined(self, *sides: object) -> Opaque:
        texts = [side._text if type(side) is Opaque else side for side in sides]
        if not all(type(text) is str for text in texts):
            self._look()
        return Opaque("".join(map(str, texts)), self._glance)

    def _look(self, *_: object, **__: object) -> Never:
        self._glance.was_taken = True
        raise TypeError("the text is not to be looked at")

    def __getattr__(self, name: str) -> Any:
        self._look()

    __bool__ = __len__ = __iter__ = __contains__ = __getitem__ = __reversed__ = _look
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __hash__ = _look
    __str__ = __repr__ = __format__ = __bytes__ = _look
    __int__ = __float__ = __index__ = __mul__ = __rmul__ = __mod__ = __rmod__ = _look


def trimmed(value: Opaque) -> Opaque:
    """Without the white space around it. Only a whole content's is at its own ends."""
    if not value._is_whole:
        value._look()
    text = value._text
    if TRIMMED not in text:
        text = f"{text[:-1]}{TRIMMED}{text[-1]}"
    return Opaque(text, value._glance, is_whole=True)


def written(value: object) -> object:
    """What an output statement writes of a value."""
    return value._text if type(value) is Opaque else value


def joined(values: tuple[object, ...]) -> str | Opaque:
    """`a ~ b`: all of them as one text."""
    glance = next((value._glance for value in values if type(value) is Opaque), None)
    text = "".join(value._text if type(value) is Opaque else str(value) for value in values)
    return text if glance is None else Opaque(text, glance)
