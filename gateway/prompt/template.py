"""Chat templates: the model's own Jinja, in a sandbox with limits on time and size.

A template comes with the model, never from a request. The model is still third-party data, so a
template may not access the program, run for long, or build large values (`gateway.prompt.sandbox`).
It knows the day and no time of day, so that the beginning of a prompt changes once a day at most.
`gateway.prompt.renderer` calls it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from datetime import date

from jinja2 import TemplateError, meta
from jinja2.exceptions import SecurityError
from msgspec import Struct

from gateway.errors import Kind, Refusal
from gateway.prompt.result_sizes import VALUE_MAX
from gateway.prompt.sandbox import BoundedSandbox
from gateway.template_date import Calendar

SOURCE_CHARS_MAX = 250_000
"""Maximum length of a template's source, in characters."""
SECONDS_MAX = 2.0
"""Maximum time of one rendering, in seconds."""
DATE_FORMAT_CHARS_MAX = 1_000
"""Maximum length of a format for the date, in characters: the C library pads as it asks."""

Messages = Sequence[Mapping[str, object]]


class TemplateRefusedError(Exception):
    """The template called `raise_exception`."""


class StrftimeNow(Struct, frozen=True):
    """`strftime_now` of one day, at midnight: templates of a day write the same text."""

    day: date

    def __call__(self, format: str) -> str:
        """Return the day in a form of `strftime`, whose time of day is 00:00:00."""
        if len(format) > DATE_FORMAT_CHARS_MAX:
            raise SecurityError("the format of the date is too long")
        return self.day.strftime(format)


def _refuse(message: object = "") -> None:
    raise TemplateRefusedError(str(message)[:500])


class ChatTemplate:
    """A compiled chat template. Thread-safe. `variables`: the names that the template reads."""

    def __init__(
        self,
        source: str,
        clock: Callable[[], float] = time.monotonic,
        calendar: Calendar | None = None,
    ) -> None:
        """Compile `source`. `calendar`: None for today by the machine's clock. Raises ValueError if
        it is too long, does not compile, or needs another template."""
        if len(source) > SOURCE_CHARS_MAX:
            raise ValueError(
                f"the chat template is too long: {len(source)} characters;"
                f" expected at most {SOURCE_CHARS_MAX}"
            )
        self._calendar = calendar or Calendar()
        self._sandbox = BoundedSandbox(clock)
        self._sandbox.globals["raise_exception"] = _refuse
        try:
            self._template = self._sandbox.from_string(source)
            self.has_captures = self._sandbox.has_captures
            """Whether the template captures its own output (macro, call, filter or set block)."""
            tree = self._sandbox.parse(source)
            self.variables = frozenset(meta.find_undeclared_variables(tree))
        except (TemplateError, RecursionError, SyntaxError, MemoryError) as error:
            raise ValueError(f"the chat template does not compile: {error}") from error
        for name in meta.find_referenced_templates(tree):
            told = "computed as it runs" if name is None else repr(name[:100])
            raise ValueError(
                f"the chat template needs another template, {told}; expected one that is complete,"
                " without include, import and extends"
            )

    def date_variables(self) -> tuple[tuple[str, object], ...]:
        """Return the variables that tell the template today's date: none if it asks for no date.
        All renderings of one prompt take the same."""
        if "strftime_now" not in self.variables:
            return ()
        return (("strftime_now", StrftimeNow(self._calendar.today())),)

    def render(self, messages: Messages, **variables: object) -> str:
        """Return the prompt's text, of today if `variables` has no date. Raises Refusal if the
        template refuses or exceeds a limit."""
        given = {"messages": messages, **dict(self.date_variables()), **variables}
        try:
            self._sandbox.begin(SECONDS_MAX)
            pieces, size = [], 0
            for piece in self._template.generate(given):
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
