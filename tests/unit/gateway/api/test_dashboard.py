"""The dashboard's files: which are served where, under which policy, and whose they are."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest

from gateway.api.dashboard import admin_routes, public_routes
from tests.unit.gateway.gateway_fixture import GatewayFixture

FOLDER = Path(__file__).parents[4] / "gateway" / "dashboard"
IMPORT = re.compile(r'(?:from|import) "([^"]+)"')
FETCHED = re.compile(r'(?:src|href|from|import)[ =(]*"(https?:)?//')


def test_every_module_that_is_imported_is_served() -> None:
    """A page that imports a file of another listener would stay blank."""
    for routes, first in ((admin_routes(), "app.js"), (public_routes(), "own.js")):
        served = {route.path.removeprefix("/dashboard/") for route in routes}
        wanted, seen = [first], set[str]()
        while wanted:
            name = wanted.pop()
            if name not in seen:
                seen.add(name)
                above = Path(name).parent
                found = IMPORT.findall((FOLDER / name).read_text())
                wanted += [
                    (FOLDER / above / one).resolve().relative_to(FOLDER.resolve()).as_posix()
                    for one in found
                ]

        assert seen <= served
        assert len(seen) > 10


def test_every_export_is_imported() -> None:
    """What no other file uses is private to its own, or dead."""
    own = [path for path in FOLDER.rglob("*.js") if path.parent.name != "vendor"]
    texts = {path: path.read_text() for path in own}
    exported = re.compile(r"^export (?:async )?(?:const|function|let) (\w+)", re.MULTILINE)

    unused = [
        f"{path.name}: {name}"
        for path, text in texts.items()
        for name in exported.findall(text)
        if not any(re.search(rf"\b{name}\b", other) for one, other in texts.items() if one != path)
    ]
    assert unused == []


def test_public_listener_serves_no_administrators_page() -> None:
    """A tenant's page has neither the forms nor the paths of the admin API."""
    paths = {route.path for route in public_routes()}

    assert "/dashboard/own.js" in paths
    assert not any("/pages/" in path or path.endswith("/app.js") for path in paths)


def test_own_files_name_no_other_host() -> None:
    """Every address in them is of the page's own origin."""
    files = [path for path in FOLDER.rglob("*") if path.suffix in (".js", ".html", ".css")]
    own = [path for path in files if path.parent.name != "vendor"]

    assert len(own) > 20
    assert [path.name for path in own if FETCHED.search(path.read_text())] == []


def test_libraries_are_the_ones_that_the_table_names() -> None:
    """A changed file needs a changed digest, which a reviewer sees."""
    table = (FOLDER / "vendor" / "README.md").read_text()
    rows = re.findall(r"^\| `([^`]+)` \| (\w+) .*`([0-9a-f]{64})` \|$", table, re.MULTILINE)
    digests = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in (FOLDER / "vendor").iterdir()
        if path.suffix in (".js", ".css")
    }

    assert {name: digest for name, _, digest in rows} == digests
    assert all((FOLDER / "vendor" / f"{package}.LICENSE").is_file() for _, package, _ in rows)


@pytest.mark.parametrize("where", ["admin", "public"])
async def test_files_have_a_policy_and_are_asked_for_once(
    gateway: GatewayFixture, where: str
) -> None:
    """Scripts of this origin only; a file that has not changed is not sent again."""
    url = (gateway.admin_url if where == "admin" else gateway.url) + "/dashboard"
    async with gateway.session.get(url) as first:
        page, tag, policy = await first.text(), first.headers["ETag"], dict(first.headers)
    async with gateway.session.get(url, headers={"If-None-Match": tag}) as second:
        status, body = second.status, await second.read()

    assert ("app.js" in page, "own.js" in page) == (where == "admin", where == "public")
    assert "script-src 'self'; style-src 'self'" in policy["Content-Security-Policy"]
    assert "unsafe" not in policy["Content-Security-Policy"]
    assert policy["Cache-Control"] == "no-cache"
    assert (status, body) == (304, b"")


async def test_the_tenants_page_can_be_turned_off(unopened_gateway: GatewayFixture) -> None:
    """The path is then one that the listener does not have; the administrator's page stays."""
    gateway = unopened_gateway
    gateway.set_server(dashboard=False)
    await gateway.open()
    try:
        statuses = []
        for url in (gateway.url, gateway.admin_url):
            async with gateway.session.get(f"{url}/dashboard") as found:
                statuses.append(found.status)
    finally:
        await gateway.close()

    assert statuses == [404, 200]


async def test_admin_listener_leads_to_the_dashboard(gateway: GatewayFixture) -> None:
    """`/` is what an operator types."""
    async with gateway.session.get(f"{gateway.admin_url}/", allow_redirects=False) as found:
        status, location = found.status, found.headers["Location"]

    assert (status, location) == (302, "/dashboard")
