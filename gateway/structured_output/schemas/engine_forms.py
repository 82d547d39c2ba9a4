"""Write what a JSON Schema says in the forms that the grammar engine takes, without a loss.

The engine takes a `oneOf` only if it sees that its alternatives exclude each other, and it looks
behind no reference: a discriminated union of definitions becomes an `anyOf` here. It takes no
keyword beside a reference into a cycle, so one that says nothing more is left out.
`gateway.structured_output.schemas.keywords` calls it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache
from itertools import combinations
from typing import Any, Final

from gateway.structured_output.output_check import (
    OutOfSteps,
    References,
    SchemaCheck,
    Steps,
)
from gateway.structured_output.schemas.lark import DEFINITIONS

ALTERNATIVES_MAX: Final = 64
"""Most alternatives of a `oneOf` that are compared, each with each."""
_DEPTH_MAX: Final = 8
"""How many members and references deep two alternatives are compared."""
_ABOUT_OTHERS: Final = frozenset({"additionalProperties", "items", "unevaluatedProperties"})
"""Keywords whose meaning depends on those beside them."""

_Parts = Sequence[dict[str, Any]]
"""Schemas that a value has to satisfy together."""


def unite_disjoint(root: dict[str, Any]) -> None:
    """Make each `oneOf` whose alternatives exclude each other an `anyOf`, in place. O(schema)."""
    disjoint = _Disjoint(root)
    for schema in _objects(root):
        listed = schema.get("oneOf")
        if isinstance(listed, list) and "anyOf" not in schema and disjoint.are(listed):
            schema["anyOf"] = schema.pop("oneOf")


class _Disjoint:
    """Whether parts of one schema exclude each other. What is not certain counts as no."""

    def __init__(self, root: dict[str, Any]) -> None:
        self._references, self._check = References(root), SchemaCheck(root)

    def are(self, schemas: Sequence[Any]) -> bool:
        """Return whether no value satisfies two of the schemas."""
        if len(schemas) > ALTERNATIVES_MAX:
            return False
        each = [self._parts(schema) for schema in schemas]
        try:
            return all(
                self._exclude(one, other, _DEPTH_MAX) for one, other in combinations(each, 2)
            )
        except OutOfSteps:
            return False

    def _parts(self, schema: Any) -> _Parts:
        """Return a schema and those behind its references and `allOf`."""
        found: list[dict[str, Any]] = []
        waiting, seen = [schema], set[int]()
        while waiting and len(found) < ALTERNATIVES_MAX:
            one = waiting.pop()
            if not isinstance(one, dict) or id(one) in seen:
                continue
            seen.add(id(one))
            found.append(one)
            if isinstance(reference := one.get("$ref"), str):
                waiting.append(self._references.target(reference))
            waiting += one["allOf"] if isinstance(one.get("allOf"), list) else ()
        return found

    def _exclude(self, ones: _Parts, others: _Parts, depth: int) -> bool:
        if not depth:
            return False
        if any(
            self._values_exclude(one, other)
            or self._values_exclude(other, one)
            or _types_exclude(one, other)
            for one in ones
            for other in others
        ):
            return True
        if not (_are_objects(ones) or _are_objects(others)):
            return False  # a text satisfies any words about members
        if _forbids(others, _required(ones)) or _forbids(ones, _required(others)):
            return True
        both = _required(ones) & _required(others)
        return any(
            self._exclude(self._members(ones, name), self._members(others, name), depth - 1)
            for name in sorted(both)
        )

    def _values_exclude(self, one: dict[str, Any], other: dict[str, Any]) -> bool:
        """Return whether `one` lists its values and none of them satisfies `other`."""
        values = [one["const"]] if "const" in one else one.get("enum")
        return isinstance(values, list) and not any(self._check.holds(v, other) for v in values)

    def _members(self, parts: _Parts, name: str) -> _Parts:
        """Return what the parts say of a member."""
        said = (part["properties"].get(name) for part in parts if _has_members(part))
        return [inner for schema in said for inner in self._parts(schema)]


def _objects(root: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield all objects inside a schema that may be changed meanwhile. O(schema)."""
    waiting: list[Any] = [root]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            yield value
            waiting += [one for name, one in value.items() if name not in ("const", "enum")]
        elif isinstance(value, list):
            waiting += value


def _types(schema: dict[str, Any]) -> frozenset[str] | None:
    """Return the types of a schema's values, an integer as a number too; None for any."""
    kinds = schema.get("type")
    if kinds is None:
        return None
    named = frozenset(kinds if isinstance(kinds, list) else [kinds])
    return named | {"integer"} if "number" in named else named


def _types_exclude(one: dict[str, Any], other: dict[str, Any]) -> bool:
    kinds, others = _types(one), _types(other)
    return kinds is not None and others is not None and not kinds & others


def _are_objects(parts: _Parts) -> bool:
    return any(_types(part) == frozenset({"object"}) for part in parts)


def _has_members(part: dict[str, Any]) -> bool:
    return isinstance(part.get("properties"), dict)


def _required(parts: _Parts) -> frozenset[str]:
    return frozenset(name for part in parts for name in part.get("required") or ())


def _forbids(parts: _Parts, names: Collection[str]) -> bool:
    """Return whether one of the parts allows no member of one of the names."""
    closed = (
        part.get("properties") or {}
        for part in parts
        if part.get("additionalProperties") is False and "patternProperties" not in part
    )
    return any(name not in members for members in closed for name in names)


def beside_cycles(
    root: dict[str, Any], users: Sequence[tuple[dict[str, Any], Steps]]
) -> Iterator[tuple[dict[str, Any], Steps, str]]:
    """Leave out what says nothing beside a reference into a cycle, and yield what says more: the
    schema with the reference, the steps to it, and the keyword.

    `users`: the schemas of `root` that have a reference, and the steps to each. O(users * depth),
    and for each target that has such a user O(users).
    """
    references = References(root)
    places = [references.steps(user["$ref"]) for user, _ in users]
    inner: dict[Steps, set[Steps]] = {place: set() for place in places}
    for (_, steps), place in zip(users, places, strict=True):
        for length in range(len(steps)):
            if (outer := steps[:length]) in inner:
                inner[outer].add(place)
    cycles = cache(lambda place: _returns(place, inner))
    for (user, steps), place in zip(users, places, strict=True):
        beside = [name for name in user if name not in ("$ref", *DEFINITIONS)]
        if not beside or not cycles(place):
            continue
        target = references.target(user["$ref"])
        for name in beside:
            if _is_implied(name, user[name], target):
                del user[name]
            else:
                yield user, steps, name


def _returns(place: Steps, inner: Mapping[Steps, Collection[Steps]]) -> bool:
    """Return whether references lead from the schema at `place` to itself. O(references)."""
    seen, waiting = set[Steps](), [place]
    while waiting:
        for one in inner[waiting.pop()]:
            if one == place:
                return True
            if one not in seen:
                seen.add(one)
                waiting.append(one)
    return False


def _is_implied(name: str, value: Any, target: Any) -> bool:
    """Return whether a keyword beside a reference excludes no value of the reference's target."""
    if not isinstance(target, dict):
        return False
    if name == "type":
        kinds, others = _types({"type": value}), _types(target)
        return kinds is not None and others is not None and others <= kinds
    if name == "required":
        return set(value) <= set(target.get("required") or ())
    if name in ("properties", "patternProperties") and not value:
        return True
    return name not in _ABOUT_OTHERS and name in target and bool(target[name] == value)
