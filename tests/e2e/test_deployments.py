"""The proxies of deploy/, started for real before a gateway."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from aiohttp import ClientSession, ClientTimeout

from tests.e2e.installed_wheel import ROOT
from tests.ports import free_ports
from tests.tools.binaries import needs
from tests.unit.gateway.gateway_fixture import PATIENCE_S, GatewayFixture

pytestmark = pytest.mark.slow

DEPLOY = ROOT / "deploy"
NAME = "llm.example.org"


@contextmanager
def daemon(command: list[str], pid_file: Path, **environment: str) -> Iterator[None]:
    """Run a command that returns when its daemon listens; end the daemon afterwards."""
    said = pid_file.with_suffix(".log")
    with said.open("w") as log:  # a pipe would be the daemon's too, and end with it only
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            check=False,
            env={**os.environ, **environment},
            timeout=PATIENCE_S,
        )
    assert done.returncode == 0, said.read_text()
    try:
        yield
    finally:
        os.kill(int(pid_file.read_text()), signal.SIGTERM)


@contextmanager
def nginx(folder: Path, upstream: int, port: int, plain: int) -> Iterator[str]:
    """Serve deploy/nginx's file on loopback, with a certificate of its own; yield the URL."""
    command = needs("nginx")
    certificate, key = folder / "name.pem", folder / "name.key"
    words = f"{needs('openssl')} req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN={NAME}"
    made = [*shlex.split(words), "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(made, check=True, capture_output=True)
    text = (DEPLOY / "nginx" / "trunkline.conf").read_text()
    for old, new in (
        ("listen 443", f"listen 127.0.0.1:{port}"),
        ("listen 80;", f"listen 127.0.0.1:{plain};"),
        ("server 127.0.0.1:8080", f"server 127.0.0.1:{upstream}"),
        ("/etc/ssl/private/llm.example.org.key", str(key)),
        ("/etc/ssl/llm.example.org.pem", str(certificate)),
    ):
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    (folder / "trunkline.conf").write_text(text)
    temporary = "".join(
        f"{kind}_temp_path {folder}/{kind};\n"
        for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    main = folder / "nginx.conf"
    main.write_text(
        f"pid {folder}/nginx.pid;\nerror_log {folder}/error.log;\nevents {{}}\n"
        f"http {{\naccess_log off;\n{temporary}include {folder}/trunkline.conf;\n}}\n"
    )
    with daemon([command, "-c", str(main), "-p", str(folder)], folder / "nginx.pid"):
        yield f"https://127.0.0.1:{port}"


@contextmanager
def caddy(folder: Path, upstream: int, port: int, _: int) -> Iterator[str]:
    """Serve deploy/caddy's file on loopback, with a certificate that Caddy signs; yield the URL."""
    file = folder / "Caddyfile"
    only_here = "{\n\tadmin off\n\tauto_https disable_redirects\n\tskip_install_trust\n"
    only_here += "\tdefault_bind 127.0.0.1\n}\n"
    file.write_text(only_here + (DEPLOY / "caddy" / "Caddyfile").read_text())
    command = [needs("caddy"), "start", "--config", str(file), "--adapter", "caddyfile"]
    places = {name: str(folder) for name in ("HOME", "XDG_DATA_HOME", "XDG_CONFIG_HOME")}
    with daemon(
        [*command, "--pidfile", str(folder / "caddy.pid")],
        folder / "caddy.pid",
        TRUNKLINE_NAME=f"localhost:{port}",
        TRUNKLINE_UPSTREAM=f"127.0.0.1:{upstream}",
        **places,
    ):
        await_certificate(port)
        yield f"https://localhost:{port}"


def await_certificate(port: int) -> None:
    """Shake hands until Caddy has signed its certificate, which it does after it listens."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        plain = socket.create_connection(("127.0.0.1", port), PATIENCE_S)
        with suppress(ssl.SSLError), context.wrap_socket(plain, server_hostname="localhost"):
            return
        plain.close()
    raise AssertionError("Caddy has no certificate")


@pytest.fixture
def ports() -> Iterator[list[int]]:
    """Yield two ports for a proxy."""
    with free_ports(2) as found:
        yield found


PROXIES = {"nginx": (nginx, {"Host": NAME}), "caddy": (caddy, {})}


@pytest.mark.parametrize("name", PROXIES)
async def test_proxy_ends_tls_and_passes_a_stream_on_at_once(
    unopened_gateway: GatewayFixture, name: str, tmp_path: Path, ports: list[int]
) -> None:
    """The first token arrives while the engine still computes; names, keys and refusals pass."""
    gateway = unopened_gateway
    gateway.set_server(hosts=(NAME, "localhost"))
    await gateway.open()
    proxy, headers = PROXIES[name]
    opened = proxy(tmp_path, gateway.port, *ports)
    url = await asyncio.to_thread(opened.__enter__)
    try:
        async with ClientSession(timeout=ClientTimeout(total=PATIENCE_S)) as session:
            sent = {**gateway.headers(), **headers}
            gateway.runner.hold_after(3)
            body = gateway.chat(stream=True, max_tokens=40)
            async with session.post(
                f"{url}/v1/chat/completions", json=body, headers=sent, ssl=False
            ) as response:
                first = await response.content.readuntil(b"\n\n")
                was_held = not gateway.entries()
                gateway.runner.release()
                rest = await response.read()
            async with session.post(
                f"{url}/v1/messages", json={}, headers=headers, ssl=False
            ) as refused:
                error = await refused.json()
    finally:
        await asyncio.to_thread(opened.__exit__, None, None, None)

    assert first.startswith(b"data: ")
    assert was_held
    assert rest.endswith(b"data: [DONE]\n\n")
    assert (refused.status, error["type"]) == (401, "error")
    await gateway.check_quiet()
    await gateway.close()
    gateway.discard()


def test_caddy_gets_a_certificate_for_another_name(tmp_path: Path) -> None:
    """Without a port the name is served on 443 with a certificate from Let's Encrypt."""
    command = [needs("caddy"), "adapt", "--config", str(DEPLOY / "caddy" / "Caddyfile")]
    environment = {**os.environ, "HOME": str(tmp_path), "TRUNKLINE_NAME": NAME}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    (server,) = json.loads(done.stdout)["apps"]["http"]["servers"].values()

    assert server["listen"] == [":443"]
    assert server["routes"][0]["match"] == [{"host": [NAME]}]
