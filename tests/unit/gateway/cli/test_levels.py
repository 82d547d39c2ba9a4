"""`trunkline levels`: what a running server has, and what becomes of the disk while none runs."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from gateway.cli.levels import levels_show
from gateway.cli.result import CommandError, CommandResult
from gateway.config import AdminConfig, Config
from gateway.engines.replicas import Replicas
from gateway.levels.placement import ServerLock
from tests.unit.engine.storage.local_storage import LocalRig
from tests.unit.engine.storage.storage_rig import A
from tests.unit.gateway.admin_client import AdminClient
from tests.unit.gateway.cli.command_output import Run, data_of, error_line
from tests.unit.gateway.gateway_fixture import GatewayFixture
from tests.unit.gateway.levels.reported_levels import STATS, ReportedEngine

RUNS = ((1, 5, 6, 7), (2, 5, 6, 7), (3, 5, 6, 7))


def fill(folder: Path) -> None:
    """Make a store with three records."""
    folder.parent.mkdir()
    rig = LocalRig(folder)
    for tokens in RUNS:
        rig.store(A, tokens)
    rig.close()


def test_init_makes_a_folder_for_this_user_alone(run: Run, data: Path) -> None:
    """A second time it empties it: the way out for a store of another version."""
    first = data_of(run, "levels", "init")
    second = data_of(run, "levels", "init")

    assert first == second == {"folder": str(data / "levels"), "freed_bytes": 0}
    assert (data / "levels").stat().st_mode & 0o777 == 0o700


def test_verifies_rebuilds_and_clears_a_store(run: Run, data: Path) -> None:
    """Each says how many records there are; the folder's other files stay."""
    folder = data / "levels"
    fill(folder)
    (folder / "notes").touch()
    sound = data_of(run, "levels", "verify")
    rebuilt = data_of(run, "levels", "rebuild")
    freed = data_of(run, "levels", "clear")

    assert (sound["records"], sound["damaged"]) == (3, 0)
    assert (rebuilt["records"], rebuilt["left_out"]) == (3, 0)
    assert freed["freed_bytes"] > 3 * 8_192
    assert "notes" in {path.name for path in folder.iterdir()}
    assert not list(folder.glob("*.slab"))


def test_verify_drops_what_is_damaged_and_says_so_by_its_status(run: Run, data: Path) -> None:
    """A script sees it; the second time all is sound."""
    fill(data / "levels")
    (slab,) = (data / "levels").glob("*.slab")
    damaged = bytearray(slab.read_bytes())
    damaged[5_000] ^= 1
    slab.write_bytes(damaged)
    status, out, _ = run("levels", "verify")

    assert (status, out) == (1, "3 records read, 1 dropped (damaged, or under damaged)\n")
    assert data_of(run, "levels", "verify")["records"] == 2


def test_errors_name_the_folder_and_the_way_out(run: Run, data: Path) -> None:
    """A missing folder, one that others may read, and an index that is none."""
    missing = error_line(run, "levels", "clear")
    fill(data / "levels")
    (data / "levels").chmod(0o755)
    readable = error_line(run, "levels", "verify")
    (data / "levels").chmod(0o700)
    next((data / "levels").glob("index*")).write_bytes(b"x" * 8_192)
    foreign = error_line(run, "levels", "verify")

    assert "does not exist" in missing
    assert "chmod 700" in readable
    assert str(data / "levels") in foreign


def test_each_of_several_models_has_a_store(
    run: Run, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a folder of its name, below the disk level's."""
    file = tmp_path / "two.toml"
    file.write_text('[[models]]\nname = "one"\n[[models]]\nname = "two"\n')
    monkeypatch.setenv("TRUNKLINE_CONFIG", str(file))
    found = data_of(run, "levels", "init")

    assert [one["folder"] for one in found] == [str(data / "levels" / n) for n in ("one", "two")]
    assert (data / "levels" / "two").is_dir()


def test_no_change_while_a_server_runs(run: Run, data: Path) -> None:
    """Its index is in memory."""
    fill(data / "levels")
    lock = ServerLock(data / "levels")
    told = error_line(run, "levels", "clear", status=2)
    lock.close()

    assert "is used by another server" in told
    assert list((data / "levels").glob("*.slab"))


async def test_show_asks_the_running_server(gateway: GatewayFixture, tmp_path: Path) -> None:
    """A table of all levels, the reason of one that is not open, and the JSON of the admin API."""
    admin, context = AdminClient(gateway), gateway.gateway.context
    context.models.default.replicas = Replicas.of(ReportedEngine(gateway.engine, STATS))
    listen = gateway.admin_url.removeprefix("http://")
    config = Config(data_dir=str(tmp_path), admin=AdminConfig(listen=listen))
    key_file = tmp_path / "admin.key"

    def show(key: str) -> CommandResult:
        key_file.write_text(f"{key}\n")
        return levels_show(config)

    found = await asyncio.to_thread(show, admin.key)
    with pytest.raises(CommandError, match="refuses"):
        await asyncio.to_thread(show, "tl-wrong")
    lines = found.text.splitlines()

    titles = "level state size used promised free found tokens reads at"
    assert " ".join(lines[0].split()) == titles
    assert [line.split()[0] for line in lines[1:4]] == ["device", "host", "disk"]
    assert lines[4] == "the disk level is full: less than 2 GiB free"


def test_show_says_what_is_missing(tmp_path: Path) -> None:
    """The key that the first start made, or the server."""
    config = Config(data_dir=str(tmp_path), admin=AdminConfig(listen="127.0.0.1:9"))
    with pytest.raises(CommandError, match="expected an administrator's key in it"):
        levels_show(config)
    (tmp_path / "admin.key").write_text("tl-any")

    with pytest.raises(CommandError, match=r"no server answers at 127\.0\.0\.1:9"):
        levels_show(config)
