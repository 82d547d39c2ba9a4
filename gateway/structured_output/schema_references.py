"""Find what the references of a JSON Schema name, inside the schema itself.

A reference is a JSON pointer, an anchor, or either behind the schema's own `$id`. The module knows
no grammar; `schema_keywords` and `schema_lark` call it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any, Final
from urllib.parse import unquote

MISSING: Final = object()
"""What a reference to nothing names."""


class References:
    """The parts of one schema by reference. The schema may not change."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root

    def target(self, reference: str) -> Any:
        """Return the part that a reference names, `MISSING` if there is none. O(reference), and the
        first time O(schema)."""
        base, _, fragment = reference.partition("#")
        if base and base not in (self._root.get("$id"), self._root.get("id")):
            return MISSING
        if fragment and not fragment.startswith("/"):
            return self._anchors.get(unquote(fragment), MISSING)
        at: Any = self._root
        for step in unquote(fragment).split("/")[1:]:
            name = step.replace("~1", "/").replace("~0", "~")
            if isinstance(at, list) and name.isdecimal() and int(name) < len(at):
                at = at[int(name)]
            elif isinstance(at, dict) and name in at:
                at = at[name]
            else:
                return MISSING
        return at

    @cached_property
    def has_resources(self) -> bool:
        """Return whether a part has an identifier of its own, by which it may be named."""
        inner = (one for one in _objects(self._root) if one is not self._root)
        return any(isinstance(one.get("$id"), str) for one in inner)

    @cached_property
    def _anchors(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for one in _objects(self._root):
            if isinstance(name := one.get("$anchor"), str):
                found.setdefault(name, one)
        return found


def _objects(root: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield all objects inside a JSON value, and itself. O(values)."""
    waiting: list[Any] = [root]
    while waiting:
        value = waiting.pop()
        if isinstance(value, Mapping):
            yield value
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value
