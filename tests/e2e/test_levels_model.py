"""The default model with a disk: an engine that is killed, and the next one on the same folder."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.e2e.leveled_engine import PROMPT_TOKENS
from tests.e2e.real_core import real_card

pytestmark = [pytest.mark.model, pytest.mark.slow]


def run_engine(folder: Path, task: str, kv_dtype: str, *far: str) -> subprocess.Popen[str]:
    """Start a real engine over this folder."""
    command = [sys.executable, "-m", "tests.e2e.leveled_engine"]
    command += [str(real_card().folder), str(folder), task, kv_dtype, *far]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def facts(process: subprocess.Popen[str]) -> Iterator[dict[str, Any]]:
    """Yield what the engine says."""
    assert process.stdout is not None
    for line in process.stdout:
        yield msgspec.json.decode(line)


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_a_killed_engines_prefix_is_loaded_from_disk(tmp_path: Path, kv_dtype: str) -> None:
    """The answer equals the cold one, and takes a fraction of its work. For a pool of another
    format what is there is a miss, even under the same namespace: nothing that it might load."""
    tmp_path.chmod(0o700)
    with run_engine(tmp_path, "stay", kv_dtype) as first:
        said = facts(first)
        cold = next(said)
        assert next(said) == {"name": "stored"}
        first.kill()
    with run_engine(tmp_path, "read", kv_dtype) as second:
        warm, other = facts(second)
    with run_engine(tmp_path, "miss", "int8" if kv_dtype == "auto" else "auto") as third:
        (foreign,) = facts(third)

    assert warm["tokens"] == cold["tokens"]
    assert warm["loaded"] == {"disk": PROMPT_TOKENS - 16}
    assert other["cached"] == 0
    assert warm["first_s"] < cold["first_s"] / 3
    assert (foreign["cached"], len(foreign["tokens"])) == (0, len(cold["tokens"]))
    assert not foreign["not_loaded"]
