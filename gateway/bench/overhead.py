"""`trunkline bench gateway`: what the gateway takes beyond a bare server that says the same.

A bare mock and the whole gateway over the null engine are loaded one after the other in one run, by
the same client, so that what is compared had the same machine. Ratios and differences are what
carries over to another one. It prints nothing; `gateway.bench.cli` calls it.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from gateway.bench.client import BenchError
from gateway.bench.load import Found, Load, run
from gateway.bench.null_gateway import Ready, Settings
from gateway.bench.processor_time import processor_s
from gateway.bench.report import columns, short
from gateway.bench.workloads import percentile

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 20.0
STREAM_TOKENS = 64
TOKENS_PER_S = 64_000
"""Of all streams together: a thousand streams of 64 tokens in a second."""
STREAM_RATE_MAX = 2_000
PACE = 100
SYNCS = 50
TURNS = 3
"""Where servers are to be compared by a few hundredths, each has its turn so often."""

Say = Callable[[str], None]


class Server(Struct, frozen=True):
    """What was measured of one server under one load. Times in milliseconds: to the end of an
    answer for `unary`, to its first bytes otherwise. `cpu_us`: of its process, for each output
    token; `cpu`: which part of one core it took, and `writer` what its ledger's process took of
    another; `events`: pieces for each stream."""

    answers_per_s: float
    tokens_per_s: float
    p50_ms: float
    p99_ms: float
    cpu: float
    writer: float
    cpu_us: float
    events: float
    client_busy: float


class Line(Struct, frozen=True):
    """One load, on both; and on a gateway `without_books` (ledger, analytics), if asked for."""

    kind: str
    concurrency: int
    mock: Server
    gateway: Server
    without_books: Server | None = None

    @property
    def added_p50_ms(self) -> float:
        """What the gateway adds to the median."""
        return self.gateway.p50_ms - self.mock.p50_ms

    @property
    def added_p99_ms(self) -> float:
        """And to the slowest in a hundred."""
        return self.gateway.p99_ms - self.mock.p99_ms

    @property
    def cpu_ratio(self) -> float:
        """Processor time of the gateway for a token, over the mock's; steady on a busy machine."""
        return self.gateway.cpu_us / self.mock.cpu_us if self.mock.cpu_us else 0.0

    @property
    def ratio(self) -> float:
        """Answers of the gateway over answers of the mock."""
        return self.gateway.answers_per_s / self.mock.answers_per_s

    @property
    def books(self) -> tuple[float, float] | None:
        """(part of the answers a second, ms of the median) that ledger and analytics take."""
        bare = self.without_books
        if bare is None:
            return None
        part = 1 - self.gateway.answers_per_s / bare.answers_per_s
        return part, self.gateway.p50_ms - bare.p50_ms


class Overhead(Struct, frozen=True):
    """All lines, and where they were measured. `sync_ms`: the median fsync of 4 KiB on the disk of
    `scratch`, where the ledger was; a request waits for two. `text()` is the table."""

    model: str
    machine: dict[str, Any]
    scratch: str
    sync_ms: float
    lines: list[Line]

    def text(self) -> str:
        """For people."""
        m = self.machine
        where = f"{m['cpu']}, {m['cores']} cores, {m['system']}, commit {m['commit']}"
        disk = f"ledger in {self.scratch}, where an fsync takes {short(self.sync_ms)} ms"
        names = (
            "load", "at once", "mock/s", "gateway/s", "ratio", "p50 ms", "added", "p99 ms",
            "added", "tokens/s", "pieces", "us/token", "x mock", "core", "writer", "client",
            "books", "books ms",
        )  # fmt: skip
        rows = [names, *map(_cells, self.lines)]
        if all(line.books is None for line in self.lines):
            rows = [row[:-2] for row in rows]
        return f"{where}\n{disk}\n\n{columns(rows, range(1, len(rows[0])))}"

    def json(self) -> str:
        """For programs."""
        rows = [
            {
                **msgspec.to_builtins(line),
                "added_p50_ms": line.added_p50_ms,
                "added_p99_ms": line.added_p99_ms,
                "ratio": line.ratio,
                "cpu_ratio": line.cpu_ratio,
                "books": line.books,
            }
            for line in self.lines
        ]
        found = {**msgspec.structs.asdict(self), "lines": rows}
        return msgspec.json.format(msgspec.json.encode(found)).decode()


def _cells(line: Line) -> tuple[str, ...]:
    mock, ours = line.mock, line.gateway
    numbers = (
        mock.answers_per_s, ours.answers_per_s, line.ratio, ours.p50_ms, line.added_p50_ms,
        ours.p99_ms, line.added_p99_ms, ours.tokens_per_s, ours.events, ours.cpu_us, line.cpu_ratio,
        ours.cpu, ours.writer, ours.client_busy,
    )  # fmt: skip
    part, ms = line.books or (0.0, 0.0)
    books = (f"{100 * part:.0f} %", short(ms))
    return (line.kind, str(line.concurrency), *map(short, numbers), *books)


