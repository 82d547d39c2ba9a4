"""Is a finished text what its format asked for? A second look, after constrained decoding.

It knows the keywords that say what a value may be, and passes over those it does not know: it may
find too little, never too much. Of a schema that is not strict it is the only one to look at what
cannot be held while tokens are drawn (`uniqueItems`, `not`, `contains`, conditions). Formats and
patterns it takes for remarks. Steps are counted, so that no schema, however made, takes long.
`gateway.generation.output_parser` asks it once per answer.
"""

from __future__ import annotations

import json
from typing import Any

from gateway.dialects.canonical import OutputFormat

STEPS_MAX = 20_000
TEXT_SIGNS_MAX = 1_000_000

_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "boolean": (bool,),
    "null": (type(None),),
    "number": (int, float),
}


_REMARKS = frozenset(
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
_DECIDED = _REMARKS | {
    *("type", "enum", "const", "required", "dependentRequired", "uniqueItems"),
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "minLength", "maxLength"),
    *("minItems", "maxItems", "minProperties", "maxProperties"),
}
"""Keywords that are looked at to the end; others may say more than is found here."""


class _OutOfSteps(Exception):
    """More than anybody needs."""


def satisfies(text: str, wanted: OutputFormat) -> bool:
    """True unless the text breaks the format for certain. O(text), at most `STEPS_MAX` steps."""
    if wanted.kind == "text" or len(text) > TEXT_SIGNS_MAX:
        return True
    try:
        value = json.loads(text)
        if wanted.kind == "json_object":
            return isinstance(value, dict)
        schema = json.loads(wanted.schema)
        return _Check(schema).holds(value, schema)
    except ValueError:
        return False
    except (_OutOfSteps, RecursionError):
        return True


class _Check:
    """One value against one schema."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._left = STEPS_MAX

    def holds(self, value: Any, schema: Any) -> bool:
        """Does `value` satisfy `schema`?"""
        self._left -= 1
        if self._left < 0:
            raise _OutOfSteps
        if not isinstance(schema, dict):
            return schema is not False
        return (
            self._is_of_type(value, schema)
            and self._is_listed(value, schema)
            and self._is_within(value, schema)
            and self._members_hold(value, schema)
            and self._fit_together(value, schema)
            and self._combined_hold(value, schema)
            and self._fails_where_it_has_to(value, schema)
        )

    def _is_of_type(self, value: Any, schema: dict[str, Any]) -> bool:
        wanted = schema.get("type")
        names = [wanted] if isinstance(wanted, str) else wanted
        self._left -= len(names) if isinstance(names, list) else 0
        return not isinstance(names, list) or any(_is_a(value, name) for name in names)

    def _is_listed(self, value: Any, schema: dict[str, Any]) -> bool:
        if "const" in schema and not _same(value, schema["const"]):
            return False
        listed = schema.get("enum")
        if not isinstance(listed, list):
            return True
        self._left -= len(listed)
        return any(_same(value, one) for one in listed)

    def _is_within(self, value: Any, schema: dict[str, Any]) -> bool:
        if isinstance(value, str):
            return _between(len(value), schema, "minLength", "maxLength")
        if isinstance(value, list):
            return _between(len(value), schema, "minItems", "maxItems")
        if isinstance(value, dict):
            return _between(len(value), schema, "minProperties", "maxProperties")
        if not _is_a(value, "number"):
            return True
        above, below = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
        return (
            _between(value, schema, "minimum", "maximum")
            and not (_is_a(above, "number") and value <= above)
            and not (_is_a(below, "number") and value >= below)
        )

    def _members_hold(self, value: Any, schema: dict[str, Any]) -> bool:
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
        self._left -= len(required) if isinstance(required, list) else 0
        if isinstance(required, list) and any(name not in value for name in required):
            return False
        known = schema.get("properties", {})
        known = known if isinstance(known, dict) else {}
        rest = True if "patternProperties" in schema else schema.get("additionalProperties", True)
        return all(self.holds(item, known.get(name, rest)) for name, item in value.items())

    def _fit_together(self, value: Any, schema: dict[str, Any]) -> bool:
        """What is said of items and members as a whole."""
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
            self._left -= 1 + (len(others) if isinstance(others, list) else 0)
            if name in value and isinstance(others, list) and any(o not in value for o in others):
                return False
        return True

    def _are_unique(self, items: list[Any]) -> bool:
        seen = set()
        for item in items:
            text = json.dumps(item, sort_keys=True)
            self._left -= 1 + len(text) // 32
            if self._left < 0:
                raise _OutOfSteps
            if text in seen:
                return False
            seen.add(text)
        return True

    def _fails_where_it_has_to(self, value: Any, schema: dict[str, Any]) -> bool:
        """Only of schemas that are decided here to the end: of others "it holds" may be false."""
        if "not" in schema and self._is_decided(schema["not"]) and self.holds(value, schema["not"]):
            return False
        one = schema.get("oneOf")
        if isinstance(one, list) and all(map(self._is_decided, one)):
            return sum(self.holds(value, branch) for branch in one) == 1
        if "if" in schema and self._is_decided(schema["if"]):
            branch = "then" if self.holds(value, schema["if"]) else "else"
            return self.holds(value, schema.get(branch, True))
        return True

    def _is_decided(self, schema: Any) -> bool:
        self._left -= 1
        if self._left < 0:
            raise _OutOfSteps
        if not isinstance(schema, dict):
            return isinstance(schema, bool)
        members = schema.get("properties", {})
        listed = schema.get("enum", [])
        if not isinstance(listed, list):
            return False
        if any(isinstance(one, dict | list) for one in (schema.get("const"), *listed)):
            return False  # inside of these 1 and true are one to Python
        if not (schema.keys() - {"properties"} <= _DECIDED and isinstance(members, dict)):
            return False
        return all(map(self._is_decided, members.values()))

    def _combined_hold(self, value: Any, schema: dict[str, Any]) -> bool:
        every, some = schema.get("allOf", ()), schema.get("anyOf", schema.get("oneOf", ()))
        if isinstance(every, list) and not all(self.holds(value, one) for one in every):
            return False
        if isinstance(some, list) and not any(self.holds(value, one) for one in some):
            return False
        reference = schema.get("$ref")
        return not isinstance(reference, str) or self.holds(value, self._found(reference))

    def _found(self, reference: str) -> Any:
        """What a local reference points at; anything goes where it points at nothing."""
        at = self._root
        if not reference.startswith("#"):
            return True
        for step in reference[1:].split("/")[1:]:
            name = step.replace("~1", "/").replace("~0", "~")
            if not isinstance(at, dict) or name not in at:
                return True
            at = at[name]
        return at


def _is_a(value: Any, name: Any) -> bool:
    if name == "integer":
        whole = isinstance(value, float) and value.is_integer()
        return whole or (isinstance(value, int) and not isinstance(value, bool))
    if name == "number" and isinstance(value, bool):
        return False
    return not isinstance(name, str) or name not in _TYPES or isinstance(value, _TYPES[name])


def _same(value: Any, other: Any) -> bool:
    return isinstance(value, bool) == isinstance(other, bool) and bool(value == other)


def _between(size: float, schema: dict[str, Any], least: str, most: str) -> bool:
    low: Any = schema.get(least)
    high: Any = schema.get(most)
    return not (_is_a(low, "number") and size < low) and not (_is_a(high, "number") and size > high)
