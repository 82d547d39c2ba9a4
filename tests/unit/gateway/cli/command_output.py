"""What a command of the command line says: to a program, or in the one line of a refusal."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

Run = Callable[..., tuple[int, str, str]]
"""Runs a command: (status, standard output, standard error)."""


def told(run: Run, *arguments: str, status: int = 1) -> str:
    """The one line that a command says when it cannot."""
    got, out, err = run(*arguments)
    assert (got, out) == (status, "")
    assert err.startswith("trunkline: ")
    assert err.count("\n") == 1
    return err


def data_of(run: Run, *arguments: str) -> Any:
    """What a program reads."""
    status, out, err = run(*arguments, "--json")
    assert (status, err) == (0, "")
    return json.loads(out)
