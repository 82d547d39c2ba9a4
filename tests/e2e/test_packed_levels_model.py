"""The default model with packed copies on disk: what comes back after a restart, and how."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from engine.api import FIDELITIES, CacheGrant, Fidelity, LeaseRequest
from tests.bench.answers import ask, wait_for_level
from tests.bench.kv_texts import texts, windows
from tests.bench.packed_levels import HOUR, agreement, engine
from tests.e2e.patient_engine import wait_for_loads
from tests.e2e.real_core import real_card

pytestmark = [pytest.mark.model, pytest.mark.slow]
TOKENS, OUTPUT = 260, 8
RUNS = (TOKENS - 1) // 16


def grant_of(fidelity: Fidelity) -> CacheGrant:
    """Return the grant of a namespace of one fidelity, all promised."""
    lease = LeaseRequest(RUNS * 16, HOUR, "lease")
    return CacheGrant(fidelity.encode(), leases=(lease,), fidelity=fidelity)


def test_packed_prefixes_come_back_from_disk_and_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each in its size and its fidelity; greedy answers over near copies go on as exact ones do."""
    wait_for_loads(monkeypatch)
    card = real_card()
    tokenizer = Tokenizer.from_file(str(card.tokenizer_path))
    (prompt,) = windows(texts(None)["python topics"], tokenizer, TOKENS, 1, seed=3)
    folder = tmp_path / "levels"
    with engine(Path(card.folder), folder) as core:
        for fidelity in FIDELITIES:
            ask(core, fidelity, prompt, grant_of(fidelity), 1)
        disk = wait_for_level(core, "disk", 3 * RUNS)
        host = core.stats().levels[0]
    answers: dict[Fidelity, list[int]] = {}
    with engine(Path(card.folder), folder) as core:
        wait_for_level(core, "disk", 3 * RUNS)
        for fidelity in FIDELITIES:
            found = ask(core, fidelity, prompt, grant_of(fidelity), OUTPUT)
            assert found.loaded == {"disk": RUNS * 16}
            assert found.fidelity == fidelity
            answers[fidelity] = found.tokens

    for level in (host, disk):
        size = {one.fidelity: one.bytes / one.blocks for one in level.copies}
        assert size["near"] / size["exact"] == pytest.approx(0.54, abs=0.02)
        assert size["rough"] / size["exact"] == pytest.approx(0.33, abs=0.02)
    same, _ = agreement(answers["near"], answers["exact"])
    assert same >= OUTPUT // 2
