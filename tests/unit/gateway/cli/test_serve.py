"""`trunkline serve`: the lines that it prints, and which model it takes for what."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from engine.errors import ModelError
from engine.model_store import DEFAULT_ENCODER, DEFAULT_MODEL
from gateway.__main__ import main
from gateway.cli.serve import banner, prepared_encoder
from gateway.config import Config, ConfigError, EmbeddingsConfig
from tests.encoders import write_encoder, zip_encoder
from tests.unit.engine.server.fleet_certificates import certificate, expired
from tests.unit.gateway.cli.command_output import Run, error_line

URLS = ["http://127.0.0.1:8080", "http://127.0.0.1:8081"]


def test_banner_names_the_dashboard() -> None:
    """An operator opens it first, and its listener is not the clients'."""
    lines = banner({"smol": "ready"}, URLS, Config(), None, None)

    assert lines[0] == "trunkline serves smol at http://127.0.0.1:8080/v1"
    assert "  dashboard:           http://127.0.0.1:8081/dashboard" in lines


def test_banner_names_the_configuration_file() -> None:
    """Or the places of one: a table that was added elsewhere has no effect."""
    named, without = (
        banner({"smol": "ready"}, URLS, Config(), None, file)[-1]
        for file in (Path("/etc/t.toml"), None)
    )

    assert named == "  configuration file:  /etc/t.toml"
    assert "./trunkline.toml" in without


def test_banner_shows_a_new_key_once() -> None:
    """Later starts have none to show."""
    first, later = (
        banner({"smol": "ready"}, URLS, Config(), key, None) for key in ("tl-new", None)
    )

    assert [line for line in first if line not in later] == [
        "  key of the tenant 'default' (shown once): tl-new"
    ]


def say(line: str) -> None:
    raise AssertionError(f"nothing is fetched here: {line}")


def progress(done: int, total: int) -> None:
    """Ignore progress."""


def encoder_of(model: str, tmp_path: Path) -> object:
    config = Config(data_dir=str(tmp_path), embeddings=EmbeddingsConfig(model=model))
    return prepared_encoder(config, say, progress)


def test_without_an_embedding_model_there_is_no_encoder(tmp_path: Path) -> None:
    """The default."""
    assert encoder_of("", tmp_path) is None


@pytest.mark.parametrize("is_zip", [False, True])
def test_a_folder_and_its_zip_file_are_embedding_models(is_zip: bool, tmp_path: Path) -> None:
    """Named after the file or the folder."""
    source = write_encoder(tmp_path / "tiny-bert")
    if is_zip:
        source = zip_encoder(source, tmp_path / "tiny-bert.zip")

    card = encoder_of(str(source), tmp_path)

    assert getattr(card, "name", None) == "tiny-bert"


def test_a_chat_model_is_refused_for_embeddings_before_it_is_fetched(tmp_path: Path) -> None:
    """By its name in the catalogue."""
    with pytest.raises(ConfigError, match="is a chat model"):
        encoder_of(DEFAULT_MODEL, tmp_path)


def test_an_embedding_model_is_refused_for_chats_before_it_is_fetched(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message names the setting."""
    monkeypatch.setenv("TRUNKLINE_CONFIG", os.devnull)
    monkeypatch.setenv("TRUNKLINE_DATA_DIR", str(tmp_path / "data"))
    listen = ("--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0")

    status = main(["serve", DEFAULT_ENCODER, *listen])

    assert status == 2
    assert "this one as embeddings.model" in capsys.readouterr().err


@pytest.mark.parametrize("process", [(), ("--process", "1")], ids=["alone", "of several"])
@pytest.mark.parametrize(
    ("folder", "file", "says"),
    [
        (Path("/nowhere"), "authority.pem", "No such file or directory; expected authority.pem, c"),
        (expired("gateway/g0"), "certificate.pem", "certificate has expired; expected one that is"),
        (certificate("gateway/g1"), "certificate.pem", "names 'gateway/g1'; expected 'gateway/g0'"),
        (certificate("engine/g0"), "certificate.pem", "names 'engine/g0'; expected 'gateway/g0'"),
    ],
)
def test_a_certificate_that_engines_elsewhere_would_refuse_is_refused(
    run: Run, tmp_path: Path, folder: Path, file: str, says: str, process: tuple[str, ...]
) -> None:
    """Before a model is looked for: a gateway that started would only fail to reach its engines. So
    would a process that is started again, and get connections that others could answer."""
    config = tmp_path / "fleet.toml"
    lines = '[model]\nname = "/nowhere"\nreplicas = ["e0=127.0.0.1:1"]\n[fleet]\ntls = '
    config.write_text(f'{lines}"{folder}"\n')
    listen = ("--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0")
    line = error_line(run, "serve", "--config", str(config), *listen, *process)

    assert f"{folder / file}: " in line
    assert says in line


def test_sigterm_ends_the_fetching_of_a_model(
    data: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of process 1 of a container, which ignores a signal that it does not handle."""

    def fetch(*_: object) -> Path:
        signal.raise_signal(signal.SIGHUP)
        fetching.append(1)
        signal.raise_signal(signal.SIGTERM)
        raise AssertionError("still fetching")

    fetching: list[int] = []
    monkeypatch.setattr("gateway.engines.model_files.pull", fetch)
    handled = signal.SIGTERM, signal.SIGHUP
    former = [signal.signal(one, signal.SIG_IGN) for one in handled]
    try:
        ended = run("serve", "--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0")
    finally:
        for one, handler in zip(handled, former, strict=True):
            signal.signal(one, handler)

    assert fetching == [1], "SIGHUP, which asks for a reload, does not end it"

    assert ended == (0, f"fetching {DEFAULT_MODEL}\n", "")
    assert not (data / "default.key").exists()


def test_a_model_that_is_not_there_is_named(tmp_path: Path) -> None:
    """As for chat models."""
    with pytest.raises(ModelError, match="'some/encoder' is neither"):
        encoder_of("some/encoder", tmp_path)
