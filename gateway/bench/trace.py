"""Workload (f), replay of recorded traffic: requests are sent at the trace's times, scaled by
speed.

`open_loop` sends them. This reads JSON lines with prefix blocks of 512 tokens (Mooncake) and CSV
without blocks (Azure). A block id means the same tokens wherever it occurs, so shared ids are
shared prefixes.
"""

from __future__ import annotations

import csv
import random
from collections.abc import Iterator, Sequence
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


class Arrival(Struct, frozen=True):
    """One request of a trace."""

    at_s: float
    """Seconds since the first request."""
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()
    """Ids of the prompt's blocks of 512 tokens, the last perhaps partial; empty without ids."""


class _MooncakeLine(Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()


def read_trace(path: Path, limit: int) -> list[Arrival]:
    """Return the first `limit` requests. Raises BenchError for a file that is not a trace."""
    read = _mooncake if path.suffix == ".jsonl" else _azure
    try:
        with path.open(encoding="utf-8", newline="") as file:
            arrivals = list(islice(read(iter(file)), limit))
    except OSError as error:
        raise BenchError(f"{path} is not readable: {error.strerror}.") from error
    except KeyError as missing:
        raise BenchError(f"{path} is not a trace: column {missing} is missing.") from missing
    except (ValueError, TypeError, msgspec.MsgspecError) as error:
        raise BenchError(f"{path} is not a trace: {error}.") from error
    if not arrivals:
        raise BenchError(f"{path} has no requests.")
    first_s = arrivals[0].at_s
    if any(a.prompt_tokens < 1 or a.output_tokens < 0 or a.at_s < first_s for a in arrivals):
        raise BenchError(f"{path} has a request without tokens, or earlier than its first one.")
    return [msgspec.structs.replace(a, at_s=a.at_s - first_s) for a in arrivals]


def _mooncake(lines: Iterator[str]) -> Iterator[Arrival]:
    for line in filter(str.strip, lines):
        row = msgspec.json.decode(line, type=_MooncakeLine)
        yield Arrival(row.timestamp / 1e3, row.input_length, row.output_length, row.hash_ids)


def _azure(lines: Iterator[str]) -> Iterator[Arrival]:
    for row in csv.DictReader(lines):
        # Timestamps have seven decimals of a second; a datetime holds six.
        at = datetime.fromisoformat(row["TIMESTAMP"][:26] + "+00:00")
        yield Arrival(at.timestamp(), int(row["ContextTokens"]), int(row["GeneratedTokens"]))


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
