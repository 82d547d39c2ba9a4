"""Opaque stand-ins for message contents: a template may write and join them, but not read them.

A chat rendered with opaque texts shows how the template treats any contents, so chats of the same
shape (roles and names) need no further rendering. Every operation that depends on the text (a
comparison, its length, its truth, a slice, a method) is recorded and fails, even if Jinja would
swallow the exception; the chat is then rendered in full. `trim` of a whole content is the only
operation that is supported. The module knows no template; `gateway.prompt.sandbox` lets opaque
texts through, `gateway.prompt.renderer` makes them.
"""

from __future__ import annotations

from typing import Any, Never

TRIMMED = "\ue0f2"
"""The character inside a placeholder whose text the template trims."""


class ReadRecorder:
    """Records whether the template read any opaque text of one rendering."""

    __slots__ = ("was_read",)

    def __init__(self) -> None:
        self.was_read = False


class OpaqueText:
    """Placeholders and the text joined to them. `is_whole`: exactly one placeholder. No attribute
    has a name that a template could look up."""

    __slots__ = ("_is_whole", "_recorder", "_text")

    def __init__(self, text: str, recorder: ReadRecorder, *, is_whole: bool = False) -> None:
        self._text = text
        self._recorder = recorder
        self._is_whole = is_whole

    def __add__(self, other: object) -> OpaqueText:
        return self._joined(self, other)

    def __radd__(self, other: object) -> OpaqueText:
        return self._joined(other, self)

    def _joined(self, *sides: object) -> OpaqueText:
        texts = [side._text if type(side) is OpaqueText else side for side in sides]
        if not all(type(text) is str for text in texts):
            self._fail_read()
        return OpaqueText("".join(map(str, texts)), self._recorder)

    def _fail_read(self, *_: object, **__: object) -> Never:
        self._recorder.was_read = True
        raise TypeError("a template cannot read an opaque text")

    def __getattr__(self, name: str) -> Any:
        self._fail_read()

    __bool__ = __len__ = __iter__ = __contains__ = __getitem__ = __reversed__ = _fail_read
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __hash__ = _fail_read
    __str__ = __repr__ = __format__ = __bytes__ = _fail_read
    __int__ = __float__ = __index__ = __mul__ = __rmul__ = __mod__ = __rmod__ = _fail_read


def trim_opaque(value: OpaqueText) -> OpaqueText:
    """Return the text without surrounding white space; only for a single whole content."""
    if not value._is_whole:
        value._fail_read()
    text = value._text
    if TRIMMED not in text:
        text = f"{text[:-1]}{TRIMMED}{text[-1]}"
    return OpaqueText(text, value._recorder, is_whole=True)


def output_value(value: object) -> object:
    """Return the value that an output statement writes."""
    return value._text if type(value) is OpaqueText else value


def concatenate(values: tuple[object, ...]) -> str | OpaqueText:
    """Return `a ~ b` as one text; opaque if any operand is."""
    recorder = next((value._recorder for value in values if type(value) is OpaqueText), None)
    text = "".join(value._text if type(value) is OpaqueText else str(value) for value in values)
    return text if recorder is None else OpaqueText(text, recorder)
