"""Output of a command: data for a program, or the line of an error."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

Run = Callable[..., tuple[int, str, str]]
"""Runs a command: (status, standard output, standard error)."""


def error_line(run: Run, *arguments: str, status: int = 1) -> str:
    """Return the one line of a failed command."""
    got, out, err = run(*arguments)
    assert (got, out) == (status, "")
    assert err.startswith("trunkline: ")
    assert err.count("\n") == 1
    return err


def data_of(run: Run, *arguments: str) -> Any:
    """Return a command's JSON."""
    status, out, err = run(*arguments, "--json")
    assert (status, err) == (0, "")
    return json.loads(out)
