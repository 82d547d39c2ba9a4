"""One test for all rows of a table, where a test for each would set up the same thing again.

`pytest.mark.parametrize` stays where a row has fixtures or a mark of its own, or leaves something
behind.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

Test = Callable[..., Any]


def each_row(
    names: str | Sequence[str], rows: Iterable[Any], ids: Callable[[Any], str] = repr
) -> Callable[[Test], Test]:
    """Decorate a test that is to be run with each row in turn, on the fixtures of one test.

    `names`, `rows`: as `parametrize` takes them. All rows are tried. An error has a note with its
    row, as `ids` writes it; those of several rows are raised as a group.
    """
    columns = names.replace(",", " ").split() if isinstance(names, str) else list(names)
    is_single = isinstance(names, str) and len(columns) == 1
    table = [dict(zip(columns, (row,) if is_single else row, strict=True)) for row in rows]
    assert table, "no row: the test would try nothing"

    def decorate(test: Test) -> Test:
        signature = inspect.signature(test)
        kept = [one for name, one in signature.parameters.items() if name not in columns]

        async def try_async(**fixtures: Any) -> None:
            failed: list[Exception] = []
            for row in table:
                try:
                    await test(**fixtures, **row)
                except Exception as error:
                    failed.append(_told(error, row, ids))
            _raise(failed, len(table))

        def try_all(**fixtures: Any) -> None:
            failed: list[Exception] = []
            for row in table:
                try:
                    test(**fixtures, **row)
                except Exception as error:
                    failed.append(_told(error, row, ids))
            _raise(failed, len(table))

        found: Test = try_async if inspect.iscoroutinefunction(test) else try_all
        functools.update_wrapper(found, test)
        vars(found)["__signature__"] = signature.replace(parameters=kept)  # pytest's fixtures
        return found

    return decorate


def _told(error: Exception, row: dict[str, Any], ids: Callable[[Any], str]) -> Exception:
    """Return the error with its row in a note."""
    values = (f"{name} = {ids(value)[:500]}" for name, value in row.items())
    error.add_note(f"in the row {', '.join(values)}")
    return error


def _raise(failed: Collection[Exception], rows: int) -> None:
    """Raise what failed, if anything did."""
    if len(failed) == 1:
        raise next(iter(failed))
    if failed:
        raise ExceptionGroup(f"{len(failed)} of {rows} rows", list(failed))
