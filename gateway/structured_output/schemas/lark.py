"""A JSON Schema with numbers that a double does not hold, as a grammar in Lark.

Only the way from the root to such a number is written as rules; every subschema beside it stays
JSON Schema. Objects are written as the grammar engine writes them: members in the order of their
declaration, then those that are only required, then undeclared ones. The grammar engine reads each
number of a schema as a double: integers beyond 2**53 and decimals of many digits become their
digits, or patterns of them. The module compiles nothing and knows no request;
`gateway.structured_output.grammars` calls it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any, Final, TypeGuard

from gateway.structured_output.output_check import (
    MISSING,
    References,
    SchemaCheck,
    pointer_steps,
)

INTEGER_MAX: Final = 2**53 - 1
"""Up to here, either way, a double holds every integer."""

DIGITS_MAX: Final = 15
"""A double holds every decimal of so many digits."""

RANGE_DIGITS_MAX: Final = 40
"""A bound with more digits before its point is approximated from inside, by its number of digits:
the pattern of an exact one grows with their square."""

EXPONENT_MAX: Final = 400
"""Bounds beyond ten to this power are no bounds: no number in an answer is so long."""

BOUNDS: Final = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")

_INTEGER: Final = r"-?(0|[1-9][0-9]*)"
_NUMBER: Final = r"-?(0|[1-9][0-9]*)(\.[0-9]+)?"
_NOTHING: Final = r"[^\s\S]"

TEXT_CHARS_MAX: Final = 100_000
"""Most characters of such a grammar: below the engine's bound for its source."""

OPTIONAL_MAX: Final = 64
"""Most members of one object that may be left out: each is a place where a text may be."""

_KINDS: Final = ("object", "array", "string", "integer", "number", "boolean", "null")
_WS: Final = "WS?"
DEFINITIONS: Final = ("$defs", "definitions", "defs")
_DATA: Final = ("const", "enum", "default", "examples", "required")
"""Keywords with values that are no schemas."""
_REPLACED: Final = (*DEFINITIONS, "$id", "$anchor")
"""Keywords that a schema inside a grammar has no use for: its references are named anew."""
_ANNOTATIONS: Final = frozenset(
    {"title", "description", "default", "examples", "deprecated", "$comment", "$schema", "$id"}
    | {"readOnly", "writeOnly", "$anchor", "type", *DEFINITIONS}
)
_OF_OBJECTS: Final = ("minProperties", "maxProperties", "patternProperties")
_NAMED: Final = ("properties", "patternProperties")
_INNER: Final = (
    *_NAMED,
    *("additionalProperties", "additionalItems", "items", "prefixItems", "anyOf", "oneOf", "allOf"),
)


class InexactNumber(Exception):
    """A number that cannot be held to its digits. `steps`: the way to its keyword."""

    def __init__(self, steps: Sequence[str], why: str) -> None:
        super().__init__(why)
        self.steps, self.why = tuple(steps), why


def lark_of_schema(schema: Mapping[str, Any], options: Mapping[str, Any]) -> str | None:
    """Return the schema as Lark; None if the grammar engine keeps its digits. O(schema).

    `options`: those of each JSON Schema inside. Raises InexactNumber.
    """
    translation = _Translation(schema, options)
    if not translation.is_inexact(schema):
        return None
    try:
        return translation.text()
    except RecursionError as error:
        raise InexactNumber((), "its definitions refer to each other too deeply") from error


