"""Chat templates: the model's own Jinja, in a sandbox with bounds on time and size.

A template comes with the model and never from a request, but a model is somebody else's file: it
may not reach anything, run for long, or build anything large. Dates are frozen, so that a prompt's
beginning does not change with the clock.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any

from jinja2 import TemplateError
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gateway.errors import Kind, Refusal

SOURCE_CHARS_MAX = 1_000_000
OUTPUT_CHARS_MAX = 40_000_000
SECONDS_MAX = 5.0
FROZEN_DATE = "26 Jul 2024"
"""What `strftime_now` gives: "today" in a template would change every prompt's beginning."""

Messages = Sequence[Mapping[str, object]]


class TemplateRefused(Exception):
    """The template itself said no (`raise_exception`)."""


class _Sandbox(ImmutableSandboxedEnvironment):
    """Also bounds what an operator may build out of small operands."""

    intercepted_binops = frozenset({"*", "**", "%"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" or (operator == "%" and isinstance(left, str)):
            raise SecurityError(f"the operator {operator} is not for templates")
        if operator == "*" and not (isinstance(left, int) and isinstance(right, int)):
            size = len(left) * right if hasattr(left, "__len__") else len(right) * left
            if size > OUTPUT_CHARS_MAX:
                raise SecurityError("the template builds something too large")
        return super().call_binop(context, operator, left, right)


def _refuse(message: object = "") -> None:
    raise TemplateRefused(str(message)[:500])


def _to_json(value: object, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=min(indent, 8) if indent else None)


class ChatTemplate:
    """A compiled template. Thread-safe."""

    def __init__(self, source: str) -> None:
        """Compile. Raises ValueError for a source that is too long or does not compile."""
        if len(source) > SOURCE_CHARS_MAX:
            raise ValueError(f"the chat template has {len(source)} characters")
        environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, autoescape=False)
        for name in ("center", "format", "xmlattr", "pprint", "urlize", "wordwrap"):
            environment.filters.pop(name, None)
        environment.filters["tojson"] = _to_json
        environment.globals = {
            "range": environment.globals["range"],
            "namespace": environment.globals["namespace"],
            "dict": environment.globals["dict"],
            "raise_exception": _refuse,
            "strftime_now": lambda _format="": FROZEN_DATE,
        }
        try:
            self._template = environment.from_string(source)
        except (TemplateError, RecursionError, SyntaxError, MemoryError) as error:
            raise ValueError(f"the chat template does not compile: {error}") from error

    def render(self, messages: Messages, **variables: object) -> str:
        """The prompt's text. Raises Refusal when the template refuses, or exceeds its bounds."""
        try:
            with _Deadline(SECONDS_MAX):
                pieces, size = [], 0
                for piece in self._template.generate(messages=messages, **variables):
                    size += len(piece)
                    if size > OUTPUT_CHARS_MAX:
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


class _Deadline:
    """Raises TimeoutError in this thread's Python code after some seconds.

    A template that loops without output never gives control back, and a thread cannot be killed:
    so the compiled template is traced, line by line, against the clock. Templates are short; this
    costs less than the rendering.
    """

    def __init__(self, seconds: float) -> None:
        self._ends_s = time.monotonic() + seconds

    def __enter__(self) -> None:
        self._before: Callable[..., Any] | None = sys.gettrace()
        if self._before is None:
            sys.settrace(self._trace)

    def __exit__(self, *_: object) -> None:
        if self._before is None:
            sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, _: object) -> Callable[..., Any] | None:
        if event == "call" and frame.f_code.co_filename != "<template>":
            return None
        if time.monotonic() > self._ends_s:
            raise TimeoutError
        return self._trace
