"""A tiny model with levels on a device: the same tokens wherever its prefix comes from."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from engine.kv.format import deal_groups
from engine.model_store import ModelCard
from tests.e2e.device_levels_engine import PROMPT_TOKENS
from tests.e2e.test_levels_model import facts
from tests.models import prepared, prepared_with_windows

pytestmark = [pytest.mark.slow]
LOADED = PROMPT_TOKENS // 16 * 16


def run_engine(card: ModelCard, folder: Path, task: str, device: str) -> subprocess.Popen[str]:
    """Start an engine over this folder, with a pool of 96 blocks for each KV group."""
    blocks = 96 * len(deal_groups([layer.window for layer in card.config.layers]))
    command = [sys.executable, "-m", "tests.e2e.device_levels_engine"]
    command += [card.folder, str(folder), task, device, str(blocks)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("has_windows", [False, True])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_answers_are_the_same_wherever_the_prefix_comes_from(
    tmp_path: Path, device: str, *, has_windows: bool
) -> None:
    """From the device, host memory, and from disk after the engine was killed. A packed prefix
    answers the same from host memory and from disk.
    """
    model = tmp_path / "model"
    model.mkdir()
    folder = tmp_path / "levels"
    folder.mkdir(mode=0o700)
    card = prepared_with_windows(model, 24, context=512) if has_windows else prepared(model)
    with run_engine(card, folder, "stay", device) as first:
        found = []
        for fact in facts(first):
            if fact["name"] == "stored":
                break
            found.append(fact)
        first.kill()
    with run_engine(card, folder, "read", device) as second:
        found += list(facts(second))
    said = {fact["name"]: fact for fact in found}

    exact = said["device, exact"]
    assert exact["cached"] == LOADED
    assert said["computed, exact"]["cached"] == 0
    for level in ("host", "disk"):
        for fidelity in ("exact", "near"):
            fact = said[f"{level}, {fidelity}"]
            assert fact["loaded"] == {level: LOADED}, fact
        assert said[f"{level}, exact"]["tokens"] == exact["tokens"], level
    assert said["host, near"]["tokens"] == said["disk, near"]["tokens"]
