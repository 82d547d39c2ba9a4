"""Check the keywords of a JSON Schema before the grammar engine reads them.

A keyword that is null is absent, as code generators write it, and so is one that constrains no
value. A value of a wrong type, and in a strict schema a keyword that cannot be enforced, is refused
with the client's path to it. The same path is sought for what the engine refuses later: it names a
pattern, or the outermost required member that no value satisfies. The module knows no grammar;
`gateway.structured_output.grammars` calls it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from decimal import Decimal
from typing import Any, Final
from urllib.parse import quote

from gateway.errors import Kind, Refusal
from gateway.structured_output.output_check import (
    MISSING,
    References,
    SchemaCheck,
)
from gateway.structured_output.schemas.endless import find_endless
from gateway.structured_output.schemas.engine_forms import beside_cycles, unite_disjoint
from gateway.structured_output.schemas.lark import BOUNDS, DEFINITIONS, is_exact, is_number
from gateway.structured_output.schemas.patterns import find_patterns, translate_pattern

COUNT_MAX: Final = 2**31
"""A text or a list that may have so many characters or items has no bound."""

MULTIPLE_MAX: Final = 10_000
"""The largest `multipleOf`, in units of its last digit and without its factors 2 and 5: a grammar
of its multiples has so many states, and the time to build them grows with their square."""

_NULLABLE: Final = frozenset({"const", "default"})
"""Keywords for which null is a value."""

_NAMED: Final = frozenset(
    {"properties", "patternProperties", "$defs", "definitions", "defs", "dependentSchemas"}
)
_LISTS: Final = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
_SCHEMAS: Final = frozenset(
    {"items", "additionalProperties", "additionalItems", "not", "if", "then", "else", "contains"}
    | {"propertyNames", "unevaluatedProperties", "unevaluatedItems"}
)
_COUNTS: Final = frozenset(
    {"minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"}
)
_TEXTS: Final = frozenset({"pattern", "format", "$ref"})
_OTHERS: Final = frozenset({"type", "required", "enum", "const", "multipleOf", *BOUNDS})
_TYPES: Final = ("object", "array", "string", "number", "integer", "boolean", "null")
_FORMATS: Final = (
    *("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"),
    "unknown",
)
"""The formats of texts that the grammar engine holds an answer to."""
_UNENFORCEABLE: Final = frozenset(
    {"not", "if", "then", "else", "contains", "minContains", "maxContains", "uniqueItems"}
    | {"propertyNames", "dependentRequired", "dependentSchemas", "dependencies"}
    | {"unevaluatedProperties", "unevaluatedItems", "$dynamicRef", "$recursiveRef"}
)
"""Keywords that no grammar can hold an answer to."""
_EMPTY_SAYS_NOTHING: Final = frozenset(
    {"propertyNames", "dependentRequired", "dependentSchemas", "dependencies"}
    | {"unevaluatedProperties", "unevaluatedItems"}
)
"""Those of them that exclude no value if they are true or an empty object."""
_EXCLUSIVE: Final = (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum"))
_CONSTRAINTS: Final = _NAMED | _LISTS | _SCHEMAS | _COUNTS | _TEXTS | _OTHERS | _UNENFORCEABLE
"""Every keyword that may constrain a value, or holds what others refer to."""
_UNSATISFIABLE = re.compile("Unsatisfiable schema|No text satisfies")
_SUPPORTED = "it is supported where all properties are required"
_RESTRICTIONS = {
    "are not disjoint": ("patternProperties", "two of its patterns match the same name"),
    "minProperties only": ("minProperties", _SUPPORTED),
    "maxProperties only": ("maxProperties", _SUPPORTED),
    "min/maxProperties only": ("minProperties", _SUPPORTED),
}
"""Words of the engine about a keyword that it takes in some forms only, the keyword, and what is
said of it."""
_PAIRS = (
    *(("minimum", "maximum"), ("minLength", "maxLength")),
    *(("minItems", "maxItems"), ("minProperties", "maxProperties")),
)
_FAULT_STEPS_MAX: Final = 128
_NOTHING: Final = object()
"""The value of a keyword that constrains nothing."""

Fault = tuple[tuple[str, ...], str]
"""The steps to a keyword, and what is wrong with it."""


def prepared_schema(schema: dict[str, Any], path: str, *, strict: bool) -> dict[str, Any]:
    """Return the schema without keywords that constrain nothing, and with whole counts. A reference
    becomes a pointer; of definitions and of unknown keywords only what references name is left.
    O(schema).

    `path`: the schema's field in the request. Raises Refusal that names a keyword: also one
    by which a value would never end.
    """
    prepared = _Preparation(schema, path, strict=strict).prepare()
    if (steps := find_endless(prepared, everywhere=strict)) is not None:
        problem = "a value of it contains another one and can never be finished"
        raise keyword_refusal(path, steps, f"{problem}; expected a choice with null, or a list")
    return prepared


def without_inexact_numbers(schema: Any) -> Any:
    """Return the schema without constants and bounds that a double does not hold. O(schema)."""
    if isinstance(schema, list):
        return list(map(without_inexact_numbers, schema))
    if not isinstance(schema, dict):
        return schema
    found = {}
    for name, value in schema.items():
        if name in _NAMED and isinstance(value, dict):
            found[name] = {key: without_inexact_numbers(one) for key, one in value.items()}
        elif name in _LISTS or name in _SCHEMAS:
            found[name] = without_inexact_numbers(value)
        elif name not in ("const", "enum", *BOUNDS) or is_exact(value):
            found[name] = value
    return found


def keyword_refusal(path: str, steps: Sequence[str], problem: str) -> Refusal:
    """Return the refusal of the keyword at `steps` of the schema whose field is `path`."""
    where = ".".join((path, *steps))
    return Refusal(Kind.BAD, "invalid_json_schema", f"{where}: {problem}.", param=where[:300])


class _Preparation:
    """Prepares one schema."""

    def __init__(self, root: dict[str, Any], path: str, *, strict: bool) -> None:
        self._root, self._path, self._strict = root, path, strict
        self._references = References(root)
        self._places: dict[int, tuple[str, ...]] = {}
        """The steps to each schema that is prepared, by its identity."""
        self._users: list[tuple[dict[str, Any], tuple[str, ...]]] = []
        """Prepared schemas with a reference, and the steps to it."""

    def prepare(self) -> dict[str, Any]:
        """Return the whole schema. Raises Refusal."""
        found = self._schema(self._root, ())
        if self._references.has_resources:
            return found
        for user, steps in self._users:
            user["$ref"] = self._pointer(found, user["$ref"], steps)
        for user, steps, name in list(beside_cycles(found, self._users)):
            if self._strict:
                problem = "it stands beside a $ref to a schema that contains itself; omit it"
                raise keyword_refusal(self._path, (*steps[:-1], name), problem)
            del user[name]
        unite_disjoint(found)
        return found

    def _pointer(self, found: dict[str, Any], reference: str, steps: tuple[str, ...]) -> str:
        """Return the pointer to what a reference names, which is prepared where it stands if no
        keyword has led to it. Raises Refusal."""
        target = self._references.target(reference)
        place = self._places.get(id(target))
        if place is None:
            place = self._references.steps(reference)
            holder: Any = found
            for step in place[:-1]:
                holder = holder.setdefault(step, {}) if isinstance(holder, dict) else None
            if not isinstance(holder, dict) or not place:
                raise self._wrong(steps, reference, "a reference to a schema")
            if place[-1] not in holder:
                holder[place[-1]] = self._subschema(target, place)
            elif target is not None and not isinstance(target, bool):
                raise self._wrong(steps, reference, "a reference to a schema")
        names = (quote(step.replace("~", "~0").replace("/", "~1"), safe="~$") for step in place)
        return "/".join(("#", *names))

    def _schema(self, schema: dict[str, Any], steps: tuple[str, ...]) -> dict[str, Any]:
        """Return a schema without keywords that constrain nothing: also without its draft, since an
        old one would take the meaning of newer keywords. Raises Refusal."""
        found: dict[str, Any] = {}
        self._places[id(schema)] = steps
        for name, value in _with_bounds(schema).items():
            if value is None and name != "const":
                continue
            if name in DEFINITIONS and not self._references.has_resources:
                continue  # those that references name come back
            if name == "additionalItems" and not isinstance(schema.get("items"), list):
                continue
            if name in _CONSTRAINTS:
                prepared = self._value(name, value, (*steps, name))
                if prepared is not _NOTHING:
                    found[name] = prepared
            elif name in ("$id", "$anchor") and self._references.has_resources:
                found[name] = value
        if "$ref" in found:
            self._users.append((found, (*steps, "$ref")))
        if self._strict and not {"anyOf", "oneOf"} & set(steps):  # there another may be satisfied
            for least, most in (("minimum", "maximum"), ("minLength", "maxLength")):
                low, high = found.get(least), found.get(most)
                if is_number(low) and is_number(high) and low > high:
                    raise self._wrong((*steps, least), low, f"at most {most}, {high}")
        if self._strict and "format" in found and not {"enum", "const"} & found.keys():
            kinds = found.get("type", "string")
            is_text = "string" in (kinds if isinstance(kinds, list) else [kinds])
            if is_text and found["format"] not in _FORMATS:
                expected = f"one of {', '.join(_FORMATS[:-1])}, or no format"
                raise self._wrong((*steps, "format"), found["format"], expected)
        return found

    def _value(self, name: str, value: Any, steps: tuple[str, ...]) -> Any:
        """Return the value of a keyword, prepared; `_NOTHING` if it constrains nothing. Raises
        Refusal."""
        if name == "uniqueItems" and value is False:
            return _NOTHING
        if name in _EMPTY_SAYS_NOTHING and (value is True or value == {}):
            return _NOTHING
        if name == "propertyNames" and value == {"type": "string"}:  # as every name is
            return _NOTHING
        if self._strict and name in _UNENFORCEABLE:
            problem = "no grammar can hold an answer to this keyword; omit it, or omit strict"
            raise keyword_refusal(self._path, steps, problem)
        if name in _UNENFORCEABLE:
            return _NOTHING
        if name in _NAMED:
            if not isinstance(value, dict):
                raise self._wrong(steps, value, "an object of schemas")
            return {key: self._subschema(one, (*steps, key)) for key, one in value.items()}
        if name in _LISTS or (name == "items" and isinstance(value, list)):
            if not isinstance(value, list):
                raise self._wrong(steps, value, "a list of schemas")
            return [self._subschema(one, (*steps, str(at))) for at, one in enumerate(value)]
        if name in _SCHEMAS:
            return self._subschema(value, steps)
        return self._scalar(name, value, steps)

    def _subschema(self, value: Any, steps: tuple[str, ...]) -> Any:
        if value is None:
            return {}
        if isinstance(value, bool):
            return value
        if not isinstance(value, dict):
            raise self._wrong(steps, value, "a schema, which is an object or a boolean")
        return self._schema(value, steps)

    def _scalar(self, name: str, value: Any, steps: tuple[str, ...]) -> Any:
        """Return the value of a keyword that holds no schema. Raises Refusal."""
        if name == "type":
            kinds = value if isinstance(value, list) else [value]
            if not kinds or any(kind not in _TYPES for kind in kinds):
                raise self._wrong(steps, value, f"one or a list of {', '.join(_TYPES)}")
        elif name == "required":
            if not isinstance(value, list) or any(not isinstance(one, str) for one in value):
                raise self._wrong(steps, value, "a list of names")
        elif name == "enum":
            if not isinstance(value, list) or not value:
                raise self._wrong(steps, value, "a list of at least one value")
        elif name in _TEXTS:
            if not isinstance(value, str):
                raise self._wrong(steps, value, "a string")
            if name == "$ref" and not self._has_target(value):
                raise self._wrong(steps, value, "a reference to a part of this schema")
        elif name in (*BOUNDS, "multipleOf"):
            if not is_number(value):
                raise self._wrong(steps, value, "a number")
            if name == "multipleOf":
                return self._multiple(value, steps)
        elif name in _COUNTS:
            if not is_number(value) or value < 0 or value != int(value):
                raise self._wrong(steps, value, "a whole number from 0")
            if value < COUNT_MAX:
                return int(value)
            if name.startswith("max"):
                return _NOTHING
            raise self._wrong(steps, value, f"a whole number below {COUNT_MAX}")
        return value

    def _multiple(self, value: int | float | Decimal, steps: tuple[str, ...]) -> Any:
        """Return a `multipleOf`; `_NOTHING` if no grammar holds it and none has to. Raises
        Refusal."""
        if value <= 0:
            raise self._wrong(steps, value, "a number above 0")
        if _is_enforceable(value):
            return value
        if self._strict:
            expected = f"a whole number up to {MULTIPLE_MAX}, or a decimal of few digits"
            raise self._wrong(steps, value, expected)
        return _NOTHING

    def _has_target(self, reference: str) -> bool:
        """Return whether a reference may name a part of the schema: one behind the identifier of a
        part is not followed here."""
        if self._references.target(reference) is not MISSING:
            return True
        return not reference.startswith("#") and self._references.has_resources

    def _wrong(self, steps: tuple[str, ...], value: Any, expected: str) -> Refusal:
        shown = json.dumps(value, default=str)[:64]
        return keyword_refusal(self._path, steps, f"invalid value {shown}; expected {expected}")


def _with_bounds(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema in which no bound is exclusive by a boolean, as drafts before 6 and OpenAPI
    3.0 write it."""
    for exclusive, bound in _EXCLUSIVE:
        if isinstance(schema.get(exclusive), bool) and is_number(schema.get(bound)):
            found = {name: value for name, value in schema.items() if name != exclusive}
            if schema[exclusive]:
                found[exclusive] = found.pop(bound)
            schema = found
    return schema


