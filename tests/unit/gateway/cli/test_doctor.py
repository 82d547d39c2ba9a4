"""`trunkline doctor`: each finding has a fix."""

from __future__ import annotations

import json
import os
import socket
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest

from engine.config import EngineConfig, LevelsConfig, RemoteConfig
from engine.model_store.architecture import Latent
from gateway.__main__ import main
from gateway.cli.database import connect
from gateway.cli.doctor.check import Check
from gateway.cli.doctor.command import checks_text
from gateway.cli.doctor.fleet import DAYS_LEFT_MIN, check_engines, check_fleet
from gateway.cli.doctor.levels import check_levels
from gateway.cli.doctor.pools import check_pool, check_pools
from gateway.config import Config, ModelSettings, ServedModelSettings
from gateway.engines import device_memory, memory
from gateway.engines.elsewhere.certificates import make_certificates
from gateway.engines.memory import available_memory_mib
from tenancy.accounts.declared_tenants import DeclaredTenant
from tenancy.accounts.tenants import create_tenant, set_status
from tenancy.types import AtRest, CachePolicy, wall_ms
from tests.models import prepared, prepared_with_windows
from tests.ports import free_ports

ASKED = {"disk speed", "clock", "host names", "encryption", "descriptors", "configuration"}
ALL = {*ASKED, "python", "sqlite", "torch", "model", "device", "data directory"}


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the path of a configuration file, in use."""
    file = tmp_path / "trunkline.toml"
    file.write_text(f'data_dir = "{tmp_path / "data"}"\n')
    for name in ("TRUNKLINE_DATA_DIR", "TRUNKLINE_MODEL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TRUNKLINE_CONFIG", str(file))
    return file


def checks(capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, Any]]:
    main(["doctor", "--json"])
    return {row["check"]: row for row in json.loads(capsys.readouterr().out)}


def test_a_sound_machine_gets_no_advice(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All of these are checked, and none changes the data directory."""
    found = checks(capsys)

    assert set(found) >= ALL
    assert {name for name in ASKED - {"disk speed"} if found[name]["fix"]} == set()
    assert not (config.parent / "data").exists()


@pytest.mark.parametrize(
    ("device", "is_ok", "found"),
    [
        ("cpu", True, "CPU"),
        ("auto", True, "CPU: no NVIDIA device is here"),
        ("cuda", False, "engine.device is cuda: no NVIDIA device is here"),
    ],
)
def test_says_where_models_run(
    config: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    is_ok: bool,
    found: str,
) -> None:
    """An engine that has to run on a device that is not here would not start."""
    monkeypatch.setattr(device_memory, "NVIDIA_CONTROL", config.parent / "none")
    config.write_text(config.read_text() + f'[engine]\ndevice = "{device}"\n')
    check = checks(capsys)["device"]

    assert check["ok"] is is_ok
    assert check["found"].startswith(found)
    assert (check["fix"] is None) is is_ok


