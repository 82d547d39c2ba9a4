"""Runs a client's cases and prints each as a line of JSON, for `tests.clients` to read.

Programs of this folder run in their client's own environment, so this module needs no package.
Arguments of a program: the gateway's URL, a key and a model's name.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
import traceback
from collections.abc import Callable
from importlib import metadata
from typing import Any

URL, KEY, MODEL = sys.argv[1:4]
LONG = "word " * 9_000
"""A text that is longer than the default model's context of 8,192 tokens."""

_cases: list[tuple[str, Callable[[], Any], str]] = []


def case(name: str, theirs: str = "") -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Declare a function as a case. `theirs`: why it fails, if the reason is not Trunkline's."""

    def declare(function: Callable[[], Any]) -> Callable[[], Any]:
        _cases.append((name, function, theirs))
        return function

    return declare


def raises(kind: type[BaseException], work: Callable[[], Any]) -> BaseException:
    """Return the error of this class that `work` raises; fail if it raises another or none."""
    try:
        work()
    except kind as error:
        return error
    raise AssertionError(f"expected {kind.__name__}, and no error was raised")


def main(*packages: str) -> None:
    """Print the packages' versions, then run each case and print its result."""
    _tell({"versions": {package: metadata.version(package) for package in packages}})
    with asyncio.Runner() as runner:
        for name, function, theirs in _cases:
            reason = ""
            try:
                if inspect.iscoroutinefunction(function):
                    runner.run(function())
                else:
                    function()
            except Exception as error:
                line = traceback.extract_tb(error.__traceback__)[1:2]
                where = f" (line {line[0].lineno})" if line else ""
                reason = f"{type(error).__name__}: {error}"[:600] + where
            _tell({"case": name, "passed": not reason, "reason": reason, "theirs": theirs})


def _tell(found: dict[str, Any]) -> None:
    sys.stdout.write("\n" + json.dumps(found) + "\n")
    sys.stdout.flush()