def _is_enforceable(multiple: int | float | Decimal) -> bool:
    """Return whether the engine holds an answer to a `multipleOf`: it counts in units of the last
    digit, which it finds in doubles and keeps in 32 bits."""
    units = float(min(multiple, 2**32))
    while units != int(units) and units < 2**32:
        units *= 10
    rest = int(units)
    for factor in (2, 5):
        while rest and rest % factor == 0:
            rest //= factor
    return 0 < rest <= MULTIPLE_MAX and units < 2**32


# -- what the engine refuses ------------------------------------------------------------------


def find_fault(schema: dict[str, Any], message: str) -> Fault | None:
    """Return the fault of a schema that an engine's message is about; None if it is not found.
    O(schema)."""
    told, _, why = message.partition("regex parse error: ")[2].rpartition(" error: ")
    if inner := message.partition("lookarounds not supported yet; ")[2].partition(" in regex /")[2]:
        told, why = inner.replace("\\/", "/"), "^ and $ may only begin and end it"
    for steps, pattern in find_patterns(schema) if told else ():
        if " ".join(translate_pattern(pattern).split()) in told:
            return steps, f"invalid pattern {pattern[:64]!r}: {why.rstrip('.')}"
    if "oneOf" in message and len(found := list(_keywords(schema, "oneOf"))) == 1:
        return found[0], "alternatives that may overlap are not supported; write anyOf"
    for word, (name, problem) in _RESTRICTIONS.items():
        if word in message and len(found := list(_keywords(schema, name))) == 1:
            return found[0], problem
    if is_unsatisfiable(message):
        if (fault := _FaultSearch(schema).conflict(schema, ())) is not None:
            return fault
        name = message.partition("required property '")[2].rpartition("' is unsatisfiable")[0]
        if name and name in (schema.get("properties") or ()):
            return ("properties", name), "no value satisfies all keywords of this schema"
    return None