def test_advises_names_and_encryption_for_a_public_listener(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Clients of other machines would be refused, and their keys would be readable on the way."""
    before = config.read_text()
    config.write_text(before + '[server]\nlisten = "0.0.0.0:0"\n')
    local = checks(capsys)
    config.write_text(before + '[server]\nlisten = "0.0.0.0:0"\nhosts = ["llm.example"]\n')
    named = checks(capsys)

    assert "server.hosts" in local["host names"]["fix"]
    assert "TLS" in local["encryption"]["fix"]
    assert local["host names"]["ok"], "advice is no failure"
    assert named["host names"]["fix"] is None


def test_a_clock_behind_the_database_is_an_error(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bills and budgets follow the wall clock."""
    data = config.parent / "data"
    data.mkdir()
    (data / "trunkline.db").touch()
    os.utime(data / "trunkline.db", (4e9, 4e9))
    found = checks(capsys)["clock"]

    assert not found["ok"]
    assert "chrony" in found["fix"]


def test_checks_the_secrets_of_webhooks(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server with a webhook without a secret does not start."""
    hook = "[[webhooks]]\nname = 'ops'\nurl = 'https://ops.example'\nsecret_env = 'HOOK'\n"
    config.write_text(config.read_text() + hook)
    monkeypatch.delenv("HOOK", raising=False)
    missing = checks(capsys)["webhooks"]
    monkeypatch.setenv("HOOK", "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")
    there = checks(capsys)["webhooks"]

    assert (missing["ok"], there["ok"]) == (False, True)
    assert "variable 'HOOK' is not set" in missing["found"]


@pytest.mark.parametrize(
    ("model", "is_ok", "words"),
    [
        ("all-minilm-l6-v2", True, "fetched at the first start"),
        ("gemma-3-270m", False, "generates text and embeds none"),
        ("/nowhere", False, "'/nowhere' does not exist"),
    ],
)
def test_the_embedding_model_is_checked(
    config: Path, capsys: pytest.CaptureFixture[str], model: str, is_ok: bool, words: str
) -> None:
    """Only where there is one."""
    without = checks(capsys)
    config.write_text(config.read_text() + f'[embeddings]\nmodel = "{model}"\n')
    found = checks(capsys)["embedding model"]

    assert "embedding model" not in without
    assert (found["ok"], words in found["found"]) == (is_ok, True)
    assert is_ok or "all-minilm-l6-v2" in found["fix"]


def test_text_shows_the_fix_below_its_finding(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config.write_text(config.read_text() + '[model]\nname = "/nowhere"\n')
    status = main(["doctor"])
    lines = capsys.readouterr().out.split("\n")
    (number,) = [at for at, line in enumerate(lines) if line.startswith("FAIL  model")]

    assert status == 1
    assert lines[number + 1].split("-> ")[1].startswith("trunkline pull NAME")


def test_verdicts_are_coloured_on_a_terminal() -> None:
    """Green, yellow and red; in a pipe none."""
    found = [Check("a", True, "x"), Check("b", True, "x", "y"), Check("c", False, "x", "y")]
    coloured = checks_text(found, has_colours=True)

    for code, mark in ((32, "ok  "), (33, "note"), (31, "FAIL")):
        assert f"\x1b[{code}m{mark}\x1b[0m" in coloured
    assert "\x1b" not in checks_text(found, has_colours=False)


@pytest.mark.parametrize(
    ("limit", "used", "free"),
    [(None, None, 4_000), ("max", "5", 4_000), (str(2**30), str(2**29), 512)],
)
def test_memory_is_the_containers_if_that_is_less(
    tmp_path: Path, limit: str | None, used: str | None, free: int
) -> None:
    """A container sees the whole machine's memory in /proc/meminfo."""
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:    4096000 kB\n")
    if limit is not None and used is not None:
        (tmp_path / "memory.max").write_text(limit)
        (tmp_path / "memory.current").write_text(used)

    assert available_memory_mib(tmp_path / "meminfo", tmp_path) == free
    assert available_memory_mib(tmp_path / "none", tmp_path) is None


def test_a_model_that_a_start_would_refuse_is_told_before_it(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the words of the start, which prepares it; nothing is written for it here."""
    folder = config.parent / "mine"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "rwkv"}')
    (folder / "tokenizer.json").write_text("{}")
    config.write_text(config.read_text() + f'[model]\nname = "{folder}"\n')
    found = checks(capsys)["model"]

    assert not found["ok"]
    assert "rwkv" in found["found"]
    assert "docs/models.md" in found["fix"]
    assert not (config.parent / "data").exists()


def test_each_of_several_models_is_checked(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tables = "".join(f"[[models]]\nname = '{name}'\npath = '/none/{name}'\n" for name in "ab")
    config.write_text(config.read_text() + tables)
    status = main(["doctor", "--config", str(config)])
    text = capsys.readouterr().out

    assert status == 1
    assert [name for name in "ab" if f"FAIL  model {name}" in text] == ["a", "b"]
    assert "set the model's path to a file or folder that exists" in text


def test_says_how_many_tokens_the_pool_of_a_prepared_model_holds(tmp_path: Path) -> None:
    """8 bits and a scale for each token and head nearly double them; latents have no such pool."""
    card = prepared(tmp_path / "models")
    config = Config(data_dir=str(tmp_path), model=ModelSettings(name=card.source))

    def pool(**settings: object) -> Check:
        engine = msgspec.structs.replace(EngineConfig(kv_memory_mib=1), **settings)
        (found,) = check_pools(msgspec.structs.replace(config, engine=engine))
        return found

    heads = 2 * len(card.config.layers) * card.config.kv_heads
    plain, int8 = heads * card.config.head_dim * 2, heads * (card.config.head_dim + 2)
    tokens = 2**20 // (16 * plain) * 16
    assert pool().found.startswith(f"{tokens:,} tokens of {plain:,} B; ")
    assert pool(kv_blocks=3).found.startswith("48 tokens")
    assert f"tokens of {int8:,} B" in pool(kv_dtype="int8").found
    assert pool(kv_dtype="int8").found.endswith("answers are near and not exact")
    latents = msgspec.structs.replace(card.config, latent=Latent(32, 16, 8, 16))
    refused = check_pool("KV pool", latents, EngineConfig(kv_dtype="int8"))
    assert (refused.ok, refused.fix) == (False, 'set engine.kv_dtype to "auto"')
    assert check_pool("KV pool", latents, EngineConfig()).ok


def test_measures_the_disk_of_the_levels_and_says_its_worth(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a prepared model there is nothing to compare with yet; nothing is left behind."""
    assert "disk level" not in checks(capsys)
    before = config.read_text()
    config.write_text(before + "[engine.levels]\nhost_mib = 1\ndisk_gib = 1\n")
    found = checks(capsys)

    assert found["host level"]["found"] == "1 MiB of host memory"
    assert str(config.parent / "data" / "levels") in found["disk level"]["found"]
    assert "MB/s read" in found["disk level speed"]["found"]
    assert found["disk level worth"]["ok"]
    assert not (config.parent / "data").exists()


def test_levels_that_the_machine_cannot_have_are_errors(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same words with which a server does not start, and the way out."""
    ports = '[server]\nlisten = "127.0.0.1:0"\n[admin]\nlisten = "127.0.0.1:0"\n'
    config.write_text(f"{config.read_text()}{ports}[engine.levels]\ndisk_gib = 1e9\n")
    found = checks(capsys)["levels"]

    assert not found["ok"]
    assert found["found"].startswith("engine.levels.disk_gib: 1e+09 GiB, and the file system")
    assert "engine.levels.disk_gib" in found["fix"]
    assert main(["serve"]) == 2
    assert "engine.levels.disk_gib" in capsys.readouterr().err


def test_says_what_host_memory_auto_would_get_now(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A number, the reason where it is none, and nothing where a number is configured."""
    config.write_text(config.read_text() + '[engine.levels]\nhost_mib = "auto"\n')
    monkeypatch.setattr(memory, "available_memory_mib", lambda *_: 100_000)
    rich = checks(capsys)
    monkeypatch.setattr(memory, "available_memory_mib", lambda *_: 10)
    poor = checks(capsys)["host level"]

    assert rich["host level"]["found"] == "auto: 512 MiB of host memory at a start now"
    assert "512 for the host levels of the cache" in rich["memory"]["found"]
    assert poor["ok"]
    assert poor["found"].startswith("auto: none, 10 MiB free, about ")
    assert "lower engine.kv_memory_mib" in poor["fix"]


def remote_levels(folder: Path) -> LevelsConfig:
    """Return a sealed disk with a remote store, whose key is made."""
    key = folder / "master.key"
    key.write_text("0" * 64)
    key.chmod(0o400)
    remote = RemoteConfig(url=f"file://{folder}/remote")
    return LevelsConfig(disk_gib=1.0, seal=True, key_file=str(key), remote=remote)


@pytest.mark.parametrize(
    ("registered", "declared", "found"),
    [
        ((), (), "none of 0 tenants allows it"),
        (("local", "never"), ("local",), "none of 3 tenants allows it"),
        (("local", "remote"), (), "1 of 2 tenants allow it"),
        (("local",), ("remote", "local"), "1 of 3 tenants allow it"),
    ],
)
def test_says_whether_any_tenants_kv_may_go_to_the_remote_store(
    tmp_path: Path, registered: tuple[AtRest, ...], declared: tuple[AtRest, ...], found: str
) -> None:
    """By default no tenant's may, and the store would stay empty without a word."""
    pytest.importorskip("cryptography")
    folder = tmp_path / "data"
    folder.mkdir(mode=0o700)
    config = Config(
        data_dir=str(folder),
        engine=EngineConfig(levels=remote_levels(tmp_path)),
        tenants=tuple(DeclaredTenant(name=f"d{n}", at_rest=one) for n, one in enumerate(declared)),
    )
    if registered:
        with closing(connect(config)) as store:
            for number, at_rest in enumerate(registered):
                create_tenant(store, wall_ms, f"r{number}", CachePolicy(at_rest=at_rest))
            create_tenant(store, wall_ms, "gone", CachePolicy(at_rest="remote"))
            set_status(store, "gone", "suspended")
    check = {one.check: one for one in check_levels(config)}["remote level use"]

    assert check.ok
    assert check.found.startswith(found)
    assert (check.fix is None) == found[0].isdigit()
    assert check.fix is None or "--at-rest remote" in check.fix
    assert (folder / "trunkline.db").exists() == bool(registered)


def test_worth_compares_loading_with_computing(tmp_path: Path) -> None:
    """On a prepared model: room, seconds a token, and from how many tokens on it wins."""
    card = prepared(tmp_path / "models")
    worth = worth_of(card.source, tmp_path, "cpu")

    assert f"room for {2**30 // 256:,} tokens of 256 B" in worth.found, "a tiny model"
    assert "computed in " in worth.found


def test_a_gpu_has_levels_of_models_with_windows(tmp_path: Path) -> None:
    """Its transfer engine copies the blocks of every KV group."""
    card = prepared_with_windows(tmp_path / "models", 64, context=256)
    worth = worth_of(card.source, tmp_path, "cuda")

    assert worth.found.startswith("room for ")
    assert worth.fix is None


def test_the_worth_of_a_disk_is_told_for_each_model(tmp_path: Path) -> None:
    """Of several models, those whose engines are here and have a disk."""
    card = prepared_with_windows(tmp_path / "models", 64, context=256)
    config = Config(
        data_dir=str(tmp_path),
        models=(
            ServedModelSettings("tiny", card.source),
            ServedModelSettings("other", str(tmp_path / "none")),
            ServedModelSettings("none", card.source, engine={"levels": {"disk_gib": 0}}),
            ServedModelSettings("away", card.source, replicas=("e0=127.0.0.1:7443",)),
        ),
        engine=EngineConfig(levels=LevelsConfig(disk_gib=1.0), device="cpu"),
    )
    worths = [one for one in check_levels(config) if "worth" in one.check]

    assert [one.check for one in worths] == ["disk level worth tiny", "disk level worth other"]
    assert worths[0].found.startswith("room for ")
    assert worths[1].found == "known once a server has prepared the model"


def worth_of(model: str, data_dir: Path, device: Literal["cpu", "cuda"]) -> Check:
    """Return what is said of a disk below the cache of a prepared model."""
    engine = EngineConfig(levels=LevelsConfig(disk_gib=1.0), device=device)
    settings = ModelSettings(name=model)
    worth = check_levels(Config(data_dir=str(data_dir), model=settings, engine=engine))[-1]
    assert worth.check == "disk level worth"
    return worth


@pytest.mark.parametrize("folder", ["/proc/x", "/sys/x"])
def test_a_data_directory_where_nothing_can_be_made_is_named(
    config: Path, capsys: pytest.CaptureFixture[str], folder: str
) -> None:
    """The system calls /proc writable, and its disk full."""
    config.write_text(f'data_dir = "{folder}"\n')
    found = checks(capsys)["data directory"]

    assert not found["ok"]
    assert folder in found["found"]
    assert "--data-dir" in found["fix"]
    assert "GiB" not in found["found"] + found["fix"]


def test_a_certificate_near_its_end_is_told(tmp_path: Path) -> None:
    """An expired one keeps a gateway from its engines, all at once."""
    made = datetime.now(UTC)
    model = ModelSettings(replicas=("e0=127.0.0.1:7443",))
    config = Config(data_dir=str(tmp_path), model=model)
    (missing,) = check_fleet(config)
    make_certificates(tmp_path / "fleet", ["gateway/g0"], now=made, days=90)
    (fresh,) = check_fleet(config, made)
    (late,) = check_fleet(config, made + timedelta(days=91 - DAYS_LEFT_MIN))
    make_certificates(tmp_path / "fleet", ["gateway/g0"], now=made - timedelta(days=91), days=90)
    (over,) = check_fleet(config)

    assert (missing.ok, fresh.ok, late.ok, over.ok) == (False, True, True, False)
    assert fresh.fix is None
    assert "trunkline fleet init" in str(late.fix)
    assert "certificate has expired; expected one that is valid today" in over.found
    assert check_fleet(Config(data_dir=str(tmp_path))) == []


def test_engines_that_cannot_be_reached_are_told(tmp_path: Path) -> None:
    """One of several is advice: the others serve. A file of engines is read as the server does."""

    def check(replicas: tuple[str, ...] = (), file: str = "") -> Check:
        model = ModelSettings(replicas=replicas, replicas_file=file)
        (found,) = check_engines(Config(data_dir=str(tmp_path), model=model))
        return found

    with socket.create_server(("127.0.0.1", 0)) as engine, free_ports(1) as (free,):
        there = f"e0=127.0.0.1:{engine.getsockname()[1]}"
        away = f"e1=127.0.0.1:{free}"
        both, some, none = check((there,)), check((there, away)), check((away,))
        (tmp_path / "engines").write_text(f"{there}\n# {away}\n")
        file = check(file=str(tmp_path / "engines"))

    assert (both.ok, some.ok, none.ok, file) == (True, True, False, both)
    assert both == Check("fleet engines", True, "1 of 1 can be reached")
    assert some.found == f"1 of 2 can be reached; {away}: Connection refused"
    assert "trunkline engine serve" in str(some.fix)
    assert not check(file=str(tmp_path / "nowhere")).ok
    assert check_engines(Config(data_dir=str(tmp_path))) == []
