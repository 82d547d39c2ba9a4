"""The processes of a server: what they know that they do not need, and whether they end with it.

The attacker is a model file or a grammar that has taken over the process that parses it, and a
kill of the gateway at a bad moment. The quiet tenant is the next start, which needs the memory.
"""

from __future__ import annotations

import json
import os
import select
import signal
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from tests.attacks.attacked_server import AttackedServer
from tests.attacks.conftest import StartServer
from tests.server_process import SETTINGS, children, serve_command, spawn

pytestmark = pytest.mark.slow

PATIENCE_S = 60
OWES_WORK = ("gateway.ledger.process", "engine.storage.process")
"""Processes that finish what they were given before they end."""
LEVELS = """
[engine]
kv_blocks = 600
[engine.levels]
disk_gib = 0.1
slab_mib = 8
stage_mib = 16
"""
SECRETS = ("PGPASSWORD", "AWS_SECRET_ACCESS_KEY", "HOOK_SECRET")


@pytest.fixture
def secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put secrets into the environment that the server is started with."""
    for name in SECRETS:
        monkeypatch.setenv(name, "hunter2")


@pytest.fixture
def attacked(secrets: None, start_server: StartServer) -> AttackedServer:
    """A server with a storage process, whose sandboxes have been started by a grammar."""
    server = start_server(LEVELS)
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}
    asked = server.chat(response_format=form, max_tokens=8)
    server.ask(server.tenant("attacker"), "/v1/chat/completions", asked)
    quiet = server.ask(server.tenant("quiet"), "/v1/chat/completions", server.chat())
    assert quiet.status == 200
    return server


def modules_below(pid: int) -> dict[int, str]:
    """Return the modules that the processes below one run, by their ids; one of each."""
    found: dict[int, str] = {}
    for module, child in children(pid).items():
        found[child] = module
        found |= modules_below(child)
    return found


def test_children_have_no_secret_and_write_no_core(attacked: AttackedServer) -> None:
    """Engines parse model files, sandboxes what clients send; neither needs a password."""
    found = modules_below(attacked.pid)

    assert {"engine.server.server", "engine.grammar.sandbox", *OWES_WORK} <= {*found.values()}
    for pid, module in found.items():
        environment = Path(f"/proc/{pid}/environ").read_bytes()
        assert b"hunter2" not in environment, module
        limits = Path(f"/proc/{pid}/limits").read_text().splitlines()
        core = next(line for line in limits if line.startswith("Max core file size"))
        assert core.split()[4:6] == ["0", "0"], (module, core)


STUCK_COMPILER = """#!/bin/sh
echo $PPID > {folder}/asked
read nothing < {folder}/never
"""


def test_an_engine_that_waits_for_a_compiler_ends_with_its_gateway(
    tiny_model: str, tmp_path: Path
) -> None:
    """No model is loaded and no thread is stopped: its core's thread waits for another process."""
    for name in ("asked", "never"):
        os.mkfifo(tmp_path / name)
    compiler = tmp_path / "gcc"
    compiler.write_text(STUCK_COMPILER.format(folder=tmp_path))
    compiler.chmod(0o700)
    settings = tmp_path / "settings.toml"
    settings.write_text(SETTINGS)
    environment = {**os.environ, "HOME": str(tmp_path), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = serve_command(tiny_model, tmp_path / "data", settings)
    # Open for both, so that no end of the pipes waits for the other.
    asked, never = (os.open(tmp_path / name, os.O_RDWR) for name in ("asked", "never"))
    gateway = spawn(command, tmp_path / "server.log", environment)
    try:
        assert select.select([asked], [], [], PATIENCE_S)[0], "the engine compiles nothing"
        engine = os.pidfd_open(int(os.read(asked, 20)))
        gateway.kill()
        ended, _, _ = select.select([engine], [], [], PATIENCE_S)
        if not ended:
            signal.pidfd_send_signal(engine, signal.SIGKILL)
        os.close(engine)
    finally:
        gateway.kill()
        gateway.communicate()
        os.write(never, b"\n")
        os.close(asked)
        os.close(never)

    assert ended


def test_an_engine_in_the_middle_of_answers_ends_with_a_gateway_that_reads_none(
    attacked: AttackedServer,
) -> None:
    """The gateway is stopped first, so what the engine has to say fills the socket."""
    engine = children(attacked.pid)["engine.server.server"]
    body = json.dumps(attacked.chat(max_tokens=400, stream=True)).encode()
    key = attacked.tenant("another")
    head = attacked.head(key, "/v1/chat/completions", f"Content-Length: {len(body)}")
    with attacked.connect() as client:
        client.sendall(head + body)
        assert client.recv(1)
        os.kill(attacked.pid, signal.SIGSTOP)
        end = os.pidfd_open(engine)
        os.kill(attacked.pid, signal.SIGKILL)
        ended, _, _ = select.select([end], [], [], PATIENCE_S)
        if not ended:
            os.kill(engine, signal.SIGKILL)
        os.close(end)

    assert ended


def test_no_process_outlives_a_killed_gateway(attacked: AttackedServer) -> None:
    """Not even one that is stopped in the middle of anything; those that owe work do it first."""
    found = modules_below(attacked.pid)
    with ExitStack() as opened:
        ends = {}
        for pid, module in found.items():
            ends[os.pidfd_open(pid)] = pid, module
        for end in ends:
            opened.callback(os.close, end)
        for pid in found:
            os.kill(pid, signal.SIGSTOP)
        os.kill(attacked.pid, signal.SIGKILL)
        attacked.server.process.wait(PATIENCE_S)
        for pid, module in found.items():
            if module in OWES_WORK:
                os.kill(pid, signal.SIGCONT)
        left = dict(ends)
        while left:
            ready, _, _ = select.select(list(left), [], [], PATIENCE_S)
            if not ready:
                break
            for end in ready:
                del left[end]
        for pid, _ in left.values():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    assert not left