def is_unsatisfiable(message: str) -> bool:
    """Return whether an engine's message says that no text satisfies a grammar."""
    return _UNSATISFIABLE.search(message) is not None


def _keywords(schema: Any, name: str, steps: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the steps to each keyword of a name. O(schema), recursion as deep as the schema."""
    for step, inner in schema.items() if isinstance(schema, dict) else ():
        if step == name:
            yield (*steps, name)
        yield from _keywords(inner, name, (*steps, step))
    for at, inner in enumerate(schema if isinstance(schema, list) else ()):
        yield from _keywords(inner, name, (*steps, str(at)))


class _FaultSearch:
    """The search for keywords of one schema that exclude each other."""

    def __init__(self, root: dict[str, Any]) -> None:
        self._references, self._check = References(root), SchemaCheck(root)
        self._followed: set[str] = set()
        """References; one that is met again has no fault, or it is told already."""

    def conflict(self, schema: Any, steps: tuple[str, ...]) -> Fault | None:
        """Return why no value satisfies a schema, as far as it shows without a grammar."""
        if schema is False:
            return steps, "no value is allowed here, and one is required"
        if not isinstance(schema, dict) or len(steps) > _FAULT_STEPS_MAX:
            return None
        return self._own(schema, steps) or self._inner(schema, steps)

    def _own(self, schema: dict[str, Any], steps: tuple[str, ...]) -> Fault | None:
        for least, most in _PAIRS:
            low, high = schema.get(least), schema.get(most)
            if is_number(low) and is_number(high) and low > high:
                return (*steps, least), f"invalid value {low}; expected at most {most}, {high}"
        members, closed = schema.get("properties"), schema.get("additionalProperties") is False
        for name in schema.get("required") or () if closed else ():
            if name not in (members or ()) and "patternProperties" not in schema:
                problem = f"{name[:64]!r} is no property, and additionalProperties is false"
                return (*steps, "required"), problem
        for keyword in ("const", "enum"):
            if keyword in schema:
                values = schema[keyword] if keyword == "enum" else [schema[keyword]]
                rest = {name: value for name, value in schema.items() if name != keyword}
                if isinstance(values, list) and not any(self._holds(one, rest) for one in values):
                    return (*steps, keyword), "no value of it satisfies the keywords beside it"
        return None

    def _holds(self, value: Any, schema: dict[str, Any]) -> bool:
        try:
            return self._check.holds(value, schema)
        except Exception:  # of a keyword in no known form, which the engine reads in its own way
            return True

    def _inner(self, schema: dict[str, Any], steps: tuple[str, ...]) -> Fault | None:
        """Return the fault of a part that every value of the schema has."""
        parts: list[tuple[Any, Sequence[str]]] = []
        reference = schema.get("$ref")
        if isinstance(reference, str) and (fault := self._reference(reference)) is not None:
            return fault
        for name in ("anyOf", "oneOf"):
            if (fault := self._choice(schema, (*steps, name))) is not None:
                return fault
        members, required = schema.get("properties"), schema.get("required")
        if isinstance(members, dict) and isinstance(required, list):
            parts += [(members[one], ("properties", one)) for one in required if one in members]
        if isinstance(schema.get("minItems"), int) and schema["minItems"] > 0:
            parts.append((schema.get("items"), ("items",)))
        both = schema.get("allOf")
        if isinstance(both, list):
            parts += [(one, ("allOf", str(at))) for at, one in enumerate(both)]
        for part, more in parts:
            if (fault := self.conflict(part, (*steps, *more))) is not None:
                return fault
        return None

    def _reference(self, reference: str) -> Fault | None:
        if reference in self._followed:
            return None
        self._followed.add(reference)
        names = tuple(reference.partition("#")[2].split("/")[1:])
        return self.conflict(self._references.target(reference), names)

    def _choice(self, schema: dict[str, Any], steps: tuple[str, ...]) -> Fault | None:
        branches = schema.get(steps[-1])
        if not isinstance(branches, list):
            return None
        faults = [self.conflict(one, (*steps, str(at))) for at, one in enumerate(branches)]
        if not branches:
            return steps, "the list is empty; expected a schema that a value may satisfy"
        return faults[0] if None not in faults else None
