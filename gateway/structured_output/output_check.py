"""Check whether a finished text satisfies its output format, after constrained decoding.

The check knows the JSON Schema keywords that restrict a value and skips keywords it does not know:
it may miss a violation, but never reports a false one. For schemas that are not strict it is the
only check of keywords that cannot be enforced during decoding (`uniqueItems`, `not`, `contains`,
conditions). `format` and `pattern` are not checked. Steps are counted, so no schema takes long.
`gateway.generation` calls it once per answer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from decimal import Decimal
from functools import cached_property
from typing import Any, Final
from urllib.parse import unquote

from gateway.dialects.canonical import OutputFormat

STEPS_MAX = 10_000
"""Maximum number of steps of one check: about 30 ms of the event loop."""
TEXT_CHARS_MAX = 500_000
"""A longer text is not checked."""

_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "boolean": (bool,),
    "null": (type(None),),
    "number": (int, float, Decimal),
}


_ANNOTATIONS = frozenset(
    {
        "title",
        "description",
        "default",
        "examples",
        "deprecated",
        "readOnly",
        "writeOnly",
        "$comment",
    }
)
_NUMERIC = frozenset(
    (
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "minLength", "maxLength"),
        *("minItems", "maxItems", "minProperties", "maxProperties"),
    )
)
_FULLY_CHECKED = (
    _ANNOTATIONS
    | _NUMERIC
    | {"type", "enum", "const", "required", "dependentRequired", "uniqueItems"}
)
"""Keywords that are checked completely; a schema with other keywords may be stricter than the check
knows."""


class OutOfSteps(Exception):
    """The check exceeded `STEPS_MAX`."""


def satisfies(text: str, wanted: OutputFormat) -> bool:
    """Return False only if the text certainly violates the format. Raises nothing.

    The client writes the schema, and the text is delivered already: a schema that the check cannot
    read, or any other failure, counts as satisfied. O(text), at most `STEPS_MAX` steps.
    """
    if wanted.kind not in ("json_object", "json_schema") or len(text) > TEXT_CHARS_MAX:
        return True
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        return False
    except (ValueError, RecursionError):
        return True  # a number of 5,000 digits, or a text that is nested too deeply
    if wanted.kind == "json_object":
        return isinstance(value, dict)
    try:
        schema = json.loads(wanted.schema)
        return SchemaCheck(schema).holds(value, schema)
    except Exception:
        return True


Steps = tuple[str, ...]
"""The members and indices on the way to a part of a schema."""


def pointer_steps(reference: str) -> Steps:
    """Return the steps of the JSON pointer in a reference. O(reference)."""
    steps = unquote(reference.partition("#")[2]).split("/")[1:]
    return tuple(step.replace("~1", "/").replace("~0", "~") for step in steps)


MISSING: Final = object()
"""What a reference to nothing names."""


class References:
    """The parts of one schema by reference: a JSON pointer, an anchor, or either behind the
    schema's own `$id`. The schema may not change."""

    def __init__(self, root: Any) -> None:
        self._root: Mapping[str, Any] = root if isinstance(root, dict) else {}

    def target(self, reference: str) -> Any:
        """Return the part that a reference names, `MISSING` if there is none. O(reference), and the
        first time O(schema)."""
        base, _, fragment = reference.partition("#")
        if base and base not in (self._root.get("$id"), self._root.get("id")):
            return MISSING
        if fragment and not fragment.startswith("/"):
            return self._anchors.get(unquote(fragment), (MISSING, ()))[0]
        at: Any = self._root
        for name in pointer_steps(reference):
            if isinstance(at, list) and name.isdecimal() and int(name) < len(at):
                at = at[int(name)]
            elif isinstance(at, dict) and name in at:
                at = at[name]
            else:
                return MISSING
        return at

    def steps(self, reference: str) -> Steps:
        """Return the steps to what a reference names, if it names a part. O(reference), and for the
        first anchor O(schema)."""
        fragment = unquote(reference.partition("#")[2])
        if fragment and not fragment.startswith("/"):
            return self._anchors.get(fragment, (MISSING, ()))[1]
        return pointer_steps(reference)

    @cached_property
    def has_resources(self) -> bool:
        """Return whether a part has an identifier of its own, by which it may be named."""
        inner = (one for one, steps in _objects(self._root) if steps)
        return any(isinstance(one.get("$id"), str) for one in inner)

    @cached_property
    def _anchors(self) -> dict[str, tuple[Any, Steps]]:
        found: dict[str, tuple[Any, Steps]] = {}
        for one, steps in _objects(self._root):
            if isinstance(name := one.get("$anchor"), str):
                found.setdefault(name, (one, steps))
        return found


