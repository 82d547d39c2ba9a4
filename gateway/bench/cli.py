"""Arguments of `bench` and `replay`, and their runs.

This module prints nothing: it returns a report, as JSON and as a table.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from msgspec import Struct

from gateway.bench.client import BenchError, BenchTarget, Client
from gateway.bench.figures import Figure
from gateway.bench.memory import MemoryWatch
from gateway.bench.prompts import PromptMaker
from gateway.bench.report import ReportRow, machine, rows, table
from gateway.bench.server import BenchServer, bench_server
from gateway.bench.trace import Arrival, TracePrompts, read_trace, replay
from gateway.bench.workloads import WORKLOADS, Sizes

Say = Callable[[str], None]

CLOSED = "abcde"
"""The workloads that run unless others are named."""
REQUEST_TIMEOUT_S = 600.0
"""Longest time of one request."""


class Report(Struct, frozen=True):
    """Results of a run, and the machine they were measured on."""

    seed: int
    endpoint: str
    model: str
    machine: dict[str, Any]
    rows: list[ReportRow]

    def text(self) -> str:
        """Return the table for people."""
        m = self.machine
        where = f"{m['cpu']}, {m['cores']} cores, {m['system']}"
        at = f"commit {m['commit']}, seed {self.seed}, {self.model} at {self.endpoint}"
        return f"{where}\n{at}\n\n{table(self.rows)}"


def add_bench_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `trunkline bench`."""
    _add_target(parser)
    parser.add_argument(
        "--workloads", default=CLOSED, type=_workloads, metavar="LETTERS",
        help="a (long prompt), b (one stream), c (16 at once), d (4 tenants, 16 at once of 32),"
        f" e (chats), g (random arrivals), h (drafts and none); default: {CLOSED}",
    )  # fmt: skip
    parser.add_argument(
        "--rates", type=_rates, default=Sizes().rates, metavar="PER_S",
        help="requests a second in g, with commas (default: 1,2,4)",
    )  # fmt: skip
    parser.add_argument(
        "--seconds", type=_positive, default=Sizes().seconds, help="of each rate (default: 20)"
    )
    parser.add_argument(
        "--repeats", type=_count, default=3, help="runs of each workload (default: 3)"
    )


