"""Installs older majors of the SDKs, each in a separate folder: a process imports only one.

As a program (`make older`) it installs missing versions; a test of a version that is not installed
is skipped. `run_script` runs a script with one version against a gateway.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.unit.gateway.gateway_fixture import GatewayFixture

HERE = Path(__file__).parent
FOLDER = Path(sys.prefix) / "older"
VERSIONS = {
    "anthropic": ("0.75.0", "1.17.0"),
    "google-genai": ("1.75.0", "2.34.0"),
    "openai": ("1.109.1", "2.54.0"),
}


async def run_script(
    script: str, package: str, version: str, gateway: GatewayFixture
) -> dict[str, Any]:
    """Run a script with URL, key and model; return the JSON object that it printed."""
    installed = FOLDER / f"{package}-{version}"
    if not installed.exists():
        pytest.skip(f"{package} {version} is not installed: make older")
    await gateway.open()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(HERE / script), gateway.url, gateway.keys["ada"], gateway.model),
        env={**os.environ, "PYTHONPATH": str(installed)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    out, errors = await process.communicate()
    await gateway.check_quiet()
    await gateway.close()
    assert process.returncode == 0, errors.decode()
    found: dict[str, Any] = json.loads(out)
    assert found["version"] == version
    return found


def install(package: str, version: str) -> None:
    """Install one version completely or not at all."""
    target, unfinished = FOLDER / f"{package}-{version}", FOLDER / f"{package}-{version}.part"
    if target.exists():
        return
    shutil.rmtree(unfinished, ignore_errors=True)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(unfinished)]
    subprocess.run([*pip, f"{package}=={version}"], check=True)
    unfinished.rename(target)


if __name__ == "__main__":
    for name, versions in VERSIONS.items():
        for one in versions:
            install(name, one)
