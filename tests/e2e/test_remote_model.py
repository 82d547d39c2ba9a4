"""The default model with a sealed disk and a remote store: a prefix that has left the disk."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.leveled_engine import PROMPT_TOKENS
from tests.e2e.real_core import real_card
from tests.e2e.remote_engine import KEY_VARIABLE
from tests.e2e.test_levels_model import facts

pytestmark = [pytest.mark.model, pytest.mark.slow]


def run_engine(folder: Path, task: str, far: Path) -> subprocess.Popen[str]:
    """Start a real engine over a folder, with another one as its remote store."""
    command = [sys.executable, "-m", "tests.e2e.remote_engine"]
    command += [str(real_card().folder), str(folder), task, str(far)]
    environment = {**os.environ, KEY_VARIABLE: "ab" * 32}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def test_a_prefix_that_has_left_the_disk_is_loaded_from_the_remote_store(tmp_path: Path) -> None:
    """After a kill; sealed on the way, and bit for bit the same answer."""
    folder, far = tmp_path / "levels", tmp_path / "far"
    folder.mkdir(mode=0o700)
    with run_engine(folder, "stay", far) as first:
        said = facts(first)
        cold = next(said)
        assert next(said) == {"name": "stored"}
        first.kill()
    with run_engine(folder, "demote", far) as middle:
        (down,) = facts(middle)
    with run_engine(folder, "read", far) as second:
        warm, other = facts(second)

    assert down["records"] == PROMPT_TOKENS // 16
    assert warm["tokens"] == cold["tokens"]
    assert warm["loaded"] == {"remote": PROMPT_TOKENS - 16}
    assert warm["first_s"] < other["first_s"]
