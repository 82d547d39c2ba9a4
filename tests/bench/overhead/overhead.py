"""The gateway's overhead over a bare server: `python -m tests.bench.overhead`.

The same client loads a bare mock and the gateway over the null engine alternately in one run, so
that both had the same machine. Ratios and differences carry over to other machines. It prints
nothing; `tests.bench.overhead.__main__` calls it.
"""

from __future__ import annotations

import asyncio
import os
import statistics
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
from gateway.bench.figures import percentile
from gateway.bench.report import columns, format_number
from tests.bench.overhead.load import Load, LoadResult, run
from tests.bench.overhead.null_gateway import NullGatewaySettings, Ready
from tests.bench.overhead.processor_time import processor_s

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 20.0
STREAM_TOKENS = 64
TOKENS_PER_S = 64_000
"""Of all streams together: a thousand streams of 64 tokens in a second."""
STREAM_RATE_MAX = 2_000
PACE = 100
SYNCS = 50
KINDS = ("unary", "stream", "paced")

Say = Callable[[str], None]


class Server(Struct, frozen=True):
    """Results of one server under one load. Times in milliseconds: to the end of a response for
    `unary`, else to its first bytes.

    `cpu_us`: its process's time per output token. `cpu`: share of one core; `writer`: that of its
    ledger and analytics processes. `events`: per stream.
    """

    answers_per_s: float
    tokens_per_s: float
    p50_ms: float
    p99_ms: float
    cpu: float
    writer: float
    cpu_us: float
    events: float
    client_busy: float


class BookkeepingCost(Struct, frozen=True):
    """Cost of ledger and analytics, beside a gateway without them, turn by turn.

    Median share of the responses per second and of the gateway's processor time per response;
    `least` and `most` are the quartiles of the first; `ms` of the median time of a response. Below
    0 is noise.
    """

    part: float
    least: float
    most: float
    cpu: float
    ms: float


class Line(Struct, frozen=True):
    """One load on both servers; and the cost of the `books`, if requested."""

    kind: str
    concurrency: int
    mock: Server
    gateway: Server
    books: BookkeepingCost | None = None

    @property
    def added_p50_ms(self) -> float:
        """Latency that the gateway adds to the median."""
        return self.gateway.p50_ms - self.mock.p50_ms

    @property
    def added_p99_ms(self) -> float:
        """Latency that the gateway adds to the 99th percentile."""
        return self.gateway.p99_ms - self.mock.p99_ms

    @property
    def cpu_ratio(self) -> float:
        """The gateway's processor time per token over the mock's; steady on a busy machine."""
        return self.gateway.cpu_us / self.mock.cpu_us if self.mock.cpu_us else 0.0

    @property
    def ratio(self) -> float:
        """The gateway's responses over the mock's."""
        return self.gateway.answers_per_s / self.mock.answers_per_s


