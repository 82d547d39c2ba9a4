"""Which configuration file a command reads, and what it says of it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from gateway.__main__ import main
from gateway.config import ConfigError
from gateway.config.config_file import CONFIG_FILE, describe, find_config_file
from gateway.levels.report import SWITCH_ON

Ask = Callable[..., str]


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file of a working folder, in a shell without any variable of ours."""
    for name in [name for name in os.environ if name.startswith("TRUNKLINE_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    written = tmp_path / CONFIG_FILE
    written.write_text('[limits]\nchoices_max = 4\n[admin]\nlisten = "127.0.0.1:0"\n')
    written.chmod(0o644)
    return written


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str]) -> Ask:
    """Return a function that runs a command and returns its output."""

    def run(*arguments: str) -> str:
        main(arguments)
        return capsys.readouterr().out

    return run


def test_the_file_of_the_working_folder_is_read_by_default(file: Path, ask: Ask) -> None:
    """A reader of a how-to writes it and types the next command."""
    rows = {row["setting"]: row for row in json.loads(ask("check-config", "--json"))}
    checks = {row["check"]: row for row in json.loads(ask("doctor", "--json"))}

    assert rows["limits.choices_max"] == {
        "setting": "limits.choices_max",
        "from": str(file),
        "value": 4,
    }
    assert str(file) in checks["configuration"]["found"]
    assert ask("check-config").endswith(f"\nconfiguration file: {file}\n")


def test_a_named_file_comes_before_the_folders(tmp_path: Path, file: Path) -> None:
    """An option before the variable, which is before the folder; an empty variable names none."""
    option, named = tmp_path / "a.toml", tmp_path / "b.toml"
    environment = {"TRUNKLINE_CONFIG": str(named)}

    assert find_config_file(option, environment, tmp_path) == option
    assert find_config_file(None, environment, tmp_path) == named
    assert find_config_file(None, {"TRUNKLINE_CONFIG": ""}, tmp_path) == file


def test_without_a_file_the_places_are_named(tmp_path: Path, file: Path, ask: Ask) -> None:
    """A reader who wrote one elsewhere sees where it would be read."""
    file.unlink()

    assert find_config_file(None, {}, tmp_path) is None
    assert "./trunkline.toml" in ask("check-config").splitlines()[-1]
    assert "./trunkline.toml" in ask("doctor")
    assert "TRUNKLINE_CONFIG" in describe(None)


def test_a_file_that_all_may_write_is_not_read_by_itself(tmp_path: Path, file: Path) -> None:
    """In /tmp any user could have a server send its events to an address of theirs. A named file is
    the operator's decision."""
    file.chmod(0o666)

    with pytest.raises(ConfigError, match=f"{file} can be changed by every user.*chmod o-w"):
        find_config_file(None, {}, tmp_path)
    assert find_config_file(file, {}, tmp_path) == file


def test_a_file_of_another_user_is_not_read_by_itself(
    tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor a link of theirs to a file of ours; root's is."""
    owner = file.stat().st_uid
    real = Path.lstat

    def lstat(path: Path) -> object:
        return SimpleNamespace(st_uid=4_321) if path == file else real(path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: owner + 1)
        if owner:
            with pytest.raises(ConfigError, match=rf"belongs to the user {owner}"):
                find_config_file(None, {}, tmp_path)
        else:
            assert find_config_file(None, {}, tmp_path) == file
    with monkeypatch.context() as patch:
        patch.setattr(Path, "lstat", lstat)
        with pytest.raises(ConfigError, match="belongs to the user 4321"):
            find_config_file(None, {}, tmp_path)


def test_a_broken_link_is_no_file(tmp_path: Path, file: Path) -> None:
    """As a missing one."""
    file.unlink()
    file.symlink_to(tmp_path / "nowhere.toml")

    assert find_config_file(None, {}, tmp_path) is None


def test_the_two_lines_for_a_disk_work_where_they_are_written(
    tmp_path: Path, file: Path, ask: Ask
) -> None:
    """The command line and the dashboard show them."""
    file.write_text(f"{file.read_text()}{SWITCH_ON}\n")
    rows = {row["setting"]: row for row in json.loads(ask("check-config", "--json"))}

    assert rows["engine.levels.disk_gib"]["value"] == 100