def _objects(root: Mapping[str, Any]) -> Iterator[tuple[Mapping[str, Any], Steps]]:
    """Yield all objects inside a JSON value, and itself, with the steps to each. O(values)."""
    waiting: list[tuple[Any, Steps]] = [(root, ())]
    while waiting:
        value, steps = waiting.pop()
        if isinstance(value, Mapping):
            yield value, steps
            waiting += [(one, (*steps, name)) for name, one in value.items()]
        elif isinstance(value, list):
            waiting += [(one, (*steps, str(at))) for at, one in enumerate(value)]


class SchemaCheck:
    """Checks values against the schema `root` and its parts."""

    def __init__(self, root: Any) -> None:
        self._references = References(root)
        self._steps_left = STEPS_MAX

    def holds(self, value: Any, schema: Any) -> bool:
        """Return whether `value` satisfies `schema`, as far as the check knows."""
        self._steps_left -= 1
        if self._steps_left < 0:
            raise OutOfSteps
        if not isinstance(schema, dict):
            return schema is not False
        return (
            self._matches_type(value, schema)
            and self._matches_enum(value, schema)
            and self._is_in_range(value, schema)
            and self._children_hold(value, schema)
            and self._collection_holds(value, schema)
            and self._combinations_hold(value, schema)
            and self._negations_hold(value, schema)
        )

    def _matches_type(self, value: Any, schema: dict[str, Any]) -> bool:
        wanted = schema.get("type")
        names = [wanted] if isinstance(wanted, str) else wanted
        self._steps_left -= len(names) if isinstance(names, list) else 0
        return not isinstance(names, list) or any(_is_of_type(value, name) for name in names)

    def _matches_enum(self, value: Any, schema: dict[str, Any]) -> bool:
        if "const" in schema and not _equal(value, schema["const"]):
            return False
        listed = schema.get("enum")
        if not isinstance(listed, list):
            return True
        self._steps_left -= len(listed)
        return any(_equal(value, one) for one in listed)

    def _is_in_range(self, value: Any, schema: dict[str, Any]) -> bool:
        if isinstance(value, str):
            return _is_between(len(value), schema, "minLength", "maxLength")
        if isinstance(value, list):
            return _is_between(len(value), schema, "minItems", "maxItems")
        if isinstance(value, dict):
            return _is_between(len(value), schema, "minProperties", "maxProperties")
        if not _is_of_type(value, "number"):
            return True
        above, below = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
        return (
            _is_between(value, schema, "minimum", "maximum")
            and not (_is_of_type(above, "number") and value <= above)
            and not (_is_of_type(below, "number") and value >= below)
        )

    def _children_hold(self, value: Any, schema: dict[str, Any]) -> bool:
        if isinstance(value, list):
            first = schema.get("prefixItems", ())
            count = len(first) if isinstance(first, list) else 0
            pairs = list(zip(value, first, strict=False)) if count else []
            if "items" in schema:
                pairs += [(item, schema["items"]) for item in value[count:]]
            return all(self.holds(item, one) for item, one in pairs)
        if not isinstance(value, dict):
            return True
        required = schema.get("required", ())
        self._steps_left -= len(required) if isinstance(required, list) else 0
        if _lacks(value, required):
            return False
        known = schema.get("properties", {})
        known = known if isinstance(known, dict) else {}
        rest = True if "patternProperties" in schema else schema.get("additionalProperties", True)
        return all(self.holds(item, known.get(name, rest)) for name, item in value.items())

    def _collection_holds(self, value: Any, schema: dict[str, Any]) -> bool:
        """Check keywords that restrict all items or all members together."""
        if isinstance(value, list):
            if schema.get("uniqueItems") is True and not self._are_unique(value):
                return False
            wanted = schema.get("minContains", 1) != 0 and "contains" in schema
            return not wanted or any(self.holds(item, schema["contains"]) for item in value)
        if not isinstance(value, dict):
            return True
        if not all(self.holds(name, schema.get("propertyNames", True)) for name in value):
            return False
        needs = schema.get("dependentRequired")
        for name, others in needs.items() if isinstance(needs, dict) else ():
            self._steps_left -= 1 + (len(others) if isinstance(others, list) else 0)
            if name in value and _lacks(value, others):
                return False
        return True

    def _are_unique(self, items: list[Any]) -> bool:
        seen = set()
        for item in items:
            text = json.dumps(item, sort_keys=True)
            self._steps_left -= 1 + len(text) // 32
            if self._steps_left < 0:
                raise OutOfSteps
            if text in seen:
                return False
            seen.add(text)
        return True

    def _negations_hold(self, value: Any, schema: dict[str, Any]) -> bool:
        """Check `not`, `oneOf` and `if`, only with subschemas that are checked completely: for
        others a positive result may be wrong."""
        if (
            "not" in schema
            and self._is_fully_checked(schema["not"])
            and self.holds(value, schema["not"])
        ):
            return False
        one = schema.get("oneOf")
        if isinstance(one, list) and all(map(self._is_fully_checked, one)):
            return sum(self.holds(value, branch) for branch in one) == 1
        if "if" in schema and self._is_fully_checked(schema["if"]):
            branch = "then" if self.holds(value, schema["if"]) else "else"
            return self.holds(value, schema.get(branch, True))
        return True

    def _is_fully_checked(self, schema: Any) -> bool:
        self._steps_left -= 1
        if self._steps_left < 0:
            raise OutOfSteps
        if not isinstance(schema, dict):
            return isinstance(schema, bool)
        members = schema.get("properties", {})
        listed = schema.get("enum", [])
        if not isinstance(listed, list):
            return False
        if any(isinstance(one, dict | list) for one in (schema.get("const"), *listed)):
            return False  # Python's equality inside containers does not separate 1 from true
        if not (schema.keys() - {"properties"} <= _FULLY_CHECKED and isinstance(members, dict)):
            return False
        if not all(_is_valid(name, value) for name, value in schema.items()):
            return False
        return all(map(self._is_fully_checked, members.values()))

    def _combinations_hold(self, value: Any, schema: dict[str, Any]) -> bool:
        every, some = schema.get("allOf", ()), schema.get("anyOf", schema.get("oneOf", ()))
        if isinstance(every, list) and not all(self.holds(value, one) for one in every):
            return False
        if isinstance(some, list) and not any(self.holds(value, one) for one in some):
            return False
        reference = schema.get("$ref")
        if not isinstance(reference, str):
            return True
        target = self._references.target(reference)
        return target is MISSING or self.holds(value, target)


