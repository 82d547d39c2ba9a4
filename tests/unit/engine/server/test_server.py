"""The engine process from outside: what it answers, and when it exits."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.api import CacheGrant, Cancel, Finished, Request, Sampling, Started, Submit, Tokens
from engine.client.client import SocketEngine
from engine.config import EngineConfig
from engine.errors import EngineError
from engine.protocol import PROTOCOL_VERSION, Hello, Rejected, Upward, encode, read_downward
from engine.wire import Decoder

CONFIG = EngineConfig(heartbeat_s=0.05, drain_timeout_s=20.0, prefill_chunk_tokens_max=16)
DEADLINE_S = 60.0
LONG = 8_000


def request(name: str, max_tokens: int = 4, prompt: tuple[int, ...] = (1, 2, 3)) -> Request:
    return Request(name, prompt, max_tokens, CacheGrant(b"n"), Sampling(temperature=0))


class Child:
    """An engine process, the gateway's end of its socket, and its log."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        wire: socket.socket,
        model: str,
        lines: asyncio.StreamReader,
        log: asyncio.ReadTransport,
    ) -> None:
        """`lines`: its log, read through `log`."""
        self.process = process
        self.wire = wire
        self.log = log
        self._model = model
        self._lines = lines

    async def event(self, name: str) -> dict[str, Any]:
        """Return the next log line of that event."""
        async with asyncio.timeout(DEADLINE_S):
            while line := await self._lines.readline():
                facts: dict[str, Any] = json.loads(line)
                if facts["event"] == name:
                    return facts
        raise AssertionError(f"it ended without {name}")

    async def rest(self) -> str:
        """Return what the log has until its end."""
        async with asyncio.timeout(DEADLINE_S):
            return (await self._lines.read()).decode()

    async def ended(self) -> int:
        """Wait for the exit and return its status."""
        async with asyncio.timeout(DEADLINE_S):
            return await self.process.wait()

    def hello(self) -> Hello:
        return Hello(PROTOCOL_VERSION, self._model, msgspec.to_builtins(CONFIG))

    async def connect(self) -> SocketEngine:
        """Connect and wait until the model is loaded."""
        async with asyncio.timeout(DEADLINE_S):
            return await SocketEngine.connect(self.wire, self.hello())

    async def read_all(self, *messages: Upward) -> list[Any]:
        """Send messages; return all answers until the engine closes the connection."""
        reader, writer = await asyncio.open_unix_connection(sock=self.wire)
        for message in messages:
            writer.write(encode(message))
        async with asyncio.timeout(DEADLINE_S):
            data = await reader.read(-1)
        writer.close()
        return list(Decoder(read_downward).feed(data))


@asynccontextmanager
async def child(fault: str = "") -> AsyncIterator[Child]:
    ours, theirs = socket.socketpair()
    read_end, write_end = os.pipe()
    lines = asyncio.StreamReader()
    log, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(lines), os.fdopen(read_end, "rb")
    )
    with theirs:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.unit.engine.server.fake_engine_process"),
            stdin=theirs.fileno(),
            stderr=write_end,
            start_new_session=True,
        )
    os.close(write_end)
    try:
        yield Child(process, ours, f"fake/{fault}", lines, log)
    finally:
        ours.close()
        if process.returncode is None:
            process.kill()
        await process.communicate()
        log.close()


async def first(engine: SocketEngine, command: Request, kind: type) -> Any:
    stream = engine.submit(command)
    async with asyncio.timeout(DEADLINE_S):
        async for event in stream:
            if isinstance(event, kind):
                return stream
    raise AssertionError(f"no {kind.__name__}")


@pytest.mark.parametrize("opening", [Hello(99, "fake"), Cancel("a")], ids=["version", "none"])
async def test_rejects_wrong_first_message(opening: Upward) -> None:
    """Another version, or no Hello: one clear answer, then the end."""
    async with child() as engine:
        answers = await engine.read_all(opening)

        assert [type(answer) for answer in answers] == [Rejected]
        assert await engine.ended() == 1


async def test_exits_on_configuration_of_another_version() -> None:
    """The gateway sees the end; the log says why."""
    async with child() as engine:
        answers = await engine.read_all(Hello(PROTOCOL_VERSION, "fake", {"no_such_setting": 1}))
        lost = await engine.event("connection_lost")

        assert (answers, lost["reason"]) == ([], "ValidationError")
        assert await engine.ended() == 1


async def test_exits_on_protocol_error() -> None:
    """Only its own gateway can cause one, and starts another engine."""
    async with child() as engine:
        reader, writer = await asyncio.open_unix_connection(sock=engine.wire)
        writer.write(encode(engine.hello()))
        async with asyncio.timeout(DEADLINE_S):
            await reader.read(1)
            writer.write(b"\x04\x00\x00\x00junk")
            await reader.read(-1)
        lost = await engine.event("connection_lost")
        writer.close()

        assert lost["reason"] == "FrameError"
        assert await engine.ended() == 0


