"""Certificates of engines, and connections to them: what is refused, and what is told."""

from __future__ import annotations

import asyncio
import re
import socket
from pathlib import Path

import pytest

from engine.client import tls_wire
from engine.client.tls_files import TlsError, check_certificate, tls_context
from engine.client.tls_wire import TlsWire
from engine.wire import frame_body
from tests.unit.engine.server.fleet_certificates import certificate, expired


def test_a_holder_s_own_certificate_is_checked_as_the_others_do(tmp_path: Path) -> None:
    """Its file is named, with what is wrong and what would be right."""
    check_certificate(certificate("engine/e0"), "engine/e0")
    mixed = tmp_path / "mixed"
    mixed.mkdir()
    for name, of in (
        ("certificate.pem", "ours"), ("key.pem", "ours"), ("authority.pem", "theirs")
    ):  # fmt: skip
        (mixed / name).write_bytes((certificate("engine/e0", of) / name).read_bytes())
    wrong = {
        expired("engine/e0"): "certificate has expired; expected one that is valid today",
        certificate("engine/e1"): "names 'engine/e1'; expected 'engine/e0'",
        certificate("gateway/e0"): "names 'gateway/e0'; expected 'engine/e0'",
        mixed: "expected one of the authority in authority.pem",
    }
    for folder, says in wrong.items():
        with pytest.raises(TlsError, match=re.escape(f"{folder / 'certificate.pem'}: ")) as refused:
            check_certificate(folder, "engine/e0")
        assert says in refused.value.message


async def test_an_address_that_accepts_and_never_answers_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A keeper listens while its engine is drained, or loads its model."""
    monkeypatch.setattr(tls_wire, "HANDSHAKE_S", 0.05)
    context = tls_context(certificate("gateway/g0"), is_server=False)
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        pytest.raises(
            TimeoutError, match=r"no engine has answered for .*: it is drained, or still"
        ),
    ):
        await TlsWire().dial("127.0.0.1", silent.getsockname()[1], context)


async def connected() -> tuple[TlsWire, TlsWire]:
    """Return both ends of a connection, the engine's first."""
    engine, gateway = TlsWire(), TlsWire()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setblocking(False)
        accepting = asyncio.ensure_future(asyncio.get_running_loop().sock_accept(listening))
        context = tls_context(certificate("gateway/g0"), is_server=False)
        dialling = asyncio.ensure_future(
            gateway.dial("127.0.0.1", listening.getsockname()[1], context)
        )
        end, _ = await accepting
        await engine.accept(end, tls_context(certificate("engine/e0"), is_server=True))
        await dialling
    return engine, gateway


async def test_frames_of_a_turn_arrive_in_order_and_are_told_as_sent() -> None:
    """The first one leaves at once, the others in one write; a caller may wait for the last."""
    engine, gateway = await connected()
    got: list[bytes] = []
    arrived, sent = asyncio.Event(), asyncio.Event()
    numbers = [b"%d" % number for number in range(9)]

    def take(body: bytes) -> None:
        got.append(body)
        if body == numbers[-1]:
            arrived.set()

    gateway.follow(take, lambda: None)
    engine.follow(lambda body: None, lambda: None, sent.set)
    for number in numbers:
        engine.send(frame_body(number))
    waits = engine.unsent
    await sent.wait()
    left = engine.unsent
    await arrived.wait()
    engine.close()
    gateway.close()

    assert got == numbers
    assert (waits, left) == (len(numbers[1:]) * len(frame_body(b"1")), 0)


async def test_frames_before_a_close_leave() -> None:
    """Such as why a gateway is refused, which goes before the end."""
    engine, gateway = await connected()
    got: list[bytes] = []
    ended = asyncio.Event()
    gateway.follow(got.append, ended.set)
    for word in (b"a", b"b"):
        engine.send(frame_body(word))
    engine.close()
    await ended.wait()

    assert got == [b"a", b"b"]


@pytest.mark.parametrize("turns", range(5))
async def test_a_peer_that_is_gone_is_not_written_to(
    turns: int, caplog: pytest.LogCaptureFixture
) -> None:
    """asyncio would log each frame. `turns`: of the loop, between its end and the first frame."""
    engine, gateway = await connected()
    ended = asyncio.Event()
    engine.follow(lambda body: None, ended.set)
    gateway.close()
    for _ in range(turns):
        await asyncio.sleep(0)
    while not ended.is_set():
        for _ in range(10):
            engine.send(frame_body(b"frame"))
        await asyncio.sleep(0)
    engine.close()

    assert [one.message for one in caplog.records if one.name == "asyncio"] == []
