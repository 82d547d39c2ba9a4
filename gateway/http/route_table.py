"""Finds what was declared for a method and a path.

Paths are written as in aiohttp: `/v1/models/{name}`, or `{target:.+}` with a pattern. It knows no
handler and no role. `middleware` has a table for each listener.
"""

from __future__ import annotations

import re
from typing import Generic, TypeVar

from aiohttp import web

T = TypeVar("T")

_PARAMETER = re.compile(r"\{(\w+)(?::([^{}]+))?\}")


def pattern_of(path: str) -> re.Pattern[str]:
    """A declared path as a pattern, with a group for each parameter. O(path)."""
    parts, end = [], 0
    for found in _PARAMETER.finditer(path):
        parts.append(re.escape(path[end : found.start()]))
        parts.append(f"(?P<{found[1]}>{found[2] or '[^{}/]+'})")
        end = found.end()
    return re.compile("".join(parts) + re.escape(path[end:]))


def canonical(path: str) -> str:
    """A declared path without the patterns of its parameters, as logs and metrics name it."""
    return _PARAMETER.sub(r"{\1}", path)


class RouteTable(Generic[T]):
    """What was declared, by method and path; more specific paths come first."""

    def __init__(self) -> None:
        self._exact: dict[str, dict[str, T]] = {}
        self._patterns: list[tuple[str, re.Pattern[str], dict[str, T]]] = []

    def add(self, method: str, path: str, value: T) -> None:
        """Declare a value. A path and method that were declared before are an error of ours."""
        if "{" not in path:
            of_path = self._exact.setdefault(path, {})
        else:
            found = [known for declared, _, known in self._patterns if declared == path]
            of_path = found[0] if found else {}
            if not found:
                self._patterns.append((path, pattern_of(path), of_path))
                self._patterns.sort(key=lambda one: one[0].index("{"), reverse=True)
        assert method not in of_path, f"{method} {path} was declared twice"
        of_path[method] = value

    def find(self, request: web.BaseRequest) -> tuple[T, dict[str, str]]:
        """(value, decoded parameters). O(1) for a path without parameters, as it was declared.

        Raises web.HTTPNotFound, and web.HTTPMethodNotAllowed with the methods that are declared.
        """
        method, url = request.method, request.rel_url
        exact = self._exact.get(url.raw_path)
        if exact is not None and method in exact:
            return exact[method], {}
        path, allowed = url.path_safe, set[str]()
        candidates = [(self._exact.get(path, {}), dict[str, str]())]
        for _, pattern, of_path in self._patterns:
            match = pattern.fullmatch(path)
            if match is not None:
                candidates.append((of_path, match.groupdict()))
        for of_path, parameters in candidates:
            if method in of_path:
                return of_path[method], {name: _decoded(v) for name, v in parameters.items()}
            allowed.update(of_path)
        if allowed:
            raise web.HTTPMethodNotAllowed(method, allowed)
        raise web.HTTPNotFound


def _decoded(parameter: str) -> str:
    """A parameter in full: `path_safe` leaves encoded slashes and per cent signs as they are."""
    return parameter.replace("%2F", "/").replace("%25", "%")
