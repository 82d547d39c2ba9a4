"""Upper bounds of what a template's operations make, computed before they run.

`gateway.prompt.sandbox` spends them from a rendering's budget. Sizes are in characters; a list
counts about as its text. What cannot be bounded raises SecurityError.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from string import Formatter
from typing import Any

from jinja2.exceptions import SecurityError

VALUE_MAX = 20_000_000
"""Maximum size of one value, in characters; lists and numbers count about as their text."""
ITEM_SIZE = 100
"""Size counted for each item of a new list: an object takes at least that much."""
REFERENCE_SIZE = 8
"""Size counted for each text beside its characters: a list of empty texts takes memory too."""
NUMBER_CHARS = 400
"""The longest text of a number that has no width: 1e308 in full, or an integer of 1,024 bits."""
WIDTH_MAX = 10_000
"""Maximum width and precision of a formatted value, in characters."""
PRECISION_MAX = 400
"""Maximum number of digits that a number is rounded to."""
_ESCAPED_CHARS = 12
"""Characters that one character may become in a URL, or in JSON that is ASCII."""
_HTML_CHARS = 5
"""Characters that one character may become in HTML."""

_DIRECTIVE = re.compile(r"%[-+ #0]*(\*|\d*)(?:\.(\*|\d*))?")
_AFTER_KEY = re.compile(r"\)[-+ #0]*(\d*)(?:\.(\d*))?")
"""What follows a key such as `%(name)`, which may have parentheses itself."""
_DIGITS = re.compile(r"\d+")


def estimate_size(value: Any) -> int:
    """Return the approximate length of a value as text. O(items), and stops above VALUE_MAX.

    A list that holds another list twice counts it twice, because its text contains it twice.
    """
    total, rest = 0, [value]
    while rest and total <= VALUE_MAX:
        item = rest.pop()
        if isinstance(item, str):
            total += len(item) + REFERENCE_SIZE
            continue
        total += ITEM_SIZE
        if isinstance(item, Mapping):
            rest.extend(item)
            rest.extend(item.values())
        elif isinstance(item, range):
            total += ITEM_SIZE * len(item)
        elif isinstance(item, list | tuple | set | frozenset):
            rest.extend(item)
    return total


def width_of(width: object) -> int:
    """Return the characters that an indentation or a width adds at most."""
    if isinstance(width, str):
        return len(width)
    return max(0, width) if isinstance(width, int) else VALUE_MAX


def method_result(text: str, method: str, args: tuple[Any, ...]) -> int:
    """Return an upper bound of the size of a string method's result."""
    match method:
        case "join":
            items = args[0] if args else ()
            return estimate_size(items) + len(items) * len(text)
        case "replace" if len(args) > 1:
            old, new = str(args[0]), str(args[1])
            return len(text) + text.count(old) * len(new)
        case "split" | "rsplit" if args and isinstance(args[0], str) and args[0]:
            return len(text) + ITEM_SIZE * text.count(args[0])
        case "split" | "rsplit" | "splitlines":
            return len(text) * ITEM_SIZE // 2
        case "center" | "ljust" | "rjust" | "zfill" if args:
            return max(len(text), width_of(args[0]))
        case "expandtabs":
            return len(text) + text.count("\t") * width_of(args[0] if args else 8)
        case _:
            return len(text)


def percent_result(text: str, values: object) -> int:
    """Return an upper bound of the size of `text % values`."""
    directives = _DIRECTIVE.findall(text)
    widths = [*directives, *(_AFTER_KEY.findall(text) if "%(" in text else ())]
    return _formatted(text, len(directives), [run for pair in widths for run in pair], values)


def format_result(text: str, values: object) -> int:
    """Return an upper bound of the size of `text.format(…)` with these arguments."""
    specs = [spec or "" for _, field, spec, _ in Formatter().parse(text) if field is not None]
    # A width that is an argument is a field within a field, which has no digits.
    runs = ["*" if "{" in spec else run for spec in specs for run in _DIGITS.findall(spec) or [""]]
    return _formatted(text, len(specs), runs, values)


def _formatted(text: str, fields: int, widths: list[str], values: object) -> int:
    """Return the bound for a text with these fields. Raises SecurityError for a width that is too
    large, or an argument (`*`)."""
    if "*" in widths:
        raise SecurityError("a width that is an argument is not available in templates")
    found = [run.lstrip("0") for run in widths]
    if any(len(run) > len(str(WIDTH_MAX)) or int(run or 0) > WIDTH_MAX for run in found):
        raise SecurityError(f"a width is too large; expected at most {WIDTH_MAX}")
    width = max((int(run or 0) for run in found), default=0)
    return len(text) + fields * (2 * width + NUMBER_CHARS + estimate_size(values))


