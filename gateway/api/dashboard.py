"""`/dashboard` on both listeners: static files, without data and without remote resources.

The files need no authentication; the data that they request needs a key. The admin listener serves
every page, the public listener a tenant's own page and what it loads. This module knows no gateway;
`gateway.app` gives its routes to the listeners.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import PurePosixPath

from aiohttp import web

from gateway.http.route_table import Handler, Route

KINDS = {
    ".html": "text/html",
    ".js": "text/javascript",
    ".css": "text/css",
    ".svg": "image/svg+xml",
}
"""Content types by suffix; a file with another suffix is not served."""
ADMIN_PAGE, OWN_PAGE = "index.html", "own.html"
PUBLIC_FILES = ("favicon.svg", "own.js", "style.css")
PUBLIC_FOLDERS = ("parts/", "vendor/")
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self';"
        " connect-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none';"
        " frame-ancestors 'none'"
    ),
    "Cache-Control": "no-cache",
    "Referrer-Policy": "no-referrer",
    "X-Frame-Options": "DENY",
}
"""A browser keeps the files and asks by their digest whether they have changed."""


def admin_routes() -> tuple[Route, ...]:
    """Return one route per file, and the redirection of `/`; no other file can be reached."""
    files = {name: body for name, body in _FILES.items() if name != OWN_PAGE}

    async def to_dashboard(request: web.BaseRequest) -> web.StreamResponse:
        return web.Response(status=302, headers={"Location": "/dashboard"})

    return (Route("GET", "/", to_dashboard, "open"), *_routes(files, ADMIN_PAGE))


def public_routes() -> tuple[Route, ...]:
    """Return the routes of a tenant's own page; no administrator's page can be reached."""
    files = {
        name: body
        for name, body in _FILES.items()
        if name in (OWN_PAGE, *PUBLIC_FILES) or name.startswith(PUBLIC_FOLDERS)
    }
    return _routes(files, OWN_PAGE)


def _files() -> Iterator[tuple[str, bytes]]:
    """Yield the path below the folder, and the content, of each file that browsers load."""

    def below(folder: Traversable, above: str) -> Iterator[tuple[str, bytes]]:
        for entry in sorted(folder.iterdir(), key=lambda one: one.name):
            if entry.is_dir():
                yield from below(entry, f"{above}{entry.name}/")
            elif PurePosixPath(entry.name).suffix in KINDS:
                yield f"{above}{entry.name}", entry.read_bytes()

    return below(resources.files("gateway").joinpath("dashboard"), "")


_FILES = dict(_files())
"""Read once, before the event loop runs."""


def _routes(files: dict[str, bytes], page: str) -> tuple[Route, ...]:
    return tuple(
        Route(
            "GET",
            "/dashboard" if name == page else f"/dashboard/{name}",
            _handler(body, KINDS[PurePosixPath(name).suffix]),
            "open",
        )
        for name, body in files.items()
    )


def _handler(body: bytes, kind: str) -> Handler:
    tag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
    headers = {**HEADERS, "ETag": tag}

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        if request.headers.get("If-None-Match") == tag:
            return web.Response(status=304, headers=headers)
        return web.Response(body=body, content_type=kind, charset="utf-8", headers=headers)

    return handle
