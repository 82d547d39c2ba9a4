"""`/dashboard` on the admin listener: static files, without data and without remote resources.

The files need no authentication; the data that they request needs an administrator's key.
"""

from __future__ import annotations

from importlib import resources

from aiohttp import web

from gateway.http.middleware import Handler, Route

FILES = {
    "": ("index.html", "text/html"),
    "/app.js": ("app.js", "text/javascript"),
    "/dom.js": ("dom.js", "text/javascript"),
    "/charts.js": ("charts.js", "text/javascript"),
    "/style.css": ("style.css", "text/css"),
}
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self';"
        " connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none';"
        " frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "X-Frame-Options": "DENY",
}

_FOLDER = resources.files("gateway").joinpath("dashboard")
_BODIES = {
    path: (_FOLDER.joinpath(name).read_bytes(), kind) for path, (name, kind) in FILES.items()
}


def routes() -> tuple[Route, ...]:
    """Return one route per file; no other file of the folder can be reached."""
    return tuple(
        Route("GET", f"/dashboard{path}", _handler(body, kind), "open")
        for path, (body, kind) in _BODIES.items()
    )


def _handler(body: bytes, kind: str) -> Handler:
    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        return web.Response(body=body, content_type=kind, charset="utf-8", headers=HEADERS)

    return handle
