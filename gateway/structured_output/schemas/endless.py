"""Find the parts of a JSON Schema that no finite value satisfies: each value contains another one.

An answer under the grammar of such a part would go on to its output limit. The module misses an
endless part rather than report one that ends: types are followed where a schema has one alone.
`gateway.structured_output.schemas.keywords` calls it.
"""

from __future__ import annotations

from typing import Any

from gateway.structured_output.output_check import References, Steps, pointer_steps


def find_endless(root: dict[str, Any], *, everywhere: bool) -> Steps | None:
    """Return the steps to a reference by which a value contains itself without end.

    None if a value of `root` can be finished. `everywhere`: each part that a value may have has to
    be one that can be finished, also those that it may leave out. O(schema).
    """
    parts = _Parts(root).read()
    finished = [part for part in parts if not part.open]
    while finished:
        for user, clause in finished.pop().users:
            if clause in user.open:
                user.open.remove(clause)
                if not user.open:
                    finished.append(user)
    endless = next((part for part in (parts if everywhere else parts[:1]) if part.open), None)
    seen: set[int] = set()
    while endless is not None:  # ends at the reference that closes the cycle
        seen.add(id(endless))
        inner = endless.clauses[min(endless.open)][0]
        if id(inner) in seen:
            return (*endless.steps, "$ref")
        endless = inner
    return None


class _Part:
    """A subschema. A value of it can be finished when in each of its clauses one part can be.

    `open`: the clauses of which that is not known. `users`: the parts and clauses that it is in.
    """

    def __init__(self, steps: Steps) -> None:
        self.steps = steps
        self.clauses: list[list[_Part]] = []
        self.open: set[int] = set()
        self.users: list[tuple[_Part, int]] = []

    def needs(self, *alternatives: _Part) -> None:
        """Add a clause."""
        self.open.add(len(self.clauses))
        for one in alternatives:
            one.users.append((self, len(self.clauses)))
        self.clauses.append(list(alternatives))


class _Parts:
    """The parts of a schema that a value may have, the root first."""

    def __init__(self, root: dict[str, Any]) -> None:
        self._references = References(root)
        self._found: dict[int, _Part] = {}
        self._unread: list[tuple[dict[str, Any], _Part]] = []
        self._part(root, ())

    def read(self) -> list[_Part]:
        """Read all parts with what they need. O(schema)."""
        while self._unread:
            self._read(*self._unread.pop())
        return list(self._found.values())

    def _part(self, schema: Any, steps: Steps) -> _Part:
        """Return the part of a schema; one that is no object can always be finished."""
        part = self._found.get(id(schema))
        if part is None:
            part = self._found[id(schema)] = _Part(steps)
            if isinstance(schema, dict):
                self._unread.append((schema, part))
        return part

    def _read(self, schema: dict[str, Any], part: _Part) -> None:
        if {"const", "enum"} & schema.keys():
            return
        if isinstance(reference := schema.get("$ref"), str):
            is_pointer = reference.startswith("#/")
            steps = pointer_steps(reference) if is_pointer else (*part.steps, "$ref")
            part.needs(self._part(self._references.target(reference), steps))
        for name in ("anyOf", "oneOf"):
            if choices := self._list(schema, name, part):
                part.needs(*choices)
        for one in self._list(schema, "allOf", part):
            part.needs(one)
        kinds = schema.get("type")
        kind = kinds[0] if isinstance(kinds, list) and len(kinds) == 1 else kinds
        required, members = schema.get("required"), schema.get("properties")
        names = set(map(str, required)) if kind == "object" and isinstance(required, list) else ()
        for name, one in members.items() if isinstance(members, dict) else ():
            member = self._part(one, (*part.steps, "properties", name))
            if name in names:
                part.needs(member)
        items, least = self._list(schema, "prefixItems", part), schema.get("minItems")
        if "items" in schema:
            items.append(self._part(schema["items"], (*part.steps, "items")))
        for one in items[:least] if kind == "array" and isinstance(least, int) else ():
            part.needs(one)
        if "additionalProperties" in schema:
            self._part(schema["additionalProperties"], (*part.steps, "additionalProperties"))

    def _list(self, schema: dict[str, Any], name: str, part: _Part) -> list[_Part]:
        """Return the parts of a keyword with a list; a part behind a reference may have others."""
        listed = schema.get(name)
        found = enumerate(listed) if isinstance(listed, list) else ()
        return [self._part(one, (*part.steps, name, str(at))) for at, one in found]
