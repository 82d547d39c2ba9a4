"""Lifecycle of the server process: a real engine process, a tiny model, and signals."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import stat
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import apsw
import msgspec
import pytest
from aiohttp import ClientSession
from safetensors.torch import load_file, save_file

from tenancy.accounting.audit import check_books
from tenancy.accounting.reconcile import reconcile
from tenancy.pricing.charges import RateCard
from tenancy.pricing.rate_cards import add_card
from tenancy.storage.sqlite import SqliteStore
from tenancy.types import TokenCounts, wall_ms
from tests.models import write_folder
from tests.server_process import (
    SETTINGS,
    START_S,
    Server,
    children,
    run_server,
    serve_command,
    serving,
    spawn,
    stopped,
)

pytestmark = pytest.mark.slow

DELIVERED_MIN = 32
LARGE = {"max_tokens": 440, "n": 8, "stream": True, "logprobs": True, "top_logprobs": 5}
"""A request whose response is larger than the buffers of its connection."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(autouse=True)
def fail_on_blocking_calls() -> None:
    """Disable the check: only clients run on this loop."""


def rows(data: Path, sql: str) -> list[tuple[Any, ...]]:
    """Read the database from another process."""
    db = apsw.Connection(str(data / "trunkline.db"), flags=apsw.SQLITE_OPEN_READONLY)
    try:
        return list(db.execute(sql))
    finally:
        db.close()


def price(data: Path, name: str, output: int) -> None:
    """Add a rate card, or its next version."""
    with closing(SqliteStore(data / "trunkline.db")) as store:
        add_card(store, wall_ms, RateCard(name, output=output))


def faults(data: Path) -> tuple[list[str], list[str]]:
    """Return the findings of the ledger's check, and the epochs whose counts differ."""
    with closing(SqliteStore(data / "trunkline.db")) as store:
        apart = [life.epoch for life in reconcile(store) if life.has_mismatch]
        return check_books(store), apart


def mode(path: Path) -> int:
    """Return a file's permissions."""
    return stat.S_IMODE(path.stat().st_mode)


async def test_first_start_creates_private_key_and_sigterm_drains(
    model: Path, tmp_path: Path
) -> None:
    """SIGTERM during a stream lets it finish, then exits with 0."""
    data = tmp_path / "data"
    with run_server(model, data) as server:
        async with server.request(max_tokens=400, stream=True) as (status, content):
            first = await content.readuntil(b"\n\n")
            server.process.terminate()
            rest = await content.read()
        exit_status = server.wait()

    assert status == 200
    assert server.key in server.text
    assert [mode(path) for path in (data / "default.key", data)] == [0o600, 0o700]
    assert b"data: " in first
    assert rest.endswith(b"data: [DONE]\n\n")
    assert exit_status == 0
    assert rows(data, "select ending, output_tokens from ledger") == [("done", 400)]


async def test_the_addresses_that_are_told_are_of_ipv6_too(model: Path, tmp_path: Path) -> None:
    """A client takes the address as it is printed, with brackets, and so do the commands."""
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            pass
    except OSError as error:
        pytest.skip(f"no IPv6 on this machine: {error}")
    settings = tmp_path / "settings.toml"
    settings.write_text(SETTINGS)
    command = serve_command(model, tmp_path / "data", settings)
    command += ["--listen", "[::1]:0", "--admin-listen", "[::1]:0"]
    with serving(command, tmp_path / "log") as server:
        async with server.request(max_tokens=1) as (status, content):
            await content.read()
        async with ClientSession() as session, session.get(f"{server.admin_url}/metrics") as found:
            admin_status = found.status
        exit_status = await asyncio.to_thread(server.stop)

    assert (status, admin_status, exit_status) == (200, 200, 0)
    for url in (server.url, server.admin_url):
        assert url.startswith("http://[::1]:")


async def test_a_host_level_of_auto_gets_its_number_at_the_start(
    model: Path, tmp_path: Path
) -> None:
    """The log tells it, and the engine has a level of it: here as much as the pool."""
    data, settings = tmp_path / "data", tmp_path / "auto.toml"
    text = SETTINGS.replace("kv_blocks = 256", "kv_blocks = 4096")
    await asyncio.to_thread(settings.write_text, f'{text}[engine.levels]\nhost_mib = "auto"\n')
    with run_server(model, data, settings) as server:
        async with server.request(max_tokens=1) as (status, content):
            await content.read()
    lines = (await asyncio.to_thread(data.with_suffix(".log").read_text)).splitlines()
    told = [json.loads(line) for line in lines if '"host_level_sized"' in line]

    assert status == 200
    assert [one["host_mib"] for one in told] == [16]
    assert told[0]["free_mib"] > 16
    assert not any("level_off" in line for line in lines)


async def test_a_fault_in_one_model_ends_that_model(model: Path, tmp_path: Path) -> None:
    """Of every kind: a template, a tokenizer, weights. The default model serves on, the log has
    one line for each, and the state is told."""
    broken = dict(write_broken(tmp_path))
    tables = "".join(
        f'[[models]]\nname = "{name}"\npath = "{path}"\n' for name, path in broken.items()
    )
    data, settings = tmp_path / "data", tmp_path / "settings.toml"
    settings.write_text(f'{SETTINGS}[[models]]\nname = "tiny"\npath = "{model}"\n{tables}')
    with run_server(None, data, settings) as server:
        log = data.with_suffix(".log")
        while log.read_text().count('"model_failed"') < len(broken):
            assert server.process.poll() is None
            await asyncio.sleep(0)
        async with server.request(max_tokens=1) as (status, content):
            await content.read()
        async with ClientSession() as session, session.get(f"{server.url}/readyz") as response:
            states = (await response.json())["models"]
    failed = [json.loads(line) for line in log.read_text().splitlines() if '"model_failed"' in line]

    assert status == 200
    assert states == {"tiny": "ready", **dict.fromkeys(broken, "failed")}
    assert sorted(one["model"] for one in failed) == sorted(broken)
    assert all(one["reason"] and "\n" not in one["reason"] for one in failed), failed
    assert "Traceback" not in log.read_text()