def _lacks(value: dict[str, Any], required: Any) -> bool:
    """Return whether a member of the list `required` is missing; items that name none are
    skipped."""
    return isinstance(required, list) and any(
        isinstance(name, str) and name not in value for name in required
    )


def _is_valid(keyword: str, value: Any) -> bool:
    """Return whether a completely checked keyword has a value that it may have; the check skips an
    invalid one, so its result says nothing about the opposite."""
    if keyword in _NUMERIC:
        return _is_of_type(value, "number")
    match keyword:
        case "type":
            names = value if isinstance(value, list) else [value]
            return all(isinstance(name, str) and name in (*_TYPES, "integer") for name in names)
        case "required":
            return _is_list_of_names(value)
        case "dependentRequired":
            return isinstance(value, dict) and all(map(_is_list_of_names, value.values()))
        case "uniqueItems":
            return isinstance(value, bool)
        case _:
            return True


def _is_list_of_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _is_of_type(value: Any, name: Any) -> bool:
    if name == "integer":
        whole = isinstance(value, float | Decimal) and value == int(value)
        return whole or (isinstance(value, int) and not isinstance(value, bool))
    if name == "number" and isinstance(value, bool):
        return False
    return not isinstance(name, str) or name not in _TYPES or isinstance(value, _TYPES[name])


def _equal(value: Any, other: Any) -> bool:
    return isinstance(value, bool) == isinstance(other, bool) and bool(value == other)


def _is_between(size: float, schema: dict[str, Any], least: str, most: str) -> bool:
    low: Any = schema.get(least)
    high: Any = schema.get(most)
    return not (_is_of_type(low, "number") and size < low) and not (
        _is_of_type(high, "number") and size > high
    )
