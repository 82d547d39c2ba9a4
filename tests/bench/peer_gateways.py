"""Trunkline beside other gateways, alternating, over servers that compute nothing.

Each gets the same small chats from the same client in one run, so that ratios hold on any machine:
responses per second, and the latency added to that of the mock itself. Other gateways already run,
each in front of this mock; Trunkline runs over the null engine, with keys, limits, log and a
durable ledger, and once without ledger and analytics.

    python -m tests.bench.peer_gateways --serve-mock 9901
    python -m tests.bench.peer_gateways --mock http://127.0.0.1:9901 --model-dir DIR \
        --peer 'portkey|http://127.0.0.1:8787|gpt-4o|x-portkey-provider: openai|...'

A peer is its name, address, model and further headers; `PEER_KEY` has its key.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec

from gateway.bench.report import columns, format_number
from tests.bench.overhead.load import Load, run
from tests.bench.overhead.null_gateway import NullGatewaySettings, Ready
from tests.bench.overhead.overhead import run_child

BODY = (
    b'{"id":"chatcmpl-0","object":"chat.completion","created":0,"model":"mock","choices":[{'
    b'"index":0,"message":{"role":"assistant","content":"tttt"},"finish_reason":"length"}],'
    b'"usage":{"prompt_tokens":9,"completion_tokens":4,"total_tokens":13}}'
)
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (
    len(BODY),
    BODY,
)


class Mock(asyncio.Protocol):
    """Answers each request with the same bytes as soon as its body is complete."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport, self._data = transport, b""

    def data_received(self, data: bytes) -> None:
        self._data += data
        while (end := self._data.find(b"\r\n\r\n")) >= 0:
            _, _, length = self._data[:end].lower().partition(b"content-length:")
            whole = end + 4 + int(length.split(b"\r\n", 1)[0] or 0)
            if len(self._data) < whole:
                return
            self._data = self._data[whole:]
            self._transport.write(ANSWER)


async def serve_mock(port: int) -> None:
    """Serve until terminated."""
    server = await asyncio.get_running_loop().create_server(Mock, "127.0.0.1", port)
    await server.serve_forever()


class Peer(msgspec.Struct, frozen=True):
    """A gateway, its address, its model and its headers."""

    name: str
    ready: Ready
    headers: tuple[str, ...] = ()


def peer_of(text: str) -> Peer:
    """Parse `name|address|model|header|header`."""
    name, url, model, *headers = text.split("|")
    ready = Ready(url, os.environ.get("PEER_KEY", "none"), model, os.getpid())
    return Peer(name, ready, tuple(headers))


async def measure(options: argparse.Namespace) -> str:
    """Measure all of them under each load, alternating. Ratios are medians of pairs, to the
    first peer."""
    mock = Peer("mock", Ready(options.mock, "none", "mock", os.getpid()))
    rows: list[tuple[str, ...]] = [
        ("gateway", "at once", "answers/s", "p50 ms", "added ms", "x rate", "x added")
    ]
    async with AsyncExitStack() as stack:
        ours = []
        for books in (True, False):
            data = stack.enter_context(
                tempfile.TemporaryDirectory(prefix="trunkline-bench-", dir=options.scratch)
            )
            settings = msgspec.json.encode(
                NullGatewaySettings(str(options.model_dir), data, 64, books=books)
            )
            server = run_child(
                "tests.bench.overhead.null_gateway", settings, Path(data) / "gateway.log"
            )
            ready = await stack.enter_async_context(server)
            ours.append(Peer("ours" if books else "ours, no books", ready))
        peers = [mock, *map(peer_of, options.peer), *ours]
        for at_once in (1, 32):
            load = Load(at_once, options.seconds, rest_s=0.3)
            turns = []
            for _ in range(options.turns):
                turn = []
                for peer in peers:
                    found = await run(peer.ready, load, lambda _: None, peer.headers)
                    turn.append((found.answers_per_s, 1e3 * statistics.median(found.times_s)))
                turns.append(turn)
            for at, peer in enumerate(peers):
                numbers = [
                    (rate, ms, ms - turn[0][1], rate / turn[1][0], _part(ms, turn))
                    for turn in turns
                    for rate, ms in [turn[at]]
                ]
                medians = map(statistics.median, zip(*numbers, strict=True))
                rows.append((peer.name, str(at_once), *map(format_number, medians)))
    return columns(rows, range(1, len(rows[0])))


def _part(ms: float, turn: list[tuple[float, float]]) -> float:
    """Return the added latency over the first peer's added latency."""
    (_, mock_ms), (_, first_ms) = turn[:2]
    return (ms - mock_ms) / (first_ms - mock_ms)


def main() -> None:
    """Serve the mock, or print a table."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.peer_gateways")
    parser.add_argument("--serve-mock", type=int, metavar="PORT")
    parser.add_argument("--mock", default="http://127.0.0.1:9901")
    parser.add_argument("--model-dir", type=Path)
    parser.add_argument("--peer", action="append", default=[])
    parser.add_argument("--scratch", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--turns", type=int, default=8)
    options = parser.parse_args()
    if options.serve_mock:
        asyncio.run(serve_mock(options.serve_mock))
    elif not options.peer or options.model_dir is None:
        parser.error("at least one --peer, and --model-dir: a prepared model, for its tokenizer")
    else:
        sys.stdout.write(asyncio.run(measure(options)) + "\n")


if __name__ == "__main__":
    main()
