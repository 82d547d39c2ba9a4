"""What an engine elsewhere costs, and how soon its loss is seen: python -m tests.bench.replicas

[frames wire loss partition processes] [--rounds N]. Real engine processes over the fake runner,
which computes nothing, so the wire is all there is; one machine, loopback, TLS.

`frames`: a step's frame of 64 tokens from one end to the other, over a socket pair and over TLS:
processor time of both ends together, in one process. `wire`: the same streams by turns from an
engine of this gateway, over its socket, and from one elsewhere: processor time of each side for an
output token, tokens a second, and pairs of single requests for the first token. On a busy machine
only processor time and medians of pairs say something. `loss`: an engine is stopped, gets a
request, and is killed: time from the kill to the first token of another engine. `partition`:
packets to one end are dropped: time until the gateway takes the engine for lost. `processes`: 64
streams by turns through gateways of 1, 2 and 4 processes, and as many for a process through that
of one, over two engines whose steps take 20 ms: processor time of the gateway's processes, and of
those that they start, for an output token and while nothing runs.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Final

from engine.api import CacheGrant, Request, SampledToken, Sampling, Tokens
from engine.client.frame_wire import FrameWire
from engine.client.tls_files import tls_context
from engine.client.tls_wire import TlsWire
from engine.config import EngineConfig
from engine.model_store import prepare
from engine.plan import StepResult
from engine.protocol import encode_step
from engine.server.server import serve_process
from gateway.engines.composition import own_engine
from gateway.engines.replicas import Replicas
from tests.bench.overhead.load import Load, request_of
from tests.bench.overhead.null_gateway import Ready
from tests.bench.overhead.processor_time import processor_s
from tests.bench.results import Results, middle_and_spread, print_line
from tests.crash.deaf_sockets import deaf
from tests.crash.fleet import COMMAND, Fleet, fleet_of, gateway_settings
from tests.crash.quick_engine import quick_core
from tests.crash.test_replicated_server import kept_engines
from tests.fakes import FakeRunner
from tests.server_process import Server, children, run_server
from tests.unit.engine.server.fleet_certificates import certificate
from tests.unit.gateway.shared.valkey_server import ValkeyServer
from tests.unit.tenancy.storage.postgres_server import Server as Postgres

CONFIG: Final = EngineConfig(heartbeat_s=0.25)
STREAMS, TOKENS, PROMPT_TOKENS = 64, 128, 40
PAIRS_A_ROUND: Final = 30
FRAMES: Final = 2_000
STEP_S: Final = 0.02
IDLE_S: Final = 2.0
PACED: Final = (sys.executable, "-c", f"from {__spec__.name} import paced; paced()")
TICKS_A_SECOND: Final = os.sysconf("SC_CLK_TCK")


def request(name: str, tokens: int) -> Request:
    """Return a greedy request whose prompt shares nothing with those of other names."""
    seed = sum(name.encode())
    prompt = tuple((seed * 7 + place * place) % 64 for place in range(PROMPT_TOKENS))
    return Request(name, prompt, tokens, CacheGrant(name.encode()), Sampling(temperature=0))


class Side:
    """One way to an engine: replicas, and the engine's process."""

    def __init__(self, replicas: Replicas, pid: int) -> None:
        self.replicas, self._pid = replicas, pid
        self._names = 0
        self.ours_us: list[float] = []
        self.engines_us: list[float] = []
        self.tokens_a_s: list[float] = []
        self.first_ms: list[float] = []

    async def run(self) -> None:
        """Run all streams once, and note what a token cost."""
        began_s, ours_s, theirs_s = time.monotonic(), time.process_time(), self._engine_s()
        await asyncio.gather(*(self._read(self._name(), TOKENS) for _ in range(STREAMS)))
        count = STREAMS * TOKENS
        self.tokens_a_s.append(count / (time.monotonic() - began_s))
        self.ours_us.append((time.process_time() - ours_s) / count * 1e6)
        self.engines_us.append((self._engine_s() - theirs_s) / count * 1e6)

    def forget(self) -> None:
        """Drop the figures of a first run, which warms both ends."""
        for figures in (self.ours_us, self.engines_us, self.tokens_a_s, self.first_ms):
            figures.clear()

    async def first(self) -> None:
        """Note the milliseconds to the first token of a request alone."""
        began_s = time.monotonic()
        await self._read(self._name(), 1)
        self.first_ms.append((time.monotonic() - began_s) * 1e3)

    def _name(self) -> str:
        self._names += 1
        return f"r{self._names}"

    async def _read(self, name: str, tokens: int) -> None:
        found = 0
        async for event in self.replicas.submit(request(name, tokens)):
            if isinstance(event, Tokens):
                found += len(event.tokens)
        assert found == tokens, f"{found} tokens of {tokens}"

    def _engine_s(self) -> float:
        """Return the processor seconds of the engine's process, in hundredths."""
        fields = Path(f"/proc/{self._pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS_A_SECOND


async def measure_frames(rounds: int, results: Results) -> None:
    """Send frames by turns over a socket pair and over TLS."""
    steps = [Tokens(f"r{number}", 0, (SampledToken(number),)) for number in range(STREAMS)]
    (frame,) = encode_step(0, 0, tuple(steps))
    us: dict[str, list[float]] = {"here": [], "elsewhere": []}
    async with both_ends(over_tls=False) as plain, both_ends(over_tls=True) as sealed:
        for number in range(rounds + 1):
            for name, ends in (("here", plain), ("elsewhere", sealed))[:: -1 if number % 2 else 1]:
                took_us = await ends.pass_on(frame) * 1e6
                if number:  # the first ones warm both
                    us[name].append(took_us)
    for name, values in us.items():
        print_line(f"frame of {len(frame)} bytes, {name}: {middle_and_spread(values, '.1f')} us")
        results.add({"what": "frame_us", "where": name, "median": statistics.median(values)})


class Ends:
    """Two ends of a connection in this process."""

    def __init__(self) -> None:
        self.sender: FrameWire | TlsWire
        self._came = 0
        self._all = asyncio.Event()

    def take(self, body: bytes) -> None:
        """Count a frame."""
        self._came += 1
        if self._came == FRAMES:
            self._all.set()

    async def pass_on(self, frame: bytes) -> float:
        """Return the processor seconds of this process for a frame, with a turn of the loop for
        each."""
        self._came = 0
        self._all.clear()
        began_s = time.process_time()
        for _ in range(FRAMES):
            self.sender.send(frame)
            await asyncio.sleep(0)
        await self._all.wait()
        return (time.process_time() - began_s) / FRAMES


@asynccontextmanager
async def both_ends(*, over_tls: bool) -> AsyncIterator[Ends]:
    """Yield the ends of a socket pair, or of a TLS connection on loopback."""
    ends = Ends()
    if not over_tls:
        left, right = socket.socketpair()
        reader: FrameWire | TlsWire = FrameWire(right, ends.take, lambda: None)
        ends.sender = FrameWire(left, lambda body: None, lambda: None)
    else:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            listening.setblocking(False)
            accepted, dialled = TlsWire(), TlsWire()
            context = tls_context(certificate("gateway/g0"), is_server=False)
            loop = asyncio.get_running_loop()
            waiting = asyncio.create_task(loop.sock_accept(listening))
            dialling = asyncio.create_task(
                dialled.dial("127.0.0.1", listening.getsockname()[1], context)
            )
            end, _ = await waiting
            await accepted.accept(end, tls_context(certificate("engine/e0"), is_server=True))
            await dialling
        reader = dialled.follow(ends.take, lambda: None)
        ends.sender = accepted.follow(lambda body: None, lambda: None)
    try:
        yield ends
    finally:
        ends.sender.close()
        reader.close()


async def measure_wire(rounds: int, results: Results) -> None:
    """Compare an engine elsewhere with one of this gateway, by turns."""
    here = own_engine(Path("fake"), CONFIG, lambda event, facts: None, command=COMMAND)
    here.start()
    await here.wait_ready()
    try:
        async with fleet_of("e0", config=CONFIG) as fleet:
            assert here.info is not None
            sides = (
                Side(here, here.info.pid),
                Side(fleet.replicas, await fleet.kept["e0"].pid()),
            )
            for side in sides:
                await side.run()
                side.forget()
            for number in range(rounds):
                order = sides if number % 2 else sides[::-1]
                for side in order:
                    await side.run()
                for _ in range(PAIRS_A_ROUND):
                    for side in order:
                        await side.first()
    finally:
        await here.close()
    report_wire(*sides, results)


def report_wire(here: Side, elsewhere: Side, results: Results) -> None:
    """Print what both cost, and the differences of pairs."""
    for name in ("ours_us", "engines_us", "tokens_a_s", "first_ms"):
        ours, theirs = getattr(here, name), getattr(elsewhere, name)
        more = [their - our for our, their in zip(ours, theirs, strict=True)]
        print_line(
            f"{name}: here {middle_and_spread(ours, '.2f')}, elsewhere"
            f" {middle_and_spread(theirs, '.2f')}, more {statistics.median(more):.2f}"
            f" (quartiles {', '.join(f'{one:.2f}' for one in statistics.quantiles(more, n=4))})"
        )
        figures = {"here": statistics.median(ours), "elsewhere": statistics.median(theirs)}
        results.add({"what": name, **figures, "more": statistics.median(more)})


async def measure_loss(rounds: int, results: Results) -> None:
    """Kill the engine that has a request which it has not begun."""
    took_ms: list[float] = []
    async with fleet_of("e0", "e1", config=CONFIG) as fleet:
        for number in range(rounds):
            for name in ("e0", "e1"):
                await serving(fleet, name)
            victim, stream = await submit_to_a_stopped_engine(fleet, number)
            began_s = time.monotonic()
            os.kill(victim, signal.SIGKILL)
            async for event in stream:
                if isinstance(event, Tokens):
                    break
            took_ms.append((time.monotonic() - began_s) * 1e3)
            await stream.aclose()
    note("kill to a retried first token, ms", took_ms, results)


async def submit_to_a_stopped_engine(fleet: Fleet, number: int) -> tuple[int, Any]:
    """Stop both engines, submit a request, let the other one go on; return the process that has
    it."""
    pids = {name: await fleet.kept[name].pid() for name in fleet.kept}
    for pid in pids.values():
        os.kill(pid, signal.SIGSTOP)
    stream = fleet.replicas.submit(request(f"lost {number}", 4))
    victim = await fleet.serving(f"lost {number}")
    for name, pid in pids.items():
        if name != victim:
            os.kill(pid, signal.SIGCONT)
    return pids[victim], stream


async def measure_partition(rounds: int, results: Results) -> None:
    """Cut the network one way, then the other, while a stream runs."""
    for who in ("gateway", "engine"):
        took_ms: list[float] = []
        for number in range(rounds):
            async with fleet_of("e0", "e1", config=CONFIG) as fleet:
                stream = fleet.replicas.submit(request(f"cut {number}", 8_000))
                await stream.next_batch()
                first = await fleet.serving(f"cut {number}")
                pid = os.getpid() if who == "gateway" else await fleet.kept[first].pid()
                with deaf(pid, fleet.kept[first].port):
                    began_s = time.monotonic()
                    await fleet.has_told("replica_lost", first)
                    took_ms.append((time.monotonic() - began_s) * 1e3)
                await stream.aclose()
        note(f"nothing reaches the {who}, lost after ms", took_ms, results)


class PacedRunner(FakeRunner):
    """Computes nothing, and takes its time for a step."""

    def collect(self) -> StepResult:
        time.sleep(STEP_S)
        return super().collect()


def paced() -> None:
    """Serve as an engine's process whose steps take `STEP_S`."""
    serve_process(lambda settings: quick_core(settings, PacedRunner))


async def measure_processes(rounds: int, results: Results) -> None:
    """Stream through gateways of 1, 2 and 4 processes by turns, each with a database of its own."""
    from tests.models import tiny_config, write_folder  # imports torch, which no engine here needs

    async with AsyncExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory()))
        model = write_folder(folder / "tiny", tiny_config(context=1024))
        card = prepare("tiny", model, folder / "prepared")
        postgres = Postgres()
        opened.callback(postgres.close)
        valkey = ValkeyServer(folder)
        opened.callback(valkey.kill)
        kept = await opened.enter_async_context(kept_engines(card, CONFIG, PACED))
        for one in kept.values():
            await one.pid()
        ports = {name: one.port for name, one in kept.items()}
        sides = []
        for number, count in enumerate((1, 2, 4)):
            shared = valkey.url[:-1] + str(number)
            settings = folder / f"{count}.toml"
            settings.write_text(
                f"[server]\nprocesses = {count}\n"
                f'[tenancy]\ndatabase = "{postgres.url(postgres.database())}"\n'
                f"[limits]\nrequests_per_tenant_max = {STREAMS}\n"
                f"{gateway_settings(ports, f'g{count}', shared=shared)}"
            )
            server = opened.enter_context(run_server(model, folder / f"data{count}", settings))
            sides.append(GroupSide(count, STREAMS, server))
        sides += [GroupSide(1, STREAMS // count, sides[0].server) for count in (2, 4)]
        for side in sides:
            await side.run()
            side.forget()
        for number in range(rounds):
            for side in sides[:: -1 if number % 2 else 1]:
                await side.run()
    for side in sides:
        for what, values in side.found.items():
            print_line(f"{side.name}, {what}: {middle_and_spread(values, '.1f')} of {len(values)}")
            results.add({"what": what, "of": side.name, "median": statistics.median(values)})


class GroupSide:
    """A gateway of `count` processes, and so many streams over it."""

    def __init__(self, count: int, streams: int, server: Server) -> None:
        self.name = f"{count} processes, {streams} streams"
        self.server = server
        self._count, self._streams = count, streams
        self.found: dict[str, list[float]] = {}
        """Microseconds of processor time: of the gateway's processes and of their children for a
        token, and of each process in a millisecond without requests."""

    def forget(self) -> None:
        """Drop the figures of a first run, which warms all."""
        self.found.clear()

    async def run(self) -> None:
        """Run all streams once, each over a connection of its own, then none for a while."""
        parent = self.server.process.pid
        pids = [parent] if self._count == 1 else _children(parent)
        below = [child for pid in pids for child in children(pid).values()]
        assert len(pids) == self._count
        began_s = _used_s(pids), _used_s(below)
        await asyncio.gather(*(self._stream() for _ in range(self._streams)))
        ended_s = _used_s(pids), _used_s(below)
        await asyncio.sleep(IDLE_S)
        idle_s = _used_s(pids) - ended_s[0]
        tokens = self._streams * TOKENS
        self._note("gateway", (ended_s[0] - began_s[0]) / tokens * 1e6)
        self._note("children", (ended_s[1] - began_s[1]) / tokens * 1e6)
        self._note("idle", idle_s / self._count / IDLE_S * 1e3)

    def _note(self, what: str, value: float) -> None:
        self.found.setdefault(what, []).append(value)

    async def _stream(self) -> None:
        ready = Ready(self.server.url, self.server.key, "tiny", 0)
        sent = request_of(ready, Load(STREAMS, 0, TOKENS, is_stream=True), ("Connection: close",))
        host, _, port = ready.url.rpartition("//")[2].partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(sent)
        answer = await reader.read()
        writer.close()
        assert b'"finish_reason":"length"' in answer, answer[-500:]


def _used_s(pids: list[int]) -> float:
    """Return the processor seconds that processes have used."""
    return sum(map(processor_s, pids))


def _children(pid: int) -> list[int]:
    """Return the ids of a process's running children."""
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(one) for one in found]


async def serving(fleet: Fleet, name: str) -> None:
    """Wait until the gateway has an engine that lives."""
    while not fleet.replica(name).ready():
        await fleet.changed()
    await fleet.replica(name).running().get_stats()


def note(what: str, values: list[float], results: Results) -> None:
    """Print a figure with its spread."""
    print_line(f"{what}: {middle_and_spread(values, '.0f')} of {len(values)}")
    results.add({"what": what, "median": statistics.median(values), "most": max(values)})


PARTS: dict[str, Callable[[int, Results], Awaitable[None]]] = {
    "frames": measure_frames,
    "wire": measure_wire,
    "loss": measure_loss,
    "partition": measure_partition,
    "processes": measure_processes,
}


async def measure(parts: list[str], rounds: int, results: Results) -> None:
    """Measure the parts one after another."""
    for part in parts:
        await PARTS[part](rounds, results)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", default=list(PARTS), metavar="PART")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = Results()
    asyncio.run(measure(options.parts, options.rounds, found))
    found.write(options.json)
