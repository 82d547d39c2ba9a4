"""`trunkline serve` before and after the server runs: the lines that it prints."""

from __future__ import annotations

from gateway.cli.serve import banner
from gateway.config import Config

URLS = ["http://127.0.0.1:8080", "http://127.0.0.1:8081"]


def test_banner_names_the_dashboard() -> None:
    """An operator opens it first, and its listener is not the clients'."""
    lines = banner("smol", URLS, Config(), None)

    assert lines[0] == "trunkline serves smol at http://127.0.0.1:8080/v1"
    assert "  dashboard:           http://127.0.0.1:8081/dashboard" in lines


def test_banner_shows_a_new_key_once() -> None:
    """Later starts have none to show."""
    first, later = (banner("smol", URLS, Config(), key) for key in ("tl-new", None))

    assert [line for line in first if line not in later] == [
        "  key of the tenant 'default' (shown once): tl-new"
    ]
