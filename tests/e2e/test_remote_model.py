"""The default model with a sealed disk and a remote store: a prefix that has left the disk."""

from __future__ import annotations

import os
import time
from contextlib import closing
from pathlib import Path

import pytest

from engine.storage.folder import wait_for_lock
from engine.storage.index.index import RecordIndex
from engine.storage.index.index_file import INDEX_NAME
from engine.storage.index.remote_rows import RemoteRows
from engine.storage.sealing.unlocking import SealSettings, unlock
from tests.e2e.leveled_engine import FAR_PROMPT_TOKENS, KEY_VARIABLE
from tests.e2e.test_levels_model import facts, run_engine

pytestmark = [pytest.mark.model, pytest.mark.slow]


def demote_all(folder: Path) -> int:
    """Give up the place of each record of a sealed store that has an object; return how many."""
    with (
        closing(wait_for_lock(folder, 60.0, time.sleep)),
        closing(unlock(folder, SealSettings(key_env=KEY_VARIABLE), os.environ)) as seals,
        closing(RecordIndex(folder / INDEX_NAME, may_make=False, seals=seals)) as index,
    ):
        rows = RemoteRows(index.file)
        there = [row.record_id for row in index.rows() if rows.name_of(row.record_id)]
        with index.file.change():
            for record_id in there:
                rows.demote(record_id)
    return len(there)


def test_a_prefix_that_has_left_the_disk_is_loaded_from_the_remote_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a kill; sealed on the way, and bit for bit the same answer."""
    monkeypatch.setenv(KEY_VARIABLE, "ab" * 32)
    folder, far = tmp_path / "levels", str(tmp_path / "far")
    folder.mkdir(mode=0o700)
    with run_engine(folder, "stay", "auto", far) as first:
        said = facts(first)
        cold = next(said)
        assert next(said) == {"name": "stored"}
        first.kill()
    demoted = demote_all(folder)
    with run_engine(folder, "read", "auto", far) as second:
        warm, _ = facts(second)

    assert demoted == FAR_PROMPT_TOKENS // 16
    assert warm["tokens"] == cold["tokens"]
    assert warm["loaded"] == {"remote": FAR_PROMPT_TOKENS - 16}
    assert warm["first_s"] < cold["first_s"]
