"""Check the keywords of a JSON Schema before the grammar engine reads them.

A keyword that is null is absent, as code generators write it. A value of a wrong type, and in a
strict schema a keyword that cannot be enforced, is refused with the client's path to it. The same
path is sought for what the engine refuses later: it names a pattern, or the outermost required
member that no value satisfies. The module knows no grammar; `gateway.structured_output.grammars`
calls it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, Final

from gateway.errors import Kind, Refusal
from gateway.structured_output.output_check import MISSING, References, SchemaCheck
from gateway.structured_output.patterns import find_patterns, translate_pattern
from gateway.structured_output.schema_lark import BOUNDS, is_exact, is_number

COUNT_MAX: Final = 2**31
"""A text or a list that may have so many characters or items has no bound."""

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
_UNSATISFIABLE = re.compile("Unsatisfiable schema|No text satisfies")
_PAIRS = (
    *(("minimum", "maximum"), ("minLength", "maxLength")),
    *(("minItems", "maxItems"), ("minProperties", "maxProperties")),
)
_FAULT_STEPS_MAX: Final = 128

Fault = tuple[tuple[str, ...], str]
"""The steps to a keyword, and what is wrong with it."""


def prepared_schema(schema: dict[str, Any], path: str, *, strict: bool) -> dict[str, Any]:
    """Return the schema without keywords that are null, and with whole counts. O(schema).

    `path`: the schema's field in the request. Raises Refusal that names a keyword.
    """
    return _Preparation(schema, path, strict=strict).schema(schema, ())


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
        self._references, self._path, self._strict = References(root), path, strict

    def schema(self, schema: dict[str, Any], steps: tuple[str, ...]) -> dict[str, Any]:
        """Return a schema without keywords that say nothing: those that are null, and the draft,
        since an old one would take the meaning of newer keywords. Raises Refusal."""
        found = {}
        for name, value in schema.items():
            is_absent = value is None and name not in _NULLABLE
            if is_absent or name == "$schema" or (name == "uniqueItems" and value is False):
                continue
            prepared = self._value(name, value, (*steps, name))
            if name in _COUNTS and name.startswith("max") and prepared >= COUNT_MAX:
                continue
            found[name] = prepared
        if self._strict and not {"anyOf", "oneOf"} & set(steps):  # there another may be satisfied
            for least, most in (("minimum", "maximum"), ("minLength", "maxLength")):
                low, high = found.get(least), found.get(most)
                if is_number(low) and is_number(high) and low > high:
                    raise self._wrong((*steps, least), low, f"at most {most}, {high}")
        if self._strict and "format" in found and not {"enum", "const"} & found.keys():
            kinds = found.get("type")
            is_text = "string" in (kinds if isinstance(kinds, list) else [kinds])
            if is_text and found["format"] not in _FORMATS:
                expected = f"one of {', '.join(_FORMATS[:-1])}, or no format"
                raise self._wrong((*steps, "format"), found["format"], expected)
        return found

    def _value(self, name: str, value: Any, steps: tuple[str, ...]) -> Any:
        """Return the value of a keyword, prepared. Raises Refusal."""
        if self._strict and name in _UNENFORCEABLE:
            problem = "no grammar can hold an answer to this keyword; omit it, or omit strict"
            raise keyword_refusal(self._path, steps, problem)
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
        return self.schema(value, steps)

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
            if name == "multipleOf" and value <= 0:
                raise self._wrong(steps, value, "a number above 0")
        elif name in _COUNTS:
            if not is_number(value) or value < 0 or value != int(value):
                raise self._wrong(steps, value, "a whole number from 0")
            return int(value)
        return value

    def _has_target(self, reference: str) -> bool:
        """Return whether a reference may name a part of the schema: one behind the identifier of a
        part is not followed here."""
        if self._references.target(reference) is not MISSING:
            return True
        return not reference.startswith("#") and self._references.has_resources

    def _wrong(self, steps: tuple[str, ...], value: Any, expected: str) -> Refusal:
        shown = json.dumps(value, default=str)[:64]
        return keyword_refusal(self._path, steps, f"invalid value {shown}; expected {expected}")


# -- what the engine refuses ------------------------------------------------------------------


def find_fault(schema: dict[str, Any], message: str) -> Fault | None:
    """Return the fault of a schema that an engine's message is about; None if it is not found.
    O(schema)."""
    _, is_bad, told = message.partition("regex parse error: ")
    if is_bad:
        told, _, why = told.rpartition(" error: ")
        for steps, pattern in find_patterns(schema):
            if " ".join(translate_pattern(pattern).split()) in told:
                return steps, f"invalid pattern {pattern[:64]!r}: {why.rstrip('.')}"
    if "oneOf" in message and len(found := list(_keywords(schema, "oneOf"))) == 1:
        return found[0], "alternatives that may overlap are not supported; write anyOf"
    if _UNSATISFIABLE.search(message) is not None:
        if (fault := _FaultSearch(schema).conflict(schema, ())) is not None:
            return fault
        name = message.partition("required property '")[2].rpartition("' is unsatisfiable")[0]
        if name and name in (schema.get("properties") or ()):
            return ("properties", name), "no value satisfies all keywords of this schema"
    return None


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
        # References by whether their targets are still searched; those done have no fault.
        self._references_open: dict[str, bool] = {}

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
        if isinstance(reference, str) and (fault := self._reference(reference, steps)) is not None:
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

    def _reference(self, reference: str, steps: tuple[str, ...]) -> Fault | None:
        if self._references_open.get(reference):
            return (*steps, "$ref"), "it refers to itself, and its value would never end"
        if reference in self._references_open:
            return None
        self._references_open[reference] = True
        names = tuple(reference.partition("#")[2].split("/")[1:])
        fault = self.conflict(self._references.target(reference), names)
        self._references_open[reference] = False
        return fault

    def _choice(self, schema: dict[str, Any], steps: tuple[str, ...]) -> Fault | None:
        branches = schema.get(steps[-1])
        if not isinstance(branches, list):
            return None
        faults = [self.conflict(one, (*steps, str(at))) for at, one in enumerate(branches)]
        if not branches:
            return steps, "the list is empty; expected a schema that a value may satisfy"
        return faults[0] if None not in faults else None
