"""Fixtures: commands on a data directory of the test's own, without a configuration."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gateway.__main__ import main
from gateway.cli.database import open_store
from gateway.config import Config
from tests.unit.gateway.cli.command_output import Run


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the data directory that commands use; a file overrides it to configure them."""
    monkeypatch.setenv("TRUNKLINE_CONFIG", os.devnull)
    monkeypatch.delenv("TRUNKLINE_MODEL", raising=False)
    monkeypatch.setenv("TRUNKLINE_DATA_DIR", str(tmp_path / "data"))
    return tmp_path / "data"


@pytest.fixture
def database(data: Path) -> None:
    """A database, as the first start makes it."""
    open_store(Config(data_dir=str(data)))[0].close()


@pytest.fixture
def run(data: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """Return a function that runs a command: (status, stdout, stderr)."""

    def run(*arguments: str) -> tuple[int, str, str]:
        status = main(arguments)
        out, err = capsys.readouterr()
        return status, out, err

    return run
