"""Older majors of Anthropic's SDK, each in a process of its own, against a whole gateway.

They send another header for the key and another version of the API. Each lives in a folder of its
own, because only one SDK fits a process; without the folder its test is skipped.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gateway.house import House
from tests.models import prepared

HERE = Path(__file__).parent
FOLDER = Path(sys.prefix) / "older"


@pytest.mark.parametrize("version", ["0.75.0", "1.17.0"])
async def test_an_older_sdk_works_unchanged(tmp_path: Path, version: str) -> None:
    """Applications move to a new major when they like."""
    installed = FOLDER / f"anthropic-{version}"
    if not installed.exists():
        pytest.skip(f"pip install --target {installed} anthropic=={version} brings it")
    house = House(prepared(tmp_path / "model"), tmp_path)
    await house.open()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(HERE / "older_anthropic.py")),
        *(house.url, house.keys["ada"], house.model),
        env={**os.environ, "PYTHONPATH": str(installed)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    out, errors = await process.communicate()
    await house.check_quiet()
    await house.close()
    house.discard()

    assert process.returncode == 0, errors.decode()
    found = json.loads(out)
    first, second, beta = found["usages"]
    assert found["version"] == version
    assert found["texts"][0] == found["texts"][1]
    assert first["cache_creation"]["ephemeral_1h_input_tokens"] > 100
    assert second["cache_read_input_tokens"] == first["cache_creation_input_tokens"]
    assert beta["cache_read_input_tokens"] == first["cache_creation_input_tokens"]
    assert found["counted"] == first["input_tokens"] + first["cache_creation_input_tokens"]
    assert (found["models"], found["error"]) == ([house.model], "not_found_error")