def loads(concurrency: int, seconds: float) -> list[tuple[str, Load]]:
    """What each number of clients asks for: tiny answers, streams as many as fit a thousand a
    second, streams at the pace of a model."""
    rate = max(PACE, min(STREAM_RATE_MAX, TOKENS_PER_S // concurrency))
    rest_s = min(0.5, seconds)
    whole = Load(concurrency, seconds, rest_s=rest_s)
    stream = Load(concurrency, seconds, STREAM_TOKENS, is_stream=True, rate=rate, rest_s=rest_s)
    answer_s = STREAM_TOKENS / PACE
    paced = msgspec.structs.replace(
        stream, seconds=max(seconds, 2 * answer_s), rate=PACE, rest_s=answer_s
    )
    return [("unary", whole), ("stream", stream), ("paced", paced)]


async def measure(
    concurrencies: tuple[int, ...],
    seconds: float,
    model_dir: Path,
    scratch: Path,
    say: Say,
    *,
    books: bool = False,
) -> list[Line]:
    """The servers under every load, by turns; several turns where `books` asks for a gateway
    without them, too. Raises BenchError."""
    lines = []
    async with AsyncExitStack() as stack:
        servers = []
        for with_books in (True, False) if books else (True,):
            data = stack.enter_context(
                tempfile.TemporaryDirectory(prefix="trunkline-bench-", dir=scratch)
            )
            settings = Settings(str(model_dir), data, max(concurrencies), books=with_books)
            log, line = Path(data) / "gateway.log", msgspec.json.encode(settings)
            if with_books:
                server = child("gateway.bench.mock_server", b"", log)
                servers.append(await stack.enter_async_context(server))
            server = child("gateway.bench.null_gateway", line, log)
            servers.append(await stack.enter_async_context(server))
        for concurrency in concurrencies:
            for kind, load in loads(concurrency, seconds):
                say(f"{kind}, {concurrency} at once")
                turns = [
                    [await _measured(server, load) for server in servers]
                    for _ in range(TURNS if books else 1)
                ]
                found = [summed_up(joined(runs), load) for runs in zip(*turns, strict=True)]
                lines.append(Line(kind, concurrency, *found))
    return lines


class Run(Struct, frozen=True):
    """One turn of a server, and the processor time of its process and of its ledger's."""

    found: Found
    cpu_s: float
    writer_s: float = 0.0


async def _measured(server: Ready, load: Load) -> Run:
    used: list[tuple[float, float]] = []

    def note(_: float) -> None:
        used.append((processor_s(server.pid), processor_s(server.writer_pid)))

    found = await run(server, load, note)
    if not found.times_s:
        raise BenchError(f"no whole answer in the time, with {load.concurrency} at once")
    (cpu_s, writer_s), (cpu_end_s, writer_end_s) = used
    return Run(found, cpu_end_s - cpu_s, writer_end_s - writer_s)


def joined(runs: Sequence[Run]) -> Run:
    """Several turns as one."""
    all_found = [one.found for one in runs]
    took_s = sum(one.took_s for one in all_found)
    found = Found(
        took_s,
        [time_s for one in all_found for time_s in one.times_s],
        [time_s for one in all_found for time_s in one.first_s],
        sum(one.events for one in all_found),
        sum(one.busy * one.took_s for one in all_found) / took_s,
    )
    return Run(found, sum(one.cpu_s for one in runs), sum(one.writer_s for one in runs))


def summed_up(measured: Run, load: Load) -> Server:
    """The figures of one run."""
    found, cpu_s = measured.found, measured.cpu_s
    times = found.first_s if load.is_stream else found.times_s
    answers = len(found.times_s)
    tokens_per_s = answers * load.output / found.took_s
    return Server(
        answers_per_s=found.answers_per_s,
        tokens_per_s=tokens_per_s,
        p50_ms=percentile(times, 50) * 1e3,
        p99_ms=percentile(times, 99) * 1e3,
        cpu=cpu_s / found.took_s,
        writer=measured.writer_s / found.took_s,
        cpu_us=cpu_s / (tokens_per_s * found.took_s) * 1e6,
        events=found.events / answers,
        client_busy=found.busy,
    )


def sync_s(folder: Path) -> float:
    """What a durable write costs here: the median of some. Raises BenchError."""
    times_s = []
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            for _ in range(SYNCS):
                file.write(bytes(4096))
                file.flush()
                start_s = time.perf_counter()
                os.fsync(file.fileno())
                times_s.append(time.perf_counter() - start_s)
    except OSError as error:
        raise BenchError(f"{folder} cannot be written to: {error.strerror}.") from error
    return percentile(times_s, 50)


def _last_words(log: Path) -> str:
    return log.read_text(errors="replace").strip()[-600:] or "none"


@asynccontextmanager
async def child(module: str, line: bytes, log: Path) -> AsyncIterator[Ready]:
    """A server of ours as a process, for as long as its input is open. Raises BenchError."""
    with log.open("ab") as errors:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", module,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=errors,
        )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(line + b"\n")
        async with asyncio.timeout(START_TIMEOUT_S):
            said = await process.stdout.readline()
        yield msgspec.json.decode(said, type=Ready)
    except (msgspec.MsgspecError, TimeoutError, BrokenPipeError) as error:
        raise BenchError(f"{module} did not start. Its last words: {_last_words(log)}") from error
    finally:
        process.stdin.close()
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()