def write_broken(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """Yield models by the name of their fault."""
    settings = {"template": "{% if %}", "filter": "{{ 1 | unheard_of }}", "long": "x" * 300_000}
    for name, template in settings.items():
        folder = write_folder(tmp_path / name)
        changed = {"add_bos_token": False, "chat_template": template}
        (folder / "tokenizer_config.json").write_text(json.dumps(changed))
        yield name, folder
    folder = write_folder(tmp_path / "tokenizer")
    (folder / "tokenizer.json").write_text('{"model": {"type": "BPE"')
    yield "tokenizer", folder
    folder = write_folder(tmp_path / "nan")
    weights = load_file(folder / "model.safetensors")
    save_file(
        {name: one * float("nan") for name, one in weights.items()}, folder / "model.safetensors"
    )
    yield "nan", folder
    folder = write_folder(tmp_path / "shape")
    weights = load_file(folder / "model.safetensors")
    save_file(
        {name: one[:1].clone() for name, one in weights.items()}, folder / "model.safetensors"
    )
    yield "shape", folder
    yield "absent", tmp_path / "absent"


@pytest.mark.parametrize("last_event", ["", '"reloaded"'])
def test_sigterm_while_loading_exits_cleanly(model: Path, tmp_path: Path, last_event: str) -> None:
    """A service manager may reload and stop it right after its start, even before the gateway is
    imported; no file is left behind."""
    place, log, settings = tmp_path / "place", tmp_path / "log", tmp_path / "settings.toml"
    place.mkdir()
    settings.write_text(SETTINGS)
    command = serve_command(model, tmp_path / "data", settings)
    with spawn(command, log, {**os.environ, "TMPDIR": str(place)}) as process:
        while not (engine := children(process.pid).get("engine.server.server")):
            assert process.poll() is None
        with stopped(engine):
            process.send_signal(signal.SIGHUP)
            until_logged(log, process, last_event)
            process.terminate()
            until_logged(log, process, '"stopping"')
        said, _ = process.communicate(timeout=START_S)

    assert (process.returncode, said) == (0, "")
    assert "ignored" not in log.read_text()
    assert list(place.iterdir()) == []


def until_logged(log: Path, process: subprocess.Popen[str], event: str) -> None:
    """Wait until a running process has logged an event."""
    while event not in log.read_text():
        assert process.poll() is None


def noted_tokens(data: Path) -> int:
    """Return the output tokens that the holds have noted."""
    blobs = rows(data, "select progress from holds where progress is not null")
    return sum(msgspec.msgpack.decode(blob, type=TokenCounts).output_tokens for (blob,) in blobs)


def kill_once_noted(server: Server, data: Path, tokens: int) -> int:
    """Kill a server once its holds have noted these tokens; return how many they have noted."""
    with stopped(children(server.process.pid)["engine.server.server"]):
        while (noted := noted_tokens(data)) < tokens:
            assert server.process.poll() is None
        server.process.kill()
    return noted


async def test_restart_after_sigkill_settles_delivered_tokens(model: Path, tmp_path: Path) -> None:
    """The hold becomes one entry `interrupted`, never above the delivered tokens nor below the
    noted ones, at the price of its admission; the key still works. The response is larger than the
    buffers, so it cannot be complete before the kill, however late the client reads."""
    data = tmp_path / "data"
    price(data, "std", 5)
    arrived = noted = 0
    with run_server(model, data) as server:
        with contextlib.suppress(Exception):
            async with server.request(**LARGE) as (_, content):
                while event := await content.readuntil(b"\n\n"):
                    tokens = json.loads(event[6:])["choices"][0]["logprobs"] or {"content": []}
                    arrived += len(tokens["content"])
                    if not noted and arrived >= DELIVERED_MIN:
                        noted = kill_once_noted(server, data, arrived)
        server.wait()
    price(data, "std", 7)
    with run_server(model, data) as again:
        async with again.request(max_tokens=3) as (status, content):
            answer = json.loads(await content.read())
        again.stop()

    sql = "select ending, prompt_tokens, output_tokens, rate_card_id, charge_pico from ledger"
    entries = rows(data, sql)
    ending, prompt, output, card, charge = entries[0]
    assert again.key == server.key
    assert server.key not in again.text
    assert (status, answer["usage"]["completion_tokens"]) == (200, 3)
    assert [entry[:1] for entry in entries] == [("interrupted",), ("done",)]
    assert (ending, prompt, card) == ("interrupted", answer["usage"]["prompt_tokens"], "std@1")
    assert DELIVERED_MIN <= noted <= output <= arrived
    assert charge == 5 * output > 0
    assert faults(data) == ([], [])


async def test_second_signal_exits_at_once(model: Path, tmp_path: Path) -> None:
    """The client does not read its response."""
    with run_server(model, tmp_path / "data") as server:
        async with ClientSession() as session, server.request(**LARGE) as (_, content):
            await content.readuntil(b"\n\n")
            server.process.terminate()
            async with asyncio.timeout(START_S):
                ready = 200
                while ready == 200:
                    async with session.get(f"{server.url}/readyz") as response:
                        ready = response.status
            exit_status = server.stop()

    assert exit_status == 1
    log = await asyncio.to_thread((tmp_path / "data.log").read_text)
    assert '"stop_forced"' in log
