"""Chat templates: the model's own Jinja, in a sandbox with limits on time and size.

A template comes with the model, never from a request. The model is still third-party data, so a
template may not access the program, run for long, or build large values (`gateway.prompt.sandbox`).
Dates are frozen, so that the beginning of a prompt does not change with the clock.
`gateway.prompt.renderer` calls it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from jinja2 import TemplateError, meta
from jinja2.exceptions import SecurityError

from gateway.errors import Kind, Refusal
from gateway.prompt.sandbox import VALUE_MAX, BoundedSandbox

SOURCE_CHARS_MAX = 250_000
"""Maximum length of a template's source, in characters."""
SECONDS_MAX = 2.0
"""Maximum time of one rendering, in seconds."""
FROZEN_DATE = "26 Jul 2024"
"""The date that `strftime_now` returns: a real date would change the beginning of every prompt."""

Messages = Sequence[Mapping[str, object]]


class TemplateRefusedError(Exception):
    """The template called `raise_exception`."""


def _frozen_date(_format: object = "") -> str:
    return FROZEN_DATE


def _refuse(message: object = "") -> None:
    raise TemplateRefusedError(str(message)[:500])


class ChatTemplate:
    """A compiled chat template. Thread-safe. `variables`: the names that the template reads."""

    def __init__(self, source: str, clock: Callable[[], float] = time.monotonic) -> None:
        """Compile `source`. Raises ValueError if it is too long or does not compile."""
        if len(source) > SOURCE_CHARS_MAX:
            raise ValueError(
                f"the chat template is too long: {len(source)} characters;"
                f" expected at most {SOURCE_CHARS_MAX}"
            )
        self._sandbox = BoundedSandbox(clock)
        self._sandbox.globals["raise_exception"] = _refuse
        self._sandbox.globals["strftime_now"] = _frozen_date
        try:
            self._template = self._sandbox.from_string(source)
            self.has_captures = self._sandbox.has_captures
            """Whether the template captures its own output (macro, call, filter or set block)."""
            self.variables = frozenset(meta.find_undeclared_variables(self._sandbox.parse(source)))
        except (TemplateError, RecursionError, SyntaxError, MemoryError) as error:
            raise ValueError(f"the chat template does not compile: {error}") from error

    def render(self, messages: Messages, **variables: object) -> str:
        """Return the prompt's text. Raises Refusal if the template refuses or exceeds a limit."""
        try:
            self._sandbox.begin(SECONDS_MAX)
            pieces, size = [], 0
            for piece in self._template.generate(messages=messages, **variables):
                size += len(piece)
                if size > VALUE_MAX:
                    raise SecurityError("the template's output is too long")
                pieces.append(piece)
            return "".join(pieces)
        except TemplateRefusedError as error:
            message = f"The model's chat template refuses these messages: {error}"
            raise Refusal(Kind.BAD, "invalid_messages", message, param="messages") from None
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:
            raise _render_failure(type(error).__name__) from error
        except (AttributeError, RecursionError, MemoryError, TimeoutError) as error:
            raise _render_failure(type(error).__name__) from error


def _render_failure(why: str) -> Refusal:
    message = f"The model's chat template cannot render these messages: {why}."
    return Refusal(Kind.BAD, "invalid_messages", message, param="messages")
