"""Tables as CSV, a page at a time."""

from __future__ import annotations

import csv
import io
import re

import pytest

from tests.unit.gateway.admin_client import AdminClient


async def rows_from(client: AdminClient, path: str) -> tuple[list[dict[str, str]], str]:
    """Return the rows of a page, and the address of the next one, if it names one."""
    headers = {"Authorization": f"Bearer {client.key}"}
    url = client.gateway.admin_url + path
    async with client.gateway.session.get(url, headers=headers) as response:
        assert response.status == 200, await response.text()
        link = re.fullmatch(r'<(.+)>; rel="next"', response.headers.get("Link", ""))
        rows = list(csv.DictReader(io.StringIO(await response.text())))
        return rows, "" if link is None else link[1]


@pytest.mark.parametrize("table", ["tenants", "requests", "audit"])
async def test_each_page_of_csv_leads_to_the_next(admin: AdminClient, table: str) -> None:
    """A table that is cut without a word looks whole in a spreadsheet."""
    for name in ("eve", "fay", "gil"):
        await admin.ask("POST", "/admin/v1/tenants", {"name": name})
        await admin.gateway.ask(who="ada")
    await admin.gateway.quiet()
    whole, further = await rows_from(admin, f"/admin/v1/{table}?format=csv")
    found, path, pages = list[dict[str, str]](), f"/admin/v1/{table}?format=csv&limit=2", 0
    while path:
        page, path = await rows_from(admin, path)
        found += page
        pages += 1

    assert (further, found) == ("", whole)
    assert pages > 1
