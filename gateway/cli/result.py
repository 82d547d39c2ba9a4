"""A call of a command and its result: text for people, data for programs, an exit status.

This module prints nothing; `gateway.__main__` does.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

from msgspec import Struct

from gateway.config import Config, Origin
from gateway.config.config_file import ConfigSource

Table = list[dict[str, object]]
"""Rows by column name."""

ShowProgress = Callable[[str, int, int], None]
"""Shows progress: the part of the work, how much is done, how much there is in all."""


class CommandError(Exception):
    """A failed command; the message is one line for people."""


class CommandResult(Struct, frozen=True):
    """`text` for people, `data` for `--json`, `status` for the shell."""

    text: str
    data: object
    status: int = 0
    has_heading: bool = False
    """The first line of the text is a table's heading."""


class CommandCall(Struct, frozen=True):
    """A call of a command: its options, the settings with their sources, and the ways out.

    `say` and `warn`: print a line to standard output and standard error.
    """

    options: argparse.Namespace
    config: Config
    origin: Origin
    source: ConfigSource
    """Where the settings come from."""
    say: Callable[[str], None]
    warn: Callable[[str], None]
    write: Callable[[bytes], object]
    """Writes bytes to standard output."""
    show: ShowProgress
    columns: int
    """The terminal's width."""
    has_colours: bool
    """Standard output is a terminal that shows colours."""


class Entry(Struct, frozen=True):
    """What a command's module says of the command: its arguments and its function."""

    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[CommandCall], CommandResult]


def add_nothing(parser: argparse.ArgumentParser) -> None:
    """Add no arguments."""


def table_result(
    rows: Table,
    status: int = 0,
    *,
    shown: Table | None = None,
    columns: Sequence[str] = (),
    right: Sequence[str] = (),
    none: str = "nothing yet",
) -> CommandResult:
    """Return rows as data and as a text table. `shown`: the rows of the text, if they differ.
    `columns` and `right`: as in `table_text`. `none`: the text without rows."""
    if not rows:
        return CommandResult(none, rows, status)
    text = table_text(rows if shown is None else shown, columns=columns, right=right)
    return CommandResult(text, rows, status, has_heading=True)


def table_text(rows: Table, *, columns: Sequence[str] = (), right: Sequence[str] = ()) -> str:
    """Return rows under a heading, in columns: `columns`, or all. `right`: columns that are aligned
    at their right.

    `rows` is not empty.
    """
    names = list(columns or rows[0])
    cells = [names, *([cell_text(row[name]) for name in names] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(names))]
    aligned = [name in right for name in names]
    return "\n".join(_line(line, widths, aligned) for line in cells)


def _line(cells: Sequence[str], widths: Sequence[int], aligned: Sequence[bool]) -> str:
    padded = (
        cell.rjust(width) if is_right else cell.ljust(width)
        for cell, width, is_right in zip(cells, widths, aligned, strict=True)
    )
    return "  ".join(padded).rstrip()


def cell_text(value: object) -> str:
    """Return a value as a table shows it."""
    match value:
        case None:
            return "-"
        case bool():
            return "yes" if value else "no"
        case list() | tuple():
            return ",".join(map(str, value)) or "-"
        case dict():
            return ",".join(f"{name}={one}" for name, one in value.items()) or "-"
        case _:
            return str(value)