class Overhead(Struct, frozen=True):
    """All lines, and the machine. `text()` is the table.

    `sync_ms`: the median fsync of 4 KiB on the disk of `scratch`, which has the ledger; a request
    waits for two.
    """

    model: str
    machine: dict[str, Any]
    scratch: str
    sync_ms: float
    lines: list[Line]

    def text(self) -> str:
        """Return the table for people."""
        m = self.machine
        where = f"{m['cpu']}, {m['cores']} cores, {m['system']}, commit {m['commit']}"
        disk = f"ledger in {self.scratch}, where an fsync takes {format_number(self.sync_ms)} ms"
        names = (
            "load", "at once", "mock/s", "gateway/s", "ratio", "p50 ms", "added", "p99 ms",
            "added", "tokens/s", "pieces", "us/token", "x mock", "core", "writer", "client",
            "books", "quartiles", "of core", "books ms",
        )  # fmt: skip
        rows = [names, *map(_cells, self.lines)]
        if all(line.books is None for line in self.lines):
            rows = [row[:-4] for row in rows]
        return f"{where}\n{disk}\n\n{columns(rows, range(1, len(rows[0])))}"

    def json(self) -> str:
        """Return the report for programs."""
        rows = [
            {
                **msgspec.to_builtins(line),
                "added_p50_ms": line.added_p50_ms,
                "added_p99_ms": line.added_p99_ms,
                "ratio": line.ratio,
                "cpu_ratio": line.cpu_ratio,
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
    found = line.books or BookkeepingCost(0.0, 0.0, 0.0, 0.0, 0.0)
    books = (
        f"{100 * found.part:.1f} %",
        f"{100 * found.least:.1f} to {100 * found.most:.1f}",
        f"{100 * found.cpu:.1f} %",
        format_number(found.ms),
    )
    return (line.kind, str(line.concurrency), *map(format_number, numbers), *books)


def loads(concurrency: int, seconds: float) -> dict[str, Load]:
    """Return the loads of each number of clients by kind: small responses, streams at a thousand
    per second in all, streams at the pace of a model."""
    rate = max(PACE, min(STREAM_RATE_MAX, TOKENS_PER_S // concurrency))
    rest_s = min(0.5, seconds)
    whole = Load(concurrency, seconds, rest_s=rest_s)
    stream = Load(concurrency, seconds, STREAM_TOKENS, is_stream=True, rate=rate, rest_s=rest_s)
    answer_s = STREAM_TOKENS / PACE
    paced = msgspec.structs.replace(
        stream, seconds=max(seconds, 2 * answer_s), rate=PACE, rest_s=answer_s
    )
    return dict(zip(KINDS, (whole, stream, paced), strict=True))


async def measure(
    concurrencies: tuple[int, ...],
    seconds: float,
    model_dir: Path,
    scratch: Path,
    say: Say,
    *,
    kinds: Sequence[str] = KINDS,
    turns: int = 1,
    books: bool = False,
) -> list[Line]:
    """Measure the servers under every load, alternating, each second turn in reverse order.

    `books` adds a gateway without ledger and analytics. Raises BenchError.
    """
    lines = []
    async with AsyncExitStack() as stack:
        servers = []
        for with_books in (True, False) if books else (True,):
            data = stack.enter_context(
                tempfile.TemporaryDirectory(prefix="trunkline-bench-", dir=scratch)
            )
            settings = NullGatewaySettings(
                str(model_dir), data, max(concurrencies), books=with_books
            )
            log, line = Path(data) / "gateway.log", msgspec.json.encode(settings)
            if with_books:
                server = run_child("tests.bench.overhead.mock_server", b"", log)
                servers.append(await stack.enter_async_context(server))
            server = run_child("tests.bench.overhead.null_gateway", line, log)
            servers.append(await stack.enter_async_context(server))
        for concurrency in concurrencies:
            of_kind = loads(concurrency, seconds)
            for kind in kinds:
                say(f"{kind}, {concurrency} at once")
                lines.append(await _line(kind, of_kind[kind], servers, turns))
    return lines


async def _line(kind: str, load: Load, servers: Sequence[Ready], turns: int) -> Line:
    """Return a load's line. `servers`: the mock, the gateway, and the gateway without books if
    requested."""
    runs: list[list[OverheadRun]] = [[] for _ in servers]
    for turn in range(turns):
        in_order = list(zip(servers, runs, strict=True))
        for server, of_server in reversed(in_order) if turn % 2 else in_order:
            of_server.append(await _measured(server, load))
    mock, ours = (summarize(join_runs(of_server), load) for of_server in runs[:2])
    books = books_of(runs[1], runs[2], load) if len(runs) > 2 else None
    return Line(kind, load.concurrency, mock, ours, books)


def books_of(
    ours: Sequence[OverheadRun], without: Sequence[OverheadRun], load: Load
) -> BookkeepingCost:
    """Compare neighbouring turns, which had the same machine speed."""
    pairs = [
        (summarize(one, load), summarize(other, load))
        for one, other in zip(ours, without, strict=True)
    ]
    parts = [1 - one.answers_per_s / other.answers_per_s for one, other in pairs]
    times = [one.cpu_us / other.cpu_us - 1 if other.cpu_us else 0.0 for one, other in pairs]
    return BookkeepingCost(
        part=statistics.median(parts),
        least=percentile(parts, 25),
        most=percentile(parts, 75),
        cpu=statistics.median(times),
        ms=statistics.median(one.p50_ms - other.p50_ms for one, other in pairs),
    )


class OverheadRun(Struct, frozen=True):
    """One turn of a server, and the processor time of its process and of its books' processes."""

    found: LoadResult
    cpu_s: float
    writer_s: float = 0.0


async def _measured(server: Ready, load: Load) -> OverheadRun:
    used: list[tuple[float, float]] = []

    def note(_: float) -> None:
        used.append((processor_s(server.pid), sum(map(processor_s, server.book_pids))))

    found = await run(server, load, note)
    if not found.times_s:
        raise BenchError(f"no whole answer in the time, with {load.concurrency} at once")
    (cpu_s, writer_s), (cpu_end_s, writer_end_s) = used
    return OverheadRun(found, cpu_end_s - cpu_s, writer_end_s - writer_s)


def join_runs(runs: Sequence[OverheadRun]) -> OverheadRun:
    """Join several turns into one."""
    all_found = [one.found for one in runs]
    took_s = sum(one.took_s for one in all_found)
    found = LoadResult(
        took_s,
        [time_s for one in all_found for time_s in one.times_s],
        [time_s for one in all_found for time_s in one.first_s],
        sum(one.events for one in all_found),
        sum(one.busy * one.took_s for one in all_found) / took_s,
    )
    return OverheadRun(found, sum(one.cpu_s for one in runs), sum(one.writer_s for one in runs))


def summarize(measured: OverheadRun, load: Load) -> Server:
    """Return the figures of one run."""
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
    """Return the median time of a durable write here. Raises BenchError."""
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
async def run_child(module: str, line: bytes, log: Path) -> AsyncIterator[Ready]:
    """Run one of our servers as a process while its input is open. Raises BenchError."""
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