def add_replay_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `trunkline replay`."""
    parser.add_argument("file", type=Path, help="trace: .jsonl (Mooncake) or .csv (Azure)")
    _add_target(parser)
    parser.add_argument("--speed", type=_positive, default=1.0, help="speed factor (default: 1)")
    parser.add_argument("--limit", type=_count, default=100, help="most requests (default: 100)")
    parser.add_argument(
        "--output-max", type=_count, default=64, help="most output tokens (default: 64)"
    )
    parser.add_argument(
        "--context",
        type=_count,
        default=8192,
        help="context tokens; longer prompts are cut (default: 8192)",
    )


def _add_target(parser: argparse.ArgumentParser) -> None:
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--serve", action="store_true", help="start a server (default without --url)"
    )
    where.add_argument("--url", help="running endpoint, such as http://127.0.0.1:8080/v1")
    parser.add_argument("--model", help="model (default: the endpoint's first)")
    parser.add_argument(
        "--key", action="append", default=[], help="key; repeat for further tenants"
    )
    parser.add_argument(
        "--pid", type=_count, help="process id of the endpoint, to measure its memory"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--text",
        action="store_true",
        help="send text prompts, for endpoints that take no token ids",
    )
    parser.add_argument(
        "--no-ignore-eos", action="store_true", help="omit ignore_eos, for endpoints that refuse it"
    )
    parser.add_argument(
        "--timeout-s",
        type=_positive,
        default=1800.0,
        help="timeout of the whole run (default: 1800)",
    )


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text}: expected 1 or more")
    return number


def _positive(text: str) -> float:
    number = float(text)
    if not 0 < number < 1e9:
        raise argparse.ArgumentTypeError(f"{text}: expected a number above 0")
    return number


def _rates(text: str) -> tuple[float, ...]:
    return tuple(_positive(one) for one in text.split(","))


def _workloads(text: str) -> str:
    unknown = sorted(set(text) - set(WORKLOADS))
    if unknown or not text:
        known = "".join(WORKLOADS)
        raise argparse.ArgumentTypeError(f"{text!r}: expected letters of {known}")
    return text


def run_bench(
    options: argparse.Namespace, model: str, models_dir: Path, say: Say, sizes: Sizes | None = None
) -> Report:
    """Run the selected workloads. Blocks. Raises BenchError."""
    sizes = msgspec.structs.replace(sizes or Sizes(), rates=options.rates, seconds=options.seconds)
    work = _bench(options, model, models_dir, say, sizes)
    return _run(options, work)


def run_replay(options: argparse.Namespace, model: str, models_dir: Path, say: Say) -> Report:
    """Replay a trace. Blocks. Raises BenchError."""
    arrivals = read_trace(options.file, options.limit)
    work = _replay(options, arrivals, model, models_dir, say)
    return _run(options, work)


class _RunResult(Struct, frozen=True):
    target: BenchTarget
    rows: list[ReportRow]
    memory: MemoryWatch | None


def _run(options: argparse.Namespace, work: Coroutine[Any, Any, _RunResult]) -> Report:
    found = asyncio.run(_run_with_timeout(options, work))
    lines = found.rows
    if found.memory is not None:
        peak = Figure("peak resident memory", "MiB", found.memory.peak_bytes / 2**20)
        lines = [*lines, *rows("all", [[peak]])]
    return Report(options.seed, found.target.url, found.target.model, machine(), lines)


async def _run_with_timeout(
    options: argparse.Namespace, work: Coroutine[Any, Any, _RunResult]
) -> _RunResult:
    if threading.current_thread() is threading.main_thread():
        # On SIGTERM, cancel the run, which also ends a server that it started.
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        async with asyncio.timeout(options.timeout_s):
            return await work
    except TimeoutError:
        raise BenchError(
            f"Not finished after {options.timeout_s:g} s; raise --timeout-s or reduce the load."
        ) from None


async def _bench(
    options: argparse.Namespace, model: str, models_dir: Path, say: Say, sizes: Sizes
) -> _RunResult:
    async with _target(options, model, models_dir, sizes.tenants) as (client, server, memory):
        found: list[ReportRow] = []
        if server is not None:
            found += rows("start", [await _start_figures(client, server)])
        warm_up = PromptMaker(f"{options.seed}/warm-up", in_text=options.text)
        await WORKLOADS["b"](client, warm_up, sizes)
        for name in options.workloads:
            runs: list[list[Figure]] = []
            for number in range(options.repeats):
                say(f"{name}: run {number + 1} of {options.repeats}")
                prompts = PromptMaker(f"{options.seed}/{name}/{number}", in_text=options.text)
                runs.append(await WORKLOADS[name](client, prompts, sizes))
            found += rows(name, runs)
        return _RunResult(client.target, found, memory)


async def _replay(
    options: argparse.Namespace, arrivals: list[Arrival], model: str, models_dir: Path, say: Say
) -> _RunResult:
    async with _target(options, model, models_dir, 1) as (client, _, memory):
        say(f"{len(arrivals)} requests over {arrivals[-1].at_s / options.speed:.0f} s")
        prompts = TracePrompts(options.seed, context=options.context, in_text=options.text)
        figures = await replay(
            client, arrivals, prompts, speed=options.speed, output_tokens_max=options.output_max
        )
        return _RunResult(client.target, rows(f"f {options.file.name}", [figures]), memory)


async def _start_figures(client: Client, server: BenchServer) -> list[Figure]:
    done = await client.complete(PromptMaker("start", in_text=True).make(16), 1)
    return [
        Figure("ready", "s", server.ready_s),
        Figure("first token after readiness", "s", server.ready_s + done.first_s),
        Figure("resident memory at readiness", "MiB", server.memory.sample() / 2**20),
    ]


@asynccontextmanager
async def _target(
    options: argparse.Namespace, model: str, models_dir: Path, tenants: int
) -> AsyncIterator[tuple[Client, BenchServer | None, MemoryWatch | None]]:
    """Yield a client of the given endpoint, or of a server started here, and its memory watch."""
    timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S, sock_connect=10)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(
        timeout=timeout, connector=connector, read_bufsize=2**20
    ) as session:
        if options.url is None:
            async with bench_server(
                model, models_dir, time.perf_counter, tenants=tenants, config=options.config
            ) as server:
                first = await _first_model(session, server.url, server.keys[0])
                target = BenchTarget(server.url, first, server.keys)
                client = Client(session, target, time.perf_counter)
                async with _watched(server.memory):
                    yield client, server, server.memory
            return
        url = options.url.rstrip("/")
        keys = tuple(options.key) or ("",)
        name = options.model or await _first_model(session, url, keys[0])
        target = BenchTarget(url, name, keys, ignores_end=not options.no_ignore_eos)
        client = Client(session, target, time.perf_counter)
        if options.pid is None:
            yield client, None, None
            return
        memory = MemoryWatch(options.pid)
        async with _watched(memory):
            yield client, None, memory


@asynccontextmanager
async def _watched(memory: MemoryWatch) -> AsyncIterator[None]:
    task = asyncio.create_task(memory.watch())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def _first_model(session: aiohttp.ClientSession, url: str, key: str) -> str:
    target = BenchTarget(url, "", (key,))
    try:
        async with session.get(url + "/models", headers=target.headers()) as response:
            if response.status != 200:
                raise BenchError(f"{url}/models returned {response.status}; pass --key or --model.")
            return str((await response.json(content_type=None))["data"][0]["id"])
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise BenchError(f"Cannot reach {url}: {error}.") from error
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise BenchError(f"{url}/models lists no model; pass --model.") from error
