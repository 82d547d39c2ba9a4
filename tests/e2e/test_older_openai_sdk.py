"""Older majors of OpenAI's SDK, each in a process of its own, against a whole gateway.

They know none of the caching fields, which pass as extra ones. Each lives in a folder of its own,
because only one SDK fits a process; without the folder its test is skipped.
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


@pytest.mark.parametrize("version", ["1.109.1", "2.54.0"])
async def test_an_older_sdk_works_unchanged(tmp_path: Path, version: str) -> None:
    """Applications move to a new major when they like."""
    installed = FOLDER / f"openai-{version}"
    if not installed.exists():
        pytest.skip(f"pip install --target {installed} openai=={version} brings it")
    house = House(prepared(tmp_path / "model"), tmp_path)
    await house.open()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(HERE / "older_openai.py")),
        *(f"{house.url}/v1", house.keys["ada"], house.model),
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
    first, second = (usage["prompt_tokens_details"] for usage in found["usages"])
    assert found["version"] == version
    assert found["texts"][0] == found["texts"][1]
    assert first["cache_write_tokens"] > 100
    assert second["cached_tokens"] == first["cache_write_tokens"]
    assert found["response"][0] == "incomplete"
    assert found["response"][1]
    assert found["kinds"][0] == "response.created"
    assert found["kinds"][1] in ("response.completed", "response.incomplete")
    assert (found["models"], found["error"]) == ([house.model], "model_not_found")
