"""Workload (f), replay of recorded traffic: requests are sent at the trace's times, scaled by
speed.

`open_loop` sends them. This reads JSON lines with prefix blocks of 512 tokens (Mooncake), CSV
without blocks (Azure), and the entries that `trunkline export --format csv` writes. A block id
means the same tokens wherever it occurs, so shared ids are shared prefixes.
"""

from __future__ import annotations

import csv
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import islice
from pathlib import Path

import msgspec
from msgspec import Struct

from gateway.bench.client import BenchError, Client
from gateway.bench.figures import Figure
from gateway.bench.open_loop import DueRequest, send_when_due
from gateway.bench.prompts import FIRST_ID, LAST_ID, WORDS, Prompt

BLOCK_TOKENS = 512
"""Tokens of one block of a Mooncake trace."""
LINE_BYTES_MAX = 1 << 20
"""Longest line of a trace."""
SHOWN_CHARS = 80
"""How much of a bad line an error shows."""


class BadTrace(BenchError):
    """A file is no trace."""


class Arrival(Struct, frozen=True):
    """One request of a trace."""

    at_s: float
    """Seconds since the first request."""
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()
    """Ids of the prompt's blocks of 512 tokens, the last perhaps partial; empty without ids."""
    tenant: str = ""
    cached_tokens: int = 0
    """Tokens of the prompt that a ledger says were cached."""


class _MooncakeLine(Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()


class _NoTraceLine(Exception):
    """A line that is no request of a trace; the message says what would be one."""


MOONCAKE_LINE = (
    'a line such as {"timestamp": 0, "input_length": 700, "output_length": 3, "hash_ids": [7, 8]},'
    " with an id for each 512 tokens"
)
AZURE_LINE = "a line such as 2023-11-16 18:15:46.6805900,374,44"
LEDGER_LINE = "an entry of `trunkline export --format csv`"


def read_trace(path: Path, limit: int | None = None) -> list[Arrival]:
    """Return the first `limit` requests, in the order of their times. Raises BadTrace for a file
    that is not a trace, which names its first line that is none, and BenchError for one that cannot
    be read.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            read = _mooncake if path.suffix == ".jsonl" else _table
            arrivals = list(islice(read(iter(file)), limit))
    except OSError as error:
        raise BenchError(f"{path} is not readable: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise BadTrace(f"{path} is not a trace: {error}.") from error
    except _NoTraceLine as error:
        raise BadTrace(f"{path}, {error}.") from error
    if not arrivals:
        raise BadTrace(f"{path} has no requests.")
    arrivals.sort(key=lambda arrival: arrival.at_s)
    first_s = arrivals[0].at_s
    return [msgspec.structs.replace(a, at_s=a.at_s - first_s) for a in arrivals]


def _no_line(number: int, found: object, expected: str) -> _NoTraceLine:
    shown = str(found).strip()
    shown = shown if len(shown) <= SHOWN_CHARS else f"{shown[:SHOWN_CHARS]}…"
    return _NoTraceLine(f"line {number}: {shown!r}; expected {expected}")


def _mooncake(lines: Iterator[str]) -> Iterator[Arrival]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = msgspec.json.decode(line, type=_MooncakeLine)
        except msgspec.MsgspecError:
            raise _no_line(number, line, MOONCAKE_LINE) from None
        whole = not row.hash_ids or len(row.hash_ids) == -(-row.input_length // BLOCK_TOKENS)
        if row.input_length < 1 or row.output_length < 0 or not whole:
            raise _no_line(number, line, MOONCAKE_LINE)
        yield Arrival(row.timestamp / 1e3, row.input_length, row.output_length, row.hash_ids)


def _table(lines: Iterator[str]) -> Iterator[Arrival]:
    rows = csv.DictReader(lines)
    columns = rows.fieldnames or ()
    take, expected = (_ledger, LEDGER_LINE) if "entry_id" in columns else (_azure, AZURE_LINE)
    if missing := sorted(TABLES[take] - set(columns)):
        heading = f"a heading with {', '.join(missing)}"
        raise _no_line(1, ",".join(columns), heading)
    try:
        for row in rows:
            try:
                arrival = take(row)
            except (ValueError, TypeError):
                arrival = None
            if arrival is None or arrival.prompt_tokens < 0 or arrival.output_tokens < 0:
                found = ",".join(str(one) for one in row.values() if one is not None)
                raise _no_line(rows.line_num, found, expected)
            if arrival.prompt_tokens:
                yield arrival
            elif take is _azure:
                raise _no_line(rows.line_num, ",".join(row.values()), expected)
    except csv.Error as error:
        raise _no_line(rows.line_num, error, expected) from None


def _azure(row: Mapping[str, str]) -> Arrival:
    # Timestamps have seven decimals of a second; a datetime holds six.
    at = datetime.fromisoformat(row["TIMESTAMP"][:26] + "+00:00")
    return Arrival(at.timestamp(), int(row["ContextTokens"]), int(row["GeneratedTokens"]))


def _ledger(row: Mapping[str, str]) -> Arrival:
    """Return a ledger's entry; one without prompt tokens was refused before it had any."""
    return Arrival(
        at_s=datetime.fromisoformat(row["started"].replace("Z", "+00:00")).timestamp(),
        prompt_tokens=int(row["prompt_tokens"]),
        output_tokens=int(row["output_tokens"]),
        tenant=row["tenant"],
        cached_tokens=int(row["physical_cached_tokens"]),
    )


TABLES: dict[Callable[[Mapping[str, str]], Arrival], set[str]] = {
    _azure: {"TIMESTAMP", "ContextTokens", "GeneratedTokens"},
    _ledger: {"started", "prompt_tokens", "output_tokens", "tenant", "physical_cached_tokens"},
}
"""The columns that a row of each kind of table needs."""


class TracePrompts:
    """Prompts of a trace's requests: under one seed, a block id always gives the same tokens."""

    def __init__(self, seed: int, *, context: int, in_text: bool = False) -> None:
        self.seed = seed
        self.context = context
        self.in_text = in_text

    def prompt(self, number: int, arrival: Arrival, output: int) -> Prompt:
        """Return the prompt of the arrival with this number, cut so that its output fits the
        context."""
        tokens = max(1, min(arrival.prompt_tokens, self.context - output - 1))
        blocks: Sequence[int | str] = arrival.blocks or [
            f"own-{number}-{i}" for i in range(-(-tokens // BLOCK_TOKENS))
        ]
        ids: list[int] = []
        for block in blocks:
            if len(ids) >= tokens:
                break
            draw = random.Random(f"{self.seed}/{block}")
            ids += [draw.randrange(FIRST_ID, LAST_ID) for _ in range(BLOCK_TOKENS)]
        ids = ids[:tokens]
        if self.in_text:
            return "".join(f" {WORDS[i % len(WORDS)]}" for i in ids)
        return ids


async def replay(
    client: Client,
    arrivals: Sequence[Arrival],
    prompts: TracePrompts,
    *,
    speed: float,
    output_tokens_max: int,
) -> list[Figure]:
    """Send each request when it is due, and wait for all responses; failed requests are counted."""

    def due() -> Iterator[DueRequest]:
        for number, arrival in enumerate(arrivals):
            output = max(1, min(arrival.output_tokens, output_tokens_max))
            prompt = prompts.prompt(number, arrival, output)
            yield DueRequest(arrival.at_s / speed, prompt, output, number)

    return await send_when_due(client, "", due())
