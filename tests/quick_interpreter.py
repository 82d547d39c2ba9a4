"""Triton's interpreter without two kinds of work that change no result."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from types import FunctionType
from typing import Any

import triton.language as tl
from triton.language import core
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpretedFunction

LANGUAGES = (tl, core)
"""Modules whose functions the interpreter replaces for as long as a kernel runs."""


@cache
def _languages_of(function: FunctionType) -> tuple[Any, ...]:
    """Modules of `LANGUAGES` that a function names."""
    named = function.__globals__.values()
    return tuple(one for one in LANGUAGES if any(value is one for value in named))


def quicken() -> None:
    """Change the interpreter, in this process, until it ends.

    A check for overflow computes each sum and product of integers twice, and its outcome is looked
    at by debug builds only. A function that a kernel calls replaces the language's functions anew,
    though the kernel has done so; it needs to where they are not replaced yet.
    """
    builder = interpreter.interpreter_builder
    if not builder.options.sanitize_overflow:
        return
    assert not builder.options.debug, "overflows would be told"
    builder.options = replace(builder.options, sanitize_overflow=False)
    call = InterpretedFunction.__call__

    def call_quickly(self: Any, *given: Any, **named: Any) -> Any:
        if any(core.is_builtin(language.load) for language in _languages_of(self.fn)):
            return call(self, *given, **named)
        return self.rewrite()(*given, **named)

    InterpretedFunction.__call__ = call_quickly
