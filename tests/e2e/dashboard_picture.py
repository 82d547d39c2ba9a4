"""Draws docs/dashboard.png in chromium, in two minutes: `python -m tests.e2e.dashboard_picture`."""

from __future__ import annotations

import asyncio
import base64
import tempfile
from pathlib import Path
from typing import Any

from gateway.app import Gateway
from tests.e2e.browser import Page, open_browser
from tests.e2e.dashboard_traffic import EarlierWall, PacedRunner, make_tenants, play_a_day
from tests.models import prepared
from tests.unit.gateway.admin_client import AdminClient
from tests.unit.gateway.gateway_fixture import GatewayFixture

PICTURE = Path(__file__).parents[2] / "docs" / "dashboard.png"
WIDTH, HEIGHT = 1440, 1330


def draw(url: str, key: str) -> bytes:
    """Return the picture of the overview."""
    with tempfile.TemporaryDirectory() as profile:
        browser = open_browser(Path(profile))
        try:
            screen: dict[str, Any] = {"width": WIDTH, "height": HEIGHT, "mobile": False}
            browser.execute_cdp_cmd(
                "Emulation.setDeviceMetricsOverride", {**screen, "deviceScaleFactor": 1}
            )
            page = Page(browser, url)
            page.sign_in(key)
            page.see("could be saved")
            page.find(".plot canvas")
            taken = browser.execute_cdp_cmd("Page.captureScreenshot", {})
            return base64.b64decode(taken["data"])
        finally:
            browser.quit()


async def main() -> None:
    """Open a gateway, play a day, and write the picture."""
    with tempfile.TemporaryDirectory() as folder:
        wall, here = EarlierWall(), Path(folder)
        fixture = GatewayFixture(prepared(here / "model"), here)
        fixture.runner = PacedRunner(fixture.card.config.vocab)
        fixture.wall = wall
        wall.behind_ms = 25 * 3_600_000
        await fixture.open()
        assert isinstance(fixture.gateway, Gateway)
        admin = AdminClient(fixture)
        await make_tenants(fixture, admin)
        await play_a_day(fixture, wall, admin)
        PICTURE.write_bytes(await asyncio.to_thread(draw, fixture.admin_url, admin.key))
        await fixture.close()
        fixture.discard()


if __name__ == "__main__":
    asyncio.run(main())
