"""The engine's process from outside: who may talk to it, and when it ends."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import stat
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.api import (
    PROTOCOL_VERSION,
    CacheGrant,
    Cancel,
    Finished,
    Request,
    Sampling,
    Started,
    Submit,
    Tokens,
)
from engine.client.client import SocketEngine
from engine.config import EngineConfig
from engine.errors import EngineError
from engine.protocol import Hello, Rejected, Upward, downward_decoder, encode

CONFIG = EngineConfig(heartbeat_s=0.05, drain_timeout_s=20.0, prefill_chunk_tokens_max=16)
TOKEN = "the-token-of-this-boot"
DEADLINE_S = 60.0
LONG = 8_000


def request(name: str, max_tokens: int = 4, prompt: tuple[int, ...] = (1, 2, 3)) -> Request:
    return Request(name, prompt, max_tokens, CacheGrant(b"n"), Sampling(temperature=0))


class Child:
    """An engine process, its socket and what it logged."""

    def __init__(self, process: asyncio.subprocess.Process, path: Path) -> None:
        self.process = process
        self.path = path

    async def event(self, name: str) -> dict[str, Any]:
        """The next log line of that event."""
        assert self.process.stderr is not None
        async with asyncio.timeout(DEADLINE_S):
            while line := await self.process.stderr.readline():
                facts: dict[str, Any] = json.loads(line)
                if facts["event"] == name:
                    return facts
        raise AssertionError(f"it ended without {name}")

    async def ended(self) -> int:
        """Its exit status."""
        async with asyncio.timeout(DEADLINE_S):
            return await self.process.wait()


@asynccontextmanager
async def child(folder: Path, fault: str = "") -> AsyncIterator[Child]:
    path = folder / "engine.sock"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.unit.engine.server.fake_engine_process"),
        stdin=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdin is not None
    settings = {
        "socket_path": str(path),
        "token": TOKEN,
        "model_dir": f"fake/{fault}",
        "config": msgspec.to_builtins(CONFIG),
    }
    process.stdin.write(json.dumps(settings).encode() + b"\n")
    await process.stdin.drain()
    try:
        yield Child(process, path)
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def say(path: Path, *messages: Upward) -> list[Any]:
    """Everything the engine answers to these until it hangs up."""
    reader, writer = await asyncio.open_unix_connection(str(path))
    for message in messages:
        writer.write(encode(message))
    async with asyncio.timeout(DEADLINE_S):
        data = await reader.read(-1)
    writer.close()
    return list(downward_decoder().feed(data))


async def first(engine: SocketEngine, asked: Request, kind: type) -> Any:
    stream = engine.submit(asked)
    async with asyncio.timeout(DEADLINE_S):
        async for event in stream:
            if isinstance(event, kind):
                return stream
    raise AssertionError(f"no {kind.__name__}")


@pytest.mark.parametrize(
    "opening",
    [Hello(PROTOCOL_VERSION, "wrong"), Hello(99, TOKEN), Cancel("a")],
    ids=["token", "version", "none"],
)
async def test_a_stranger_is_shown_the_door(tmp_path: Path, opening: Upward) -> None:
    """Wrong token, another version, no hello: one clear answer, no service, and others go on."""
    async with child(tmp_path) as engine:
        await engine.event("ready")

        answers = await say(engine.path, opening)

        assert [type(answer) for answer in answers] == [Rejected]
        assert TOKEN not in answers[0].message
        friend = await SocketEngine.connect(engine.path, TOKEN)
        await first(friend, request("b"), Finished)
        await friend.close()


async def test_the_socket_is_its_owners_alone(tmp_path: Path) -> None:
    """Other users of the machine cannot even knock."""
    async with child(tmp_path) as engine:
        await engine.event("ready")

        assert stat.S_IMODE(engine.path.stat().st_mode) == 0o600


async def test_garbage_costs_its_sender_the_connection_only(tmp_path: Path) -> None:
    """A broken peer must not break the engine for another."""
    async with child(tmp_path) as engine:
        await engine.event("ready")
        friend = await SocketEngine.connect(engine.path, TOKEN)
        reader, writer = await asyncio.open_unix_connection(str(engine.path))

        writer.write(encode(Hello(PROTOCOL_VERSION, TOKEN)) + b"\x04\x00\x00\x00junk")
        async with asyncio.timeout(DEADLINE_S):
            await reader.read(-1)
        writer.close()

        await first(friend, request("b"), Finished)
        await friend.close()


async def test_a_second_connection_after_a_lost_one_finds_blocks_free(tmp_path: Path) -> None:
    """What a lost gateway had asked for is cancelled; the next one starts clean."""
    async with child(tmp_path) as engine:
        await engine.event("ready")
        lost = await SocketEngine.connect(engine.path, TOKEN)
        await first(lost, request("a", LONG), Tokens)
        await lost.close()

        again = await SocketEngine.connect(engine.path, TOKEN)
        async with asyncio.timeout(DEADLINE_S):
            while (stats := await again.get_stats()).running:
                pass

        assert stats.pinned_blocks == 0
        await first(again, request("a"), Finished)
        await again.close()


async def test_the_parents_death_is_the_engines(tmp_path: Path) -> None:
    """No engine may hold a device's memory for a gateway that is gone."""
    async with child(tmp_path) as engine:
        await engine.event("ready")
        assert engine.process.stdin is not None

        engine.process.stdin.close()

        assert await engine.ended() == 0


