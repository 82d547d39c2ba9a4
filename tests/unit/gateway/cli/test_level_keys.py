"""`trunkline levels` on a sealed disk: the master key is made, used and replaced."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.storage.remote.address import open_remote
from engine.storage.remote.objects import check_proof
from engine.storage.sealing.master_key import MasterKey, make_key_file, read_key_file
from engine.storage.sealing.seals import KEYS_NAME
from engine.storage.sealing.unlocking import shared_proof
from gateway.__main__ import main
from tests.tables import each_row
from tests.unit.engine.storage.local_storage import LocalRig
from tests.unit.engine.storage.storage_rig import A, content_of
from tests.unit.gateway.cli.command_output import Run, data_of, error_line

RUNS = ((1, 5, 6, 7), (2, 5, 6, 7), (3, 5, 6, 7))

PORTS = '[server]\nlisten = "127.0.0.1:0"\n[admin]\nlisten = "127.0.0.1:0"\n'
"""Free ones: the usual ones are taken where a server runs."""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the path of a configuration file, in use, whose disk is sealed."""
    file = tmp_path / "trunkline.toml"
    file.write_text(
        f'data_dir = "{tmp_path / "data"}"\n{PORTS}'
        f'[engine.levels]\ndisk_gib = 1\nseal = true\nkey_file = "{tmp_path / "key"}"\n'
    )
    for name in ("TRUNKLINE_DATA_DIR", "TRUNKLINE_MODEL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TRUNKLINE_CONFIG", str(file))
    return file


@pytest.fixture
def data(config: Path) -> Path:
    """The configuration's data directory."""
    return config.with_name("data")


def fill(folder: Path, master: MasterKey) -> LocalRig:
    """Make a sealed store with three records; return it, closed."""
    folder.parent.mkdir()
    rig = LocalRig(folder, master=master)
    for tokens in RUNS:
        rig.store(A, tokens)
    rig.local.close()
    return rig


def test_a_key_is_made_where_the_settings_say(run: Run, tmp_path: Path) -> None:
    """Or in another file; never over one that is there, and never shown."""
    made = data_of(run, "levels", "new-key")
    other = data_of(run, "levels", "new-key", str(tmp_path / "other"))
    again = error_line(run, "levels", "new-key")

    key = read_key_file(tmp_path / "key")
    assert made == {"file": str(tmp_path / "key"), "fingerprint": key.fingerprint}
    assert other["file"] == str(tmp_path / "other")
    assert "exists; expected a new file" in again
    _, out, _ = run("levels", "new-key", str(tmp_path / "third"))
    assert "seal = true" in out
    assert read_key_file(tmp_path / "third").secret.hex() not in out


def test_a_sealed_store_is_verified_and_rebuilt_with_its_key(run: Run, tmp_path: Path) -> None:
    """And with no other."""
    folder = tmp_path / "data" / "levels"
    rig = fill(folder, make_key_file(tmp_path / "key"))
    assert data_of(run, "levels", "verify")["records"] == 3
    (folder / "index.db").unlink()
    assert data_of(run, "levels", "rebuild")["records"] == 3
    (tmp_path / "key").unlink()
    missing = error_line(run, "levels", "verify")
    make_key_file(tmp_path / "key")
    wrong = error_line(run, "levels", "rebuild")

    assert "`trunkline levels new-key` makes one" in missing
    assert "does not open" in wrong
    rig.start()
    assert rig.fetch(A, rig.found(A, RUNS[0])) == [content_of(A, RUNS[0])]
    rig.close()


def test_a_master_key_is_replaced(run: Run, config: Path, tmp_path: Path) -> None:
    """The settings name both until it is done."""
    former = make_key_file(tmp_path / "former")
    rig = fill(tmp_path / "data" / "levels", former)
    data_of(run, "levels", "new-key")
    unset = error_line(run, "levels", "rewrap", status=2)
    text = config.read_text()
    config.write_text(f'{text}key_file_before = "{tmp_path / "former"}"\n')
    found = data_of(run, "levels", "rewrap")
    config.write_text(text)

    assert "engine.levels.key_file_before is not set" in unset
    assert found == {"folder": str(tmp_path / "data" / "levels"), "keys": 1}
    assert data_of(run, "levels", "verify")["records"] == 3
    assert (tmp_path / "data" / "levels" / KEYS_NAME).exists()
    rig.arena.close()


