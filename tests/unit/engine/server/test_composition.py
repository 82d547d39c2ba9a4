"""What an engine has ready before anyone can reach it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.grammar.grammar import Vocabulary
from engine.model_store import prepare
from engine.server.composition import core_of_model
from engine.server.links.keeper_link import ListenSettings
from tests.models import write_folder

CONFIG = EngineConfig(device="cpu", kv_blocks=16, threads=1)


@pytest.mark.parametrize(
    ("listen", "has_read"),
    [(None, False), (ListenSettings(-1, "e0", Path("tls")), True)],
    ids=["beside its gateway", "elsewhere"],
)
def test_an_engine_elsewhere_has_read_its_tokens_before_it_listens(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    listen: ListenSettings | None,
    *,
    has_read: bool,
) -> None:
    """They are read in one piece, in which it sends no frame: gateways would take it for lost."""
    card = prepare("tiny", write_folder(tmp_path / "tiny"), tmp_path)
    read: list[Path] = []
    load = Vocabulary.load

    def note(path: Path, *more: Any) -> Vocabulary:
        read.append(path)
        return load(path, *more)

    monkeypatch.setattr(Vocabulary, "load", note)
    core, _ = core_of_model(Path(card.folder), CONFIG, listen=listen)
    core.close()

    assert bool(read) == has_read