async def test_the_parents_death_ends_a_step_that_hangs(tmp_path: Path) -> None:
    """An engine stuck in a kernel must not outlive its gateway either."""
    async with child(tmp_path, "hang") as engine:
        await engine.event("ready")
        client = await SocketEngine.connect(engine.path, TOKEN)
        client.submit(request("a"))
        assert engine.process.stdin is not None

        engine.process.stdin.close()

        assert await engine.ended() == 0
        await client.close()


async def test_sigterm_drains_and_a_second_one_does_not_wait(tmp_path: Path) -> None:
    """The first lets answers finish; the second is for somebody who cannot wait."""
    async with child(tmp_path) as engine:
        await engine.event("ready")
        client = await SocketEngine.connect(engine.path, TOKEN)
        stream = await first(client, request("a", LONG), Started)

        engine.process.send_signal(signal.SIGTERM)
        await engine.event("draining")
        refused = await anext(client.submit(request("b")))
        engine.process.send_signal(signal.SIGTERM)

        assert isinstance(refused, Finished)
        assert refused.code == "draining"
        assert await engine.ended() == 0
        end = [event async for event in stream][-1]
        assert isinstance(end, Finished)
        assert end.code == "engine_died"
        await client.close()


async def test_sigterm_while_idle_ends_it(tmp_path: Path) -> None:
    """Nothing to finish: nothing to wait for."""
    async with child(tmp_path) as engine:
        await engine.event("ready")

        engine.process.send_signal(signal.SIGTERM)

        assert await engine.ended() == 0


async def test_a_model_that_is_missing_is_told_to_whoever_waits(tmp_path: Path) -> None:
    """With its code, so that it is not tried again."""
    async with child(tmp_path, "missing") as engine:
        await engine.event("loading_failed")

        with pytest.raises(EngineError) as caught:
            await SocketEngine.connect(engine.path, TOKEN)

        assert caught.value.code == "not_found"


async def test_a_gateway_that_does_not_read_holds_the_engine_not_its_memory(tmp_path: Path) -> None:
    """Outboxes are bounded: the engine waits, and goes on when the gateway reads again."""
    async with child(tmp_path) as engine:
        await engine.event("ready")
        reader, writer = await asyncio.open_unix_connection(str(engine.path))
        writer.write(encode(Hello(PROTOCOL_VERSION, TOKEN)))
        before = _resident_bytes(engine.process.pid)

        prompt = tuple(range(60)) * 30
        count = 2_000
        for number in range(count):
            writer.write(encode(Submit(request(f"{number}", 1, (64, *prompt)))))
        await writer.drain()
        decoder = downward_decoder()
        ends = 0
        async with asyncio.timeout(DEADLINE_S):
            while ends < count:
                for frame in decoder.feed(await reader.read(1 << 16)):
                    ends += sum(isinstance(m, Finished) for m in getattr(frame, "messages", ()))

        assert _resident_bytes(engine.process.pid) - before < 64 * 2**20
        writer.close()


async def test_its_log_can_be_closed(tmp_path: Path) -> None:
    """Nobody to log to is no reason to stop."""
    async with child(tmp_path) as engine:
        await engine.event("ready")
        assert engine.process.stderr is not None
        engine.process.stderr._transport.close()  # type: ignore[attr-defined]

        stranger = await say(engine.path, Hello(PROTOCOL_VERSION, "wrong"))
        friend = await SocketEngine.connect(engine.path, TOKEN)

        assert len(stranger) == 1
        await first(friend, request("b"), Finished)
        engine.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(DEADLINE_S):
            assert await engine.process.wait() == 0
        await friend.close()


def _resident_bytes(pid: int) -> int:
    pages = Path(f"/proc/{pid}/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")