class _Translation:
    """Builds the rules of one schema."""

    def __init__(self, root: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        self._root, self._options = root, dict(options)
        self._references = References(root)
        self._is_lenient = bool(options["lenient"])
        self._rules: list[str] = []
        self._names: dict[str, str] = {}
        self._chars = 0
        self._by_reference: dict[str, str] = {}
        self._known: set[int] = set()
        self._inexact: set[int] = set()
        self._find_inexact()

    def text(self) -> str:
        """Return the whole grammar."""
        start = self.expression(self._root, ())
        space = rf"WS: /{self._options['whitespace_pattern']}/"
        return "\n".join((f"start: {start}", *self._rules, space, ""))

    # -- which schemas ------------------------------------------------------------------------

    def is_inexact(self, schema: Any) -> bool:
        """Return whether a number that counts in a schema, or behind its references, is not exact.
        O(1) for a schema of the root."""
        if not isinstance(schema, dict):
            return False
        if id(schema) in self._known:
            return id(schema) in self._inexact
        return _is_inexact_itself(schema) or any(map(self.is_inexact, self._inner(schema)))

    def _find_inexact(self) -> None:
        """Fill `_inexact`, from the numbers up to all schemas that contain or name them."""
        above: dict[int, list[int]] = {}
        waiting = [self._root]
        found: list[int] = []
        while waiting:
            schema = waiting.pop()
            if id(schema) in self._known:
                continue
            self._known.add(id(schema))
            if _is_inexact_itself(schema):
                found.append(id(schema))
            for inner in self._inner(schema):
                above.setdefault(id(inner), []).append(id(schema))
                waiting.append(inner)
        while found:
            one = found.pop()
            if one not in self._inexact:
                self._inexact.add(one)
                found += above.get(one, ())

    def _inner(self, schema: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the schemas inside a schema, and the one that it names."""
        inner: list[Any] = [self._target(schema.get("$ref"))]
        for name in _INNER:
            value = schema.get(name)
            if name in _NAMED and isinstance(value, dict):
                inner += value.values()
            else:
                inner += value if isinstance(value, list) else [value]
        return [one for one in inner if isinstance(one, dict)]

    def _target(self, reference: Any) -> Any:
        """Return what a reference names; None for another target."""
        found = self._references.target(reference) if isinstance(reference, str) else MISSING
        return None if found is MISSING else found

    # -- schemas ------------------------------------------------------------------------------

    def expression(self, schema: Any, steps: tuple[str, ...]) -> str:
        """Return a schema as the right side of a rule. Raises InexactNumber."""
        if not self.is_inexact(schema):
            return self._native(schema, steps)
        rest = {name: value for name, value in schema.items() if name not in _ANNOTATIONS}
        if "const" in schema or "enum" in schema:
            return self._literals(schema, steps)
        if "$ref" in rest:
            return self._reference(schema["$ref"], rest, steps)
        for name in ("anyOf", "oneOf", "allOf"):
            if name in rest:
                return self._alternatives(name, schema, rest, steps)
        kinds = schema.get("type", _KINDS)
        kinds = [kinds] if isinstance(kinds, str) else list(kinds)
        if "number" in kinds and "integer" in kinds:
            kinds.remove("integer")
        forms = [self._of_kind(kind, schema, steps) for kind in kinds]
        return forms[0] if len(forms) == 1 else f"({' | '.join(f'({one})' for one in forms)})"

    def _of_kind(self, kind: str, schema: dict[str, Any], steps: tuple[str, ...]) -> str:
        bounds = [name for name in BOUNDS if name in schema]
        if kind in ("integer", "number"):
            if all(is_exact(schema[name]) for name in bounds):
                return self._native({**schema, "type": kind}, steps)
            if schema.get("multipleOf", 1) != 1 or (kind == "number" and "multipleOf" in schema):
                raise InexactNumber((*steps, "multipleOf"), "it stands beside such a bound")
            return self._rule(number_terminal(kind, schema), is_terminal=True)
        if kind == "object":
            return self._object(schema, steps)
        if kind == "array":
            return self._array(schema, steps)
        rest = {name: value for name, value in schema.items() if name not in bounds}
        return self._native({**rest, "type": kind}, steps)

    def _native(self, schema: Any, steps: tuple[str, ...]) -> str:
        """Return a schema that stays JSON Schema, with the definitions that it names."""
        if schema is False:
            raise InexactNumber(steps, "a schema that nothing satisfies stands beside it")
        names: dict[str, str] = {}
        found = _named_anew(schema, names) if isinstance(schema, dict) else {}
        definitions: dict[str, Any] = {}
        while len(definitions) < len(names):
            reference = list(names)[len(definitions)]
            if (target := self._target(reference)) is None:
                raise InexactNumber((*steps, "$ref"), "it refers to no part of this schema")
            definitions[names[reference]] = _named_anew(target, names)
        if definitions:
            found["$defs"] = definitions
        text = json.dumps({**found, "x-guidance": self._options}, default=float)
        return self._rule(f"%json {text}")

    def _reference(self, reference: str, rest: dict[str, Any], steps: tuple[str, ...]) -> str:
        if rest.keys() != {"$ref"} and not self._is_lenient:
            raise InexactNumber((*steps, "$ref"), "other keywords stand beside it")
        if reference not in self._by_reference:
            name = self._by_reference[reference] = f"ref_{len(self._by_reference)}"
            target = self.expression(self._target(reference), pointer_steps(reference))
            self._rules.append(f"{name}: {target}")
        return self._by_reference[reference]

    def _alternatives(
        self, name: str, schema: dict[str, Any], rest: dict[str, Any], steps: tuple[str, ...]
    ) -> str:
        """Return a combination of schemas; keywords beside it hold in each of them."""
        branches = schema[name]
        if name == "allOf" and len(branches) != 1:
            raise InexactNumber((*steps, name), "it combines several schemas")
        if name == "oneOf" and not self._is_lenient:
            raise InexactNumber((*steps, name), "it is not supported; write anyOf")
        beside = {key: value for key, value in schema.items() if key in rest or key == "type"}
        del beside[name]
        forms = []
        for number, branch in enumerate(branches):
            here = (*steps, name, str(number))
            if branch is False:
                continue
            branch = branch if isinstance(branch, dict) else {}
            if (beside.keys() & branch.keys()) - {"type"} or ("$ref" in branch and beside):
                raise InexactNumber(here, "keywords beside it and inside it would both hold")
            forms.append(self.expression({**beside, **branch} if beside else branch, here))
        return f"({' | '.join(f'({one})' for one in forms)})"

    # -- values -------------------------------------------------------------------------------

    def _literals(self, schema: dict[str, Any], steps: tuple[str, ...]) -> str:
        """Return the listed values that satisfy the schema's other keywords, to the last digit."""
        keyword = "const" if "const" in schema else "enum"
        values = [schema["const"]] if keyword == "const" else schema["enum"]
        check = SchemaCheck(self._root)
        rest = {name: value for name, value in schema.items() if name != keyword}
        try:
            held = [value for value in values if check.holds(value, rest)]
        except Exception as error:  # the client writes the keywords, and some in no known form
            raise InexactNumber((*steps, keyword), "it is too large to check") from error
        if not held:
            raise InexactNumber((*steps, keyword), "no value satisfies the keywords beside it")
        texts = " | ".join(_quoted(_json(value)) for value in held)
        return self._rule(texts, is_terminal=True)

    def _object(self, schema: dict[str, Any], steps: tuple[str, ...]) -> str:
        for name in _OF_OBJECTS:
            if name in schema and not self._is_lenient:
                raise InexactNumber((*steps, name), "it stands beside such a number")
        declared = schema.get("properties", {})
        required = list(dict.fromkeys(schema.get("required", ())))
        others = schema.get("additionalProperties", True)
        named = {**declared, **{name: others for name in required if name not in declared}}
        optional = len(named) - len(required)
        if optional > OPTIONAL_MAX:
            raise InexactNumber(steps, f"{optional} members may be left out beside it")
        members = []
        for name, inner in named.items():
            if inner is False and name not in required:
                continue
            value = self.expression(inner, (*steps, "properties", name))
            key = _quoted(json.dumps(name, ensure_ascii=False))
            member = self._rule(f'{key} {_WS} ":" {_WS} {value}')
            members.append((member, name in required))
        first = rest = ""
        if others is not False:
            extra = self._extra(list(named), others, steps)
            rest = f'("," {_WS} {extra})*'
            first = f"({extra} {rest})?"
        for member, is_required in reversed(members):
            after = f'"," {_WS} {member} {rest}'
            alone = f"{member} {rest}"
            if is_required:
                first, rest = alone, self._rule(after)
            else:
                first = f"({alone} | {first})" if first else f"({alone})?"
                rest = self._rule(f'("," {_WS} {member})? {rest}')
            first = self._rule(first)
        return f'"{{" {_WS} {first} {_WS} "}}"'

    def _extra(self, names: Sequence[str], others: Any, steps: tuple[str, ...]) -> str:
        """Return an undeclared member."""
        key = r'/"[^"\\\x00-\x1F\x7F]*"/'
        for name in names:
            key += f" & ~{_quoted(json.dumps(name, ensure_ascii=False))}"
        value = self.expression(others, (*steps, "additionalProperties"))
        name = self._rule(key, is_terminal=True)
        return self._rule(f'{name} {_WS} ":" {_WS} {value}')

    def _array(self, schema: dict[str, Any], steps: tuple[str, ...]) -> str:
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        items, heads = schema.get("items", True), schema.get("prefixItems", [])
        if isinstance(items, list):
            raise InexactNumber((*steps, "items"), "write prefixItems")
        if most is not None and most < max(least, len(heads)):
            raise InexactNumber((*steps, "maxItems"), "fewer items than listed are allowed")
        tail = ""
        if items is not False:
            item = self._rule(self.expression(items, (*steps, "items")))
            low = max(0, least - len(heads))
            high = None if most is None else most - len(heads)
            more = f'"," {_WS} {item}'
            if heads:
                tail = _times(more, low, high)
            elif high != 0:
                some = f"{item} {_times(more, max(0, low - 1), None if high is None else high - 1)}"
                tail = some if low else f"({some})?"
        for number, head in reversed(list(enumerate(heads))):
            value = self.expression(head, (*steps, "prefixItems", str(number)))
            comma = f'"," {_WS} ' if number else ""
            tail = f"{comma}{value} {tail}" if number < least else f"({comma}{value} {tail})?"
        return f'"[" {_WS} {tail} {_WS} "]"'

    def _rule(self, text: str, *, is_terminal: bool = False) -> str:
        """Add a rule, unless it is there, and return its name."""
        if (known := self._names.get(text)) is not None:
            return known
        self._chars += len(text)
        if self._chars > TEXT_CHARS_MAX:
            raise InexactNumber((), "the grammar would be too long")
        name = f"{'T' if is_terminal else 'r'}_{len(self._rules)}"
        self._names[text] = name
        self._rules.append(f"{name}: {text or _WS}")
        return name


def _times(text: str, low: int, high: int | None) -> str:
    """Return a text that is repeated; `high`: None without a bound."""
    return "" if high == 0 else f"({text}){{{low},{'' if high is None else high}}}"


def _named_anew(schema: Any, names: dict[str, str]) -> Any:
    """Return a schema without its definitions, whose references name entries of `$defs`. `names`:
    the entries by reference, to which new ones are added. O(schema)."""
    if isinstance(schema, list):
        return [_named_anew(one, names) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found: dict[str, Any] = {}
    for name, value in schema.items():
        if name in _NAMED and isinstance(value, dict):
            found[name] = {key: _named_anew(one, names) for key, one in value.items()}
        elif name == "$ref" and isinstance(value, str):
            found[name] = "#/$defs/" + names.setdefault(value, f"part_{len(names)}")
        elif name in _DATA:
            found[name] = value
        elif name not in _REPLACED:
            found[name] = _named_anew(value, names)
    return found


def _is_inexact_itself(schema: Mapping[str, Any]) -> bool:
    names = ("const", "enum", *BOUNDS)
    return any(not is_exact(schema[name]) for name in names if name in schema)


def _json(value: Any) -> str:
    """Return a value as JSON text with all its digits."""
    if isinstance(value, Decimal):
        return str(value)
    if isinstance(value, dict):
        members = (f"{json.dumps(k, ensure_ascii=False)}: {_json(v)}" for k, v in value.items())
        return f"{{{', '.join(members)}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_json, value))}]"
    return str(value) if is_number(value) else json.dumps(value, ensure_ascii=False)


def _quoted(text: str) -> str:
    """Return a text as Lark writes it."""
    return json.dumps(text, ensure_ascii=False)


# -- numbers ---------------------------------------------------------------------------------


def is_number(value: object) -> TypeGuard[int | float | Decimal]:
    """Return whether a JSON value is a number."""
    return isinstance(value, int | float | Decimal) and not isinstance(value, bool)


def is_exact(value: Any) -> bool:
    """Return whether the grammar engine keeps the digits of every number in a JSON value."""
    if isinstance(value, dict):
        return all(map(is_exact, value.values()))
    if isinstance(value, list):
        return all(map(is_exact, value))
    if isinstance(value, int):
        return abs(value) <= INTEGER_MAX
    if isinstance(value, float):
        digits = repr(value)
        return "e" not in digits and len(digits.strip("-0").replace(".", "")) <= DIGITS_MAX
    return not isinstance(value, Decimal)


def number_terminal(kind: str, schema: Mapping[str, Any]) -> str:
    """Return the numbers within a schema's bounds as the right side of a Lark terminal. `kind`:
    integer or number. O(digits ** 2)."""
    patterns = [_INTEGER if kind == "integer" else _NUMBER]
    for name in BOUNDS:
        if is_number(bound := schema.get(name)):
            exact = Decimal(repr(bound)) if isinstance(bound, float) else Decimal(bound)
            if (pattern := _side(exact, name)) is not None:
                patterns.append(pattern)
    return " & ".join(f"/{pattern}/" for pattern in patterns)


def _side(bound: Decimal, name: str) -> str | None:
    """Return the pattern of the numbers on the allowed side of a bound; None if all are."""
    is_open, is_least = name.startswith("exclusive"), name.lower().endswith("minimum")
    if bound.adjusted() > EXPONENT_MAX:
        return None if (bound < 0) == is_least else _NOTHING
    is_positive = bound > 0 or (bound == 0 and is_least)
    if is_least == is_positive:  # the side away from zero: the sign of the bound, and beyond it
        beyond = _at_least(bound.copy_abs(), is_open=is_open)
        zero = "" if bound or is_open else r"|0(\.0+)?"
        return beyond if is_least else f"-({beyond}){zero}"
    within = _at_most(bound.copy_abs(), is_open=is_open)  # the other sign, and up to the bound
    whole = r"[0-9]+(\.[0-9]+)?"
    return f"{whole}|-({within})" if is_least else f"-{whole}|{within}"


def _digits(bound: Decimal) -> tuple[str, str]:
    """Return the digits before and after the point, without zeros at the end."""
    whole, _, fraction = format(bound, "f").partition(".")
    return whole, fraction.rstrip("0")


def _at_least(bound: Decimal, *, is_open: bool) -> str:
    """Return the pattern of numbers without sign from a bound on, or above it."""
    whole, fraction = _digits(bound)
    more = r"(\.[0-9]+)?"
    forms = [rf"[1-9][0-9]{{{len(whole)},}}{more}"]
    if len(whole) <= RANGE_DIGITS_MAX:
        forms += [f"{form}{_any(rest)}{more}" for form, rest in _greater(whole)]
    beyond = [f"{form}[0-9]*" for form, _ in _greater(fraction)]
    beyond.append(f"{fraction}{'0*[1-9][0-9]*' if is_open else '[0-9]*'}")
    if fraction or is_open:
        forms.append(rf"{whole}\.({'|'.join(beyond)})")
    else:
        forms.append(f"{whole}{more}")
    return "|".join(forms)


def _at_most(bound: Decimal, *, is_open: bool) -> str:
    """Return the pattern of numbers without sign up to a bound, or below it; one that nothing
    matches if none is."""
    whole, fraction = _digits(bound)
    more = r"(\.[0-9]+)?"
    forms = ["0" + more] if len(whole) > 1 else []
    if len(whole) > 2:
        forms.append(rf"[1-9][0-9]{{0,{len(whole) - 2}}}{more}")
    elif len(whole) == 2:
        forms.append(f"[1-9]{more}")
    if len(whole) <= RANGE_DIGITS_MAX:
        least = 1 if len(whole) > 1 else 0  # a longer number does not begin with 0
        forms += [f"{form}{_any(rest)}{more}" for form, rest in _less(whole, least)]
    within = [f"{form}[0-9]*" for form, _ in _less(fraction)]
    within += [fraction[:end] for end in range(1, len(fraction))]
    if fraction:
        forms.append(whole)
    if not is_open:
        within.append(f"{fraction}0*" if fraction else "0+")
        forms += [] if fraction else [whole]
    if within:
        forms.append(rf"{whole}\.({'|'.join(within)})")
    return "|".join(forms) or _NOTHING


def _greater(digits: str) -> list[tuple[str, int]]:
    """Return the patterns of beginnings that are above digits, each with how many digits are
    left."""
    return [
        (f"{digits[:at]}[{int(digit) + 1}-9]", len(digits) - at - 1)
        for at, digit in enumerate(digits)
        if digit != "9"
    ]


def _less(digits: str, least: int = 0) -> list[tuple[str, int]]:
    """Return the patterns of beginnings that are below digits, each with how many digits are left.
    `least`: the least first digit."""
    return [
        (f"{digits[:at]}[{0 if at else least}-{int(digit) - 1}]", len(digits) - at - 1)
        for at, digit in enumerate(digits)
        if int(digit) > (0 if at else least)
    ]


def _any(count: int) -> str:
    return f"[0-9]{{{count}}}" if count else ""
