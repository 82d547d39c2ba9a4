"""One gateway with one engine loads no library of a fleet: each costs memory and time."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.models import write_folder
from tests.server_process import SETTINGS, serve_command, serving

pytestmark = pytest.mark.slow

LIBRARIES = ("ray", "redis", "cryptography")


@pytest.fixture(autouse=True)
def fail_on_blocking_calls() -> None:
    """Disabled here: the test waits for a process."""


async def test_a_server_that_answers_has_imported_none_of_them(tmp_path: Path) -> None:
    """In no process, also late: a library that is tried leaves its name, and fails."""
    traps, tried = tmp_path / "traps", tmp_path / "tried"
    for name in LIBRARIES:
        (traps / name).mkdir(parents=True)
        text = (
            f"open({str(tried)!r}, 'a').write('{name} ')\nraise ImportError('{name} is a trap')\n"
        )
        (traps / name / "__init__.py").write_text(text)
    (tmp_path / "t.toml").write_text(SETTINGS)
    model = write_folder(tmp_path / "tiny")
    command = serve_command(model, tmp_path / "data", tmp_path / "t.toml")
    paths = os.pathsep.join((str(traps), os.environ.get("PYTHONPATH", "")))
    with serving(command, tmp_path / "log", {**os.environ, "PYTHONPATH": paths}) as server:
        async with server.request(max_tokens=4) as (status, content):
            await content.read()
        status_at_end = server.stop()

    assert (status, status_at_end) == (200, 0)
    assert not tried.exists(), tried.read_text()