@each_row(
    ("lines", "told"),
    [
        ("seal = true\n", "engine.levels.seal: true with neither of engine.levels.key_file"),
        ('seal = true\nkey_file = "a"\nkey_env = "B"\n', "true with both of"),
        ('seal = true\nkey_env = "no name"\n', "engine.levels.key_env: 'no name'; expected"),
        ('seal = true\nkey_env = "TRUNKLINE_NO_KEY"\n', "has no variable TRUNKLINE_NO_KEY"),
        ('seal = true\nkey_file = "/nowhere/key"\n', "engine.levels.key_file: the key file"),
        (
            'remote = { url = "s3://b" }\n',
            "engine.levels.remote.url: set without engine.levels.seal",
        ),
        (
            'seal = true\nkey_env = "A"\nremote = { url = "http://b" }\n',
            "engine.levels.remote.url: scheme 'http'; expected one of file, s3, gs, az",
        ),
        (
            "remote = { shared = true }\n",
            "engine.levels.remote.shared: true without engine.levels.remote.url",
        ),
        ('remote = { url = "s3://b", gib = inf }\n', "expected a finite number"),
        ('remote = { url = "s3://b", timeout_ms = 0 }\n', "engine.levels.remote.timeout_ms"),
        ('remote = { bucket = "b" }\n', "bucket"),
    ],
)
def test_a_server_does_not_start_without_its_key(
    config: Path, capsys: pytest.CaptureFixture[str], lines: str, told: str
) -> None:
    """The message names the setting and the way out; nothing plain is written meanwhile."""
    data = config.parent / "data"
    config.write_text(f'data_dir = "{data}"\n{PORTS}[engine.levels]\ndisk_gib = 1\n{lines}')

    assert main(["serve"]) == 2
    assert told in capsys.readouterr().err
    assert not data.exists() or not any(data.glob("levels/*"))


def test_doctor_names_the_key(run: Run, config: Path, tmp_path: Path) -> None:
    """By its fingerprint; a key in the folder of the copies protects nothing."""
    key = make_key_file(tmp_path / "key")
    checks = doctor(run)
    (tmp_path / "data" / "levels").mkdir(parents=True, mode=0o700)
    (tmp_path / "key").rename(tmp_path / "data" / "levels" / "key")
    text = config.read_text().replace(f'"{tmp_path / "key"}"', f'"{tmp_path}/data/levels/key"')
    config.write_text(text)
    beside = doctor(run)

    assert checks["disk level seal"]["ok"]
    assert key.fingerprint in checks["disk level seal"]["found"]
    assert checks["disk level seal"]["fix"] is None
    assert "outside the folder" in beside["disk level seal"]["fix"]


def test_a_missing_package_is_named_with_what_installs_it(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are optional."""
    make_key_file(config.parent / "key")
    config.write_text(f'{config.read_text()}remote = {{ url = "s3://bucket" }}\n')
    monkeypatch.setattr("engine.storage.remote.address.find_spec", lambda name: None)
    remote = main(["serve"]), capsys.readouterr().err
    monkeypatch.setattr("engine.storage.sealing.unlocking.find_spec", lambda name: None)
    sealed = main(["serve"]), capsys.readouterr().err

    assert remote[0] == sealed[0] == 2
    assert "engine.levels.remote.url" in remote[1]
    assert "pip install 'trunkline[remote]'" in remote[1]
    assert "engine.levels.seal" in sealed[1]
    assert "pip install 'trunkline[sealed]'" in sealed[1]


def test_doctor_asks_the_remote_store(run: Run, config: Path, tmp_path: Path) -> None:
    """And leaves nothing there."""
    make_key_file(tmp_path / "key")
    text = config.read_text()
    config.write_text(f'{text}remote = {{ url = "file://{tmp_path}/far" }}\n')
    there = doctor(run)["remote level"]
    config.write_text(f'{text}remote = {{ url = "file://{tmp_path}/no/far" }}\n')
    away = doctor(run)["remote level"]

    assert there["ok"]
    assert "answers in" in there["found"]
    assert not (tmp_path / "far").exists()
    assert not away["ok"]
    assert "does not exist" in away["found"]


def test_doctor_compares_the_master_key_of_a_shared_store(
    run: Run, config: Path, tmp_path: Path
) -> None:
    """It writes and reads an object, and leaves none; another key is refused by name."""
    key = make_key_file(tmp_path / "key")
    far = f"file://{tmp_path}/far"
    config.write_text(f'{config.read_text()}remote = {{ url = "{far}", shared = true }}\n')
    empty = doctor(run)["remote level"]
    left = [path for path in (tmp_path / "far").rglob("*") if path.is_file()]
    other = MasterKey(bytes(32))
    check_proof(open_remote(far, 5.0), shared_proof(other))
    refused = doctor(run)["remote level"]

    assert empty["ok"]
    assert f"shared under key {key.fingerprint}, empty until now" in empty["found"]
    assert left == []
    assert not refused["ok"]
    assert key.fingerprint in refused["found"]
    assert other.fingerprint in refused["found"]


def doctor(run: Run) -> dict[str, dict[str, Any]]:
    """Return the findings of doctor by name, with any exit status."""
    return {one["check"]: one for one in json.loads(run("doctor", "--json")[1])}
