"""Routes and their table: finds the route of a method and a path.

Paths use aiohttp's syntax: `/v1/models/{name}`, or `{target:.+}` with a pattern. A route also says
what the OpenAPI document tells of it, so that nothing is declared twice. `gateway.http.middleware`
builds a table for each listener.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Awaitable, Callable, Container
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from aiohttp import web

from gateway.dialects.families import PLAIN
from gateway.dialects.protocol import ErrorShape

T = TypeVar("T")
Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]
Role = Literal[
    "open",
    "inference",
    "usage",
    "cache",
    "admin",
    "admin:read",
    "admin:tenants",
    "admin:money",
    "admin:erase",
]
"""What a route requires of a key: a tenant's scope, an administrator's (`admin`: any of them), or
`open` for no key."""
INFERENCE: Role = "inference"
JSON, SSE = "application/json", "text/event-stream"


@dataclass(frozen=True, slots=True)
class Route:
    """A declared route. Undeclared paths give 404; the role `open` needs no key.

    The rest is for the OpenAPI document: `summary` ("" leaves the route out), `body` and `answer`
    (the structs of the request and of a success; None for no body, and for an answer without a
    struct), `query` (the names of its parameters), `content` (types of a success) and `headers`
    (those that it may have beside every request's).
    """

    method: str
    path: str
    handler: Handler
    role: Role
    shape: ErrorShape = PLAIN
    summary: str = ""
    body: type | None = None
    answer: type | None = None
    query: tuple[str, ...] = ()
    status: int = 200
    content: tuple[str, ...] = (JSON,)
    headers: tuple[str, ...] = ()
    family: str = ""
    """Of the errors, where `shape` is that of the client's family; "" for the shape's own."""


_STEPS_MAX = 12
"""Most steps of a path for which a similar one is sought."""
_CLOSE_CHARS_MAX = 48
"""Longest path for which a nearly equal one is sought."""
_CLOSE_MIN, _STEP_CLOSE_MIN = 0.8, 0.5
"""Part of the characters that nearly equal paths have in common, and that their one different step
has."""

_PARAMETER = re.compile(r"\{(\w+)(?::([^{}]+))?\}")


def pattern_of(path: str) -> re.Pattern[str]:
    """Compile a declared path to a pattern with a group for each parameter. O(length)."""
    parts, end = [], 0
    for found in _PARAMETER.finditer(path):
        parts.append(re.escape(path[end : found.start()]))
        parts.append(f"(?P<{found[1]}>{found[2] or '[^{}/]+'})")
        end = found.end()
    return re.compile("".join(parts) + re.escape(path[end:]))


def parameters_of(path: str) -> list[tuple[str, str]]:
    """Return the parameters of a declared path: their names and patterns, "" for none."""
    return _PARAMETER.findall(path)


def canonical(path: str) -> str:
    """Return a declared path without its parameters' patterns, as logs and metrics show it."""
    return _PARAMETER.sub(r"{\1}", path)


class PathNotFound(web.HTTPNotFound):
    """No route has the path. `similar`: a declared path that it ends with, `close`: one that it
    nearly is, or begins; "" for none."""

    def __init__(self, similar: str = "", close: str = "") -> None:
        super().__init__()
        self.similar, self.close = similar, close


class RouteTable(Generic[T]):
    """Declared values by method and path; paths with a longer fixed prefix match first.

    A slash too many, which a base URL may end with, changes no path. Declared paths end without.
    """

    def __init__(self) -> None:
        self._exact: dict[str, dict[str, T]] = {}
        self._patterns: list[tuple[str, re.Pattern[str], dict[str, T]]] = []

    def add(self, method: str, path: str, value: T) -> None:
        """Declare a value for a method and path; each pair may be declared once."""
        assert tidy(path) == path, f"{path} has a slash too many"
        if "{" not in path:
            by_method = self._exact.setdefault(path, {})
        else:
            found = [known for declared, _, known in self._patterns if declared == path]
            by_method = found[0] if found else {}
            if not found:
                self._patterns.append((path, pattern_of(path), by_method))
                self._patterns.sort(key=lambda entry: entry[0].index("{"), reverse=True)
        assert method not in by_method, f"{method} {path} was declared twice"
        by_method[method] = value

    def find(self, request: web.BaseRequest) -> tuple[T, dict[str, str]]:
        """Return (value, decoded parameters). HEAD finds what GET finds, unless it is declared.

        Cost: O(1) for a path without parameters, else O(patterns). Raises PathNotFound, and
        web.HTTPMethodNotAllowed with the methods that the path takes.
        """
        method, url = request.method, request.rel_url
        exact = self._exact.get(url.raw_path)
        if exact is not None and (found := _method_for(method, exact)) is not None:
            return exact[found], {}
        path, allowed = tidy(url.path_safe), set[str]()
        for by_method, parameters in self._matches(path):
            if (found := _method_for(method, by_method)) is not None:
                return by_method[found], {name: _decoded(v) for name, v in parameters.items()}
            allowed.update(by_method)
        if "GET" in allowed:
            allowed.add("HEAD")
        if allowed:
            raise web.HTTPMethodNotAllowed(method, allowed)
        raise PathNotFound(self._similar(path), self._close(path))

    def _matches(self, path: str) -> list[tuple[dict[str, T], dict[str, str]]]:
        """Return what is declared for a path, by method, and the path's parameters."""
        found = [(self._exact[path], dict[str, str]())] if path in self._exact else []
        for _, pattern, by_method in self._patterns:
            match = pattern.fullmatch(path)
            if match is not None:
                found.append((by_method, match.groupdict()))
        return found

    def _similar(self, path: str) -> str:
        """Return the declared path that the given one ends with, behind what a wrong base URL adds,
        or to which it lacks the version; "" for none."""
        steps = path.split("/")[1 : _STEPS_MAX + 1]
        shorter = ("/" + "/".join(steps[at:]) for at in range(1, len(steps)))
        return next(filter(self._matches, (*shorter, f"/v1{path}")), "")

    def _close(self, path: str) -> str:
        """Return the declared path that is the given one but for the case and one step that is
        nearly equal, or the only one that begins with it; "" for none. A parameter is what the
        given path has there. O(declared paths): strangers choose the path."""
        steps = path.split("/")
        if len(path) > _CLOSE_CHARS_MAX:
            return ""
        declared = [*self._exact, *(canonical(path) for path, _, _ in self._patterns)]
        longer = [one for one in declared if one.startswith(f"{path}/") and "{" not in one]
        near: dict[str, str] = {}
        for one in declared:
            names = one.split("/")
            if len(names) != len(steps):
                continue
            pairs = list(zip(names, steps, strict=True))
            pairs = [(step if name[:1] == "{" else name, step) for name, step in pairs]
            slips = [(a, b.lower()) for a, b in pairs if a != b and a != b.lower()]
            if not slips or (len(slips) == 1 and _share(*slips[0]) >= _STEP_CLOSE_MIN):
                known = "/".join(name for name, _ in pairs)
                near[known.lower()] = known
        close = difflib.get_close_matches(path.lower(), near, n=1, cutoff=_CLOSE_MIN)
        if close and self._matches(near[close[0]]):
            return near[close[0]]
        return longer[0] if len(longer) == 1 else ""


def tidy(path: str) -> str:
    """Return a path without empty steps: with one slash before each step, and none at the end."""
    return "/" + "/".join(filter(None, path.split("/")))


def _share(one: str, other: str) -> float:
    """Return the part of their characters that two texts have in common, in order."""
    return difflib.SequenceMatcher(None, one, other).ratio()


def _method_for(method: str, declared: Container[str]) -> str | None:
    """Return the declared method that answers a request's method; None, if there is none."""
    if method in declared:
        return method
    return "GET" if method == "HEAD" and "GET" in declared else None


def _decoded(parameter: str) -> str:
    """Decode the slashes and per cent signs that `URL.path_safe` leaves encoded."""
    return parameter.replace("%2F", "/").replace("%25", "%")
