"""`trunkline bench` and `trunkline replay` as commands."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from aiohttp import web

from gateway.bench.cli import (
    Report,
    add_bench_arguments,
    add_replay_arguments,
    run_bench,
    run_replay,
)
from gateway.bench.client import BenchError
from tests.tables import each_row
from tests.unit.gateway.bench.scripted_endpoint import MOONCAKE, SMALL, serve, write_trace
from tests.unit.gateway.gateway_fixture import GatewayFixture


def ignore(_: str) -> None:
    """Discard a message."""


def parsed(add: Callable[[argparse.ArgumentParser], None], *arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add(parser)
    return parser.parse_args(arguments)


def bench(folder: Path, say: Callable[[str], None], *arguments: str) -> Report:
    """Run `trunkline bench`; it blocks."""
    return run_bench(parsed(add_bench_arguments, *arguments), "", folder, say, SMALL)


async def test_bench_measures_the_gateway(gateway: GatewayFixture, tmp_path: Path) -> None:
    """Every workload runs over HTTP against a gateway over the fake runner."""
    said: list[str] = []
    keys = [f"--key={key}" for key in gateway.keys.values()]

    report = await asyncio.to_thread(
        bench, tmp_path, said.append, "--url", gateway.url + "/v1", "--text", "--repeats=2",
        "--workloads=abcdeg", "--rates=100,200", "--seconds=0.05", *keys,
    )  # fmt: skip

    found = {(row.workload, row.figure): row for row in report.rows}
    assert report.model == gateway.card.name
    assert found["a", "cold"].runs == 2
    assert found["a", "shared + new hit ratio"].median > 50
    assert found["e", "later turns hit ratio"].median > 50
    assert said == [f"{name}: run {n} of 2" for name in "abcdeg" for n in (1, 2)]
    assert found["g", "200/s failed"].median == 0
    assert found["g", "200/s answered"].median > 0
    assert report.machine["cores"] >= 1


async def test_replay_measures_a_trace(gateway: GatewayFixture, tmp_path: Path) -> None:

    def command() -> Report:
        path = write_trace(tmp_path, "m.jsonl", MOONCAKE)
        url, key = gateway.url + "/v1", gateway.keys["ada"]
        more = ("--text", "--key", key, "--context", "60", "--speed", "50")
        options = parsed(add_replay_arguments, str(path), "--url", url, *more)
        return run_replay(options, "", tmp_path, ignore)

    report = await asyncio.to_thread(command)

    assert {row.workload for row in report.rows} == {"f m.jsonl"}
    assert "answered" in report.text()


def test_bench_runs_closed_loops_unless_asked() -> None:
    """A rate means little until the machine is known."""
    options = parsed(add_bench_arguments)

    assert (options.workloads, options.rates, options.seconds) == ("abcde", (1, 2, 4), 20)


@each_row(
    "arguments",
    [
        ("--workloads", "xyz"),
        ("--workloads", ""),
        ("--repeats", "0"),
        ("--rates", "1,0"),
        ("--rates", ""),
        ("--seconds", "0"),
        ("--repeats", "many"),
        ("--timeout-s", "-1"),
        ("--serve", "--url", "http://127.0.0.1:1/v1"),
    ],
)
def test_refuses_invalid_arguments(arguments: tuple[str, ...]) -> None:
    """Exit status 2."""
    with pytest.raises(SystemExit) as caught:
        parsed(add_bench_arguments, *arguments)

    assert caught.value.code == 2


async def test_error_names_an_unreachable_endpoint(tmp_path: Path) -> None:
    arguments = ("--url", "http://127.0.0.1:9/v1")

    with pytest.raises(BenchError, match=r"127\.0\.0\.1:9"):
        await asyncio.to_thread(bench, tmp_path, ignore, *arguments)


async def test_bench_ends_after_its_timeout(tmp_path: Path) -> None:
    """An endpoint that hangs does not hang the bench."""
    ended = asyncio.Event()

    async def silent(_: web.Request) -> web.StreamResponse:
        await ended.wait()
        return web.Response()

    async with serve(silent) as url:
        with pytest.raises(BenchError, match="Not finished after"):
            await asyncio.to_thread(bench, tmp_path, ignore, "--url", url, "--timeout-s", "0.2")
        ended.set()