def json_result(value: Any, *, ensure_ascii: bool, indent: object, separators: Any) -> int:
    """Return an upper bound of the size of a value's JSON. O(items), and stops above VALUE_MAX."""
    between = 2 if separators is None else sum(map(width_of, separators))
    width = 0 if indent is None else width_of(indent)
    total, rest = 0, [(value, 1)]
    while rest and total <= VALUE_MAX:
        item, depth = rest.pop()
        total += REFERENCE_SIZE + between + width * depth
        if isinstance(item, str):
            total += len(item) * (_ESCAPED_CHARS if ensure_ascii and not item.isascii() else 1)
        elif isinstance(item, Mapping):
            rest.extend((one, depth) for one in item)
            rest.extend((one, depth + 1) for one in item.values())
        elif isinstance(item, list | tuple):
            rest.extend((one, depth + 1) for one in item)
        else:
            total += ITEM_SIZE
    return total


def filter_result(name: str, value: Any, args: tuple[Any, ...], named: Mapping[str, Any]) -> int:
    """Return an upper bound of the size of a filter's result; 0 if it is counted only afterwards,
    since it is no larger than its input. `args` and `named`: all but the value."""
    bound = _FILTER_RESULTS.get(name)
    return 0 if bound is None else bound(value, _Arguments(args, named))


class _Arguments:
    """The arguments of a filter, by place or by name."""

    def __init__(self, args: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        self._args, self._named = args, named
        self.all = args, named

    def get(self, place: int, name: str, default: Any) -> Any:
        """Return an argument that may be given either way."""
        return self._args[place] if place < len(self._args) else self._named.get(name, default)


def _joined(value: Any, given: _Arguments) -> int:
    return estimate_size(value) + len(value) * estimate_size(given.get(0, "d", ""))


def _replaced(value: Any, given: _Arguments) -> int:
    old, new = str(given.get(0, "old", "")), str(given.get(1, "new", ""))
    return method_result(str(value), "replace", (old, new))


def _indented(value: Any, given: _Arguments) -> int:
    lines = str(value).count("\n") + 1
    return estimate_size(value) + lines * width_of(given.get(0, "width", 4))


def _as_json(value: Any, given: _Arguments) -> int:
    return json_result(
        value,
        ensure_ascii=bool(given.get(0, "ensure_ascii", False)),
        indent=given.get(1, "indent", None),
        separators=given.get(2, "separators", None),
    )


def _batched(value: Any, given: _Arguments) -> int:
    is_filled = given.get(1, "fill_with", None) is not None
    return ITEM_SIZE * width_of(given.get(0, "linecount", 0)) if is_filled else 0


def _sliced(value: Any, given: _Arguments) -> int:
    return ITEM_SIZE * width_of(given.get(0, "slices", 0))


def _rounded(value: Any, given: _Arguments) -> int:
    precision = given.get(0, "precision", 0)
    if not isinstance(precision, int) or abs(precision) > PRECISION_MAX:
        raise SecurityError(f"round: {precision!r} digits; expected at most {PRECISION_MAX}")
    return NUMBER_CHARS


def _summed(value: Any, given: _Arguments) -> int:
    if not isinstance(given.get(1, "start", 0), int | float):
        raise SecurityError("the filter `sum` adds only numbers in templates")
    return NUMBER_CHARS


_FILTER_RESULTS: dict[str, Callable[[Any, _Arguments], int]] = {
    "batch": _batched,
    "center": lambda value, given: max(estimate_size(value), width_of(given.get(0, "width", 80))),
    "e": lambda value, given: _HTML_CHARS * estimate_size(value),
    "escape": lambda value, given: _HTML_CHARS * estimate_size(value),
    "forceescape": lambda value, given: _HTML_CHARS * estimate_size(value),
    "format": lambda value, given: percent_result(str(value), given.all),
    "indent": _indented,
    "join": _joined,
    "replace": _replaced,
    "round": _rounded,
    "slice": _sliced,
    "string": lambda value, given: estimate_size(value),
    "sum": _summed,
    "tojson": _as_json,
    "urlencode": lambda value, given: _ESCAPED_CHARS * estimate_size(value),
    "wordcount": lambda value, given: method_result(str(value), "split", ()),
}
