"""The examples work against a gateway over a fake runner."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import sys
from pathlib import Path

import msgspec
import pytest

from engine.model_store import DEFAULT_MODEL
from gateway.config import Config, ModelSettings, effective, load_config
from tests.unit.gateway.gateway_fixture import GatewayFixture

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def unopened_gateway(unopened_gateway: GatewayFixture) -> GatewayFixture:
    """Configure the default model's name and a key file."""
    settings = ModelSettings(aliases=(DEFAULT_MODEL,))
    unopened_gateway.config = msgspec.structs.replace(unopened_gateway.config, model=settings)
    return unopened_gateway


async def output(gateway: GatewayFixture, folder: Path, *command: str) -> str:
    """Run an example, which must succeed; return its output."""
    key_file = folder / "default.key"
    await asyncio.to_thread(key_file.write_text, gateway.keys["ada"] + "\n")
    process = await asyncio.create_subprocess_exec(
        *command,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={
            **os.environ,
            "TRUNKLINE_URL": f"{gateway.url}/v1",
            "TRUNKLINE_KEY_FILE": str(key_file),
            "PYTHONIOENCODING": "utf-8:backslashreplace",
        },
    )
    async with asyncio.timeout(60):
        out, err = await process.communicate()
    assert process.returncode == 0, (out + err).decode(errors="replace")
    return out.decode(errors="replace")


@pytest.mark.parametrize("path", sorted(EXAMPLES.iterdir()), ids=lambda path: path.name)
def test_examples_fit_a_screen(path: Path) -> None:
    assert len(path.read_text().splitlines()) < 60


async def test_sdk_conversation_reuses_its_first_turn(
    gateway: GatewayFixture, tmp_path: Path
) -> None:
    """The second turn's cached tokens cover the first prompt and most of its response."""
    text = await output(gateway, tmp_path, sys.executable, str(EXAMPLES / "chat.py"))
    counts = [
        tuple(map(int, found)) for found in re.findall(r"\[(\d+) tokens, (\d+) of them", text)
    ]

    (first, cold), (second, cached) = counts
    assert cold == 0
    assert first <= cached < second


@pytest.mark.slow
async def test_second_call_reads_what_the_first_wrote(
    gateway: GatewayFixture, tmp_path: Path
) -> None:
    """Anthropic's counts: as many tokens read as written."""
    text = await output(gateway, tmp_path, sys.executable, str(EXAMPLES / "anthropic_cache.py"))
    counts = [tuple(map(int, found)) for found in re.findall(r"\[(\d+) written, (\d+) read", text)]

    (written, nothing), (again, read) = counts
    assert (nothing, again) == (0, 0)
    assert read == written > 0


async def test_cached_content_is_used_without_being_sent(
    gateway: GatewayFixture, tmp_path: Path
) -> None:
    """Both responses count it as cached; it is deleted afterwards."""
    file = str(EXAMPLES / "gemini_cached_content.py")
    text = await output(gateway, tmp_path, sys.executable, "-W", "ignore", file)
    cached = [int(found) for found in re.findall(r"tokens, (\d+) of them cached", text)]

    assert len(cached) == 2
    assert min(cached) > 0
    assert gateway.store.query("select count(content) from cached_contents") == [(0,)]


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not here")
async def test_curl_lines_succeed(gateway: GatewayFixture, tmp_path: Path) -> None:
    """Four calls: models, a response, a stream to its end, two continuations."""
    text = await output(gateway, tmp_path, "sh", str(EXAMPLES / "curl.sh"))

    assert text.count("\n# ") == 3
    assert f'"{DEFAULT_MODEL}"' in text
    assert '"chat.completion"' in text
    assert "data: [DONE]" in text
    assert text.count('"index":1') == 1


def test_example_configuration_is_valid() -> None:
    file = EXAMPLES / "trunkline.toml"
    config, origin = load_config(file, {}, {})
    set_here = [path for path, _, source in effective(config, origin) if source == str(file)]

    assert len(set_here) > 10
    assert config != Config()
