"""Results of commands: text for people, data for programs, an exit status.

This module prints nothing; `gateway.__main__` does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec import Struct

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


def table_result(rows: Table, status: int = 0, *, shown: Sequence[str] = ()) -> CommandResult:
    """Return rows as data and as a text table. `shown`: the columns of the text, default all."""
    table = [{name: row[name] for name in shown} for row in rows] if shown else rows
    return CommandResult(_columns(table) if rows else "nothing yet", rows, status)


def _columns(rows: Table) -> str:
    names = list(rows[0])
    cells = [names, *([_cell(row[name]) for name in names] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(names))]
    return "\n".join(_line(line, widths) for line in cells)


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
    return "  ".join(padded).rstrip()


def _cell(value: object) -> str:
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