async def test_exits_on_command_before_the_welcome() -> None:
    """No engine runs yet that could handle it."""
    async with child() as engine:
        answers = await engine.read_all(engine.hello(), Cancel("a"))

        assert [type(answer) for answer in answers] == [Rejected]


@pytest.mark.parametrize("when", ["before its hello", "while it serves"])
async def test_exits_with_its_gateway(when: str) -> None:
    """No engine may hold a device's memory for a gateway that is gone."""
    async with child() as engine:
        if when == "while it serves":
            client = await engine.connect()
            await first(client, request("a", LONG), Tokens)
            await client.close()
        engine.wire.close()

        assert await engine.ended() == (0 if when == "while it serves" else 1)


@pytest.mark.parametrize("when", ["loading", ""])
async def test_tells_only_while_it_serves_that_its_gateway_is_gone(when: str) -> None:
    """A gateway that refuses to start, such as for a data directory in use, has its own reason;
    before it a line that its parent is gone misleads."""
    async with child(when) as engine:
        if when:
            engine.wire.sendall(encode(engine.hello()))
            await engine.event("loading")
            engine.wire.close()
        else:
            await (await engine.connect()).close()

        assert await engine.ended() == 0
        assert ("parent_gone" in await engine.rest()) == (not when)


async def test_exits_with_its_gateway_during_a_hanging_step() -> None:
    """An engine stuck in a kernel must not outlive its gateway either."""
    async with child("hang") as engine:
        client = await engine.connect()
        client.submit(request("a"))
        await client.close()

        assert await engine.ended() == 0


async def test_child_compilers_do_not_keep_the_socket_open() -> None:
    """Standard input is the null device by the time the engine loads a model."""
    async with child() as engine:
        client = await engine.connect()
        target = await asyncio.to_thread(Path(f"/proc/{engine.process.pid}/fd/0").readlink)
        await client.close()

        assert str(target) == os.devnull


async def test_sigterm_drains_and_a_second_one_exits_at_once() -> None:
    """The first lets requests finish; the second is for an operator who cannot wait."""
    async with child() as engine:
        client = await engine.connect()
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


async def test_sigterm_exits_at_once_while_idle() -> None:
    async with child() as engine:
        client = await engine.connect()

        engine.process.send_signal(signal.SIGTERM)

        assert await engine.ended() == 0
        await client.close()


async def test_rejects_missing_model_with_its_code() -> None:
    """So that it is not retried."""
    async with child("missing") as engine:
        with pytest.raises(EngineError) as caught:
            await engine.connect()

        assert caught.value.code == "not_found"


async def test_gateway_that_does_not_read_costs_bounded_memory() -> None:
    """Outboxes are bounded: the engine waits, and goes on when the gateway reads again."""
    async with child() as engine:
        reader, writer = await asyncio.open_unix_connection(sock=engine.wire)
        writer.write(encode(engine.hello()))
        await engine.event("ready")
        before = _resident_bytes(engine.process.pid)

        prompt = tuple(range(60)) * 30
        count = 2_000
        for number in range(count):
            writer.write(encode(Submit(request(f"{number}", 1, (64, *prompt)))))
        await writer.drain()
        decoder = Decoder(read_downward)
        ends = 0
        async with asyncio.timeout(DEADLINE_S):
            while ends < count:
                for frame in decoder.feed(await reader.read(1 << 16)):
                    ends += sum(isinstance(m, Finished) for m in getattr(frame, "messages", ()))

        assert _resident_bytes(engine.process.pid) - before < 64 * 2**20
        writer.close()


async def test_survives_a_closed_log() -> None:
    async with child() as engine:
        client = await engine.connect()
        engine.log.close()

        await first(client, request("b"), Finished)
        engine.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(DEADLINE_S):
            assert await engine.process.wait() == 0
        await client.close()


async def test_a_failed_step_is_logged_with_its_cause() -> None:
    """Where it was raised, and no message, which may quote a prompt. The engine continues."""
    async with child("broken") as engine:
        client = await engine.connect()

        await first(client, request("a", prompt=(1, 13)), Finished)
        failed = await engine.event("step_failed")
        await first(client, request("b"), Finished)

        assert failed["error"] == "ValueError"
        assert failed["frames"][-1].startswith("fake_engine_process.py:")
        assert "units" not in json.dumps(failed)
        await client.close()


def _resident_bytes(pid: int) -> int:
    pages = Path(f"/proc/{pid}/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")
