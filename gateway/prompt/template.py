"""Chat templates: the model's own Jinja, in a sandbox with bounds on time and size.

A template comes with the model and never from a request, but a model is somebody else's file: it
may not reach anything, run for long, or (`sandbox`) build anything large. Dates are frozen, so that
a prompt's beginning does not change with the clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from jinja2 import TemplateError, meta
from jinja2.exceptions import SecurityError

from gateway.errors import Kind, Refusal
from gateway.prompt.sandbox import VALUE_MAX, BoundedSandbox

SOURCE_CHARS_MAX = 250_000
SECONDS_MAX = 2.0
FROZEN_DATE = "26 Jul 2024"
"""What `strftime_now` gives: "today" in a template would change every prompt's beginning."""

Messages = Sequence[Mapping[str, object]]


class TemplateRefused(Exception):
    """The template itself said no (`raise_exception`)."""


def _frozen_date(_format: object = "") -> str:
    return FROZEN_DATE


def _refuse(message: object = "") -> None:
    raise TemplateRefused(str(message)[:500])


class ChatTemplate:
    """A compiled template. Thread-safe. `variables`: the names that it asks for."""

    def __init__(self, source: str, clock: Callable[[], float] = time.monotonic) -> None:
        """Compile. Raises ValueError for a source that is too long or does not compile."""
        if len(source) > SOURCE_CHARS_MAX:
            raise ValueError(f"the chat template has {len(source)} characters")
        self._sandbox = BoundedSandbox(clock)
        self._sandbox.globals["raise_exception"] = _refuse
        self._sandbox.globals["strftime_now"] = _frozen_date
        try:
            self._template = self._sandbox.from_string(source)
            self.variables = frozenset(meta.find_undeclared_variables(self._sandbox.parse(source)))
        except (TemplateError, RecursionError, SyntaxError, MemoryError) as error:
            raise ValueError(f"the chat template does not compile: {error}") from error

    @property
    def has_captures(self) -> bool:
        """Does it take what it has written as text again, where nobody sees what becomes of it?"""
        return self._sandbox.has_captures

    def render(self, messages: Messages, **variables: object) -> str:
        """The prompt's text. Raises Refusal when the template refuses, or exceeds its bounds."""
        try:
            self._sandbox.begin(SECONDS_MAX)
            pieces, size = [], 0
            for piece in self._template.generate(messages=messages, **variables):
                size += len(piece)
                if size > VALUE_MAX:
                    raise SecurityError("the output is too long")
                pieces.append(piece)
            return "".join(pieces)
        except TemplateRefused as error:
            message = f"The model's chat template refuses these messages: {error}"
            raise Refusal(Kind.BAD, "invalid_messages", message, param="messages") from None
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:
            raise _failed(type(error).__name__) from error
        except (AttributeError, RecursionError, MemoryError, TimeoutError) as error:
            raise _failed(type(error).__name__) from error


def _failed(why: str) -> Refusal:
    message = f"The model's chat template cannot render these messages ({why})."
    return Refusal(Kind.BAD, "invalid_messages", message, param="messages")
