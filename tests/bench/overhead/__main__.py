"""The gateway's overhead over an engine that computes nothing: `python -m tests.bench.overhead
--help`.

Loads a bare mock server and a gateway over the null engine, alternating, and prints what the
gateway adds. It fetches the default model for its tokenizer.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from gateway.bench.client import BenchError
from gateway.bench.report import machine
from gateway.config import load_config
from gateway.engines.model_files import prepared_model
from tests.bench.overhead.overhead import KINDS, Line, Overhead, Say, measure, sync_s

TURNS_WITH_BOOKS = 7


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line; exits with a usage message for a wrong one."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.overhead")
    parser.add_argument(
        "--concurrency", type=_counts, default=(1, 32, 256), metavar="N,N",
        help="requests at once (default: 1,32,256)",
    )  # fmt: skip
    parser.add_argument("--seconds", type=float, default=3.0, help="of each load (default: 3)")
    parser.add_argument(
        "--scratch", type=Path, default=Path(tempfile.gettempdir()), metavar="DIR",
        help="folder for the ledger (default: the temporary folder)",
    )  # fmt: skip
    parser.add_argument(
        "--books", action="store_true", help="also measure without ledger and analytics"
    )
    parser.add_argument(
        "--turns", type=int, metavar="N",
        help="how often to measure each server (default: 1, and 7 with --books)",
    )  # fmt: skip
    parser.add_argument(
        "--loads", default=KINDS, type=_kinds, metavar="KIND,KIND",
        help=f"any of {', '.join(KINDS)} (default: all)",
    )  # fmt: skip
    parser.add_argument(
        "--timeout-s", type=float, default=1800.0, help="for the whole run (default: 1800)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser.parse_args(arguments)


def run_overhead_bench(options: argparse.Namespace, model_folder: Path, say: Say) -> Overhead:
    """Measure the overhead. Blocks. `model_folder`: a prepared model, for its tokenizer.

    Raises BenchError, and OSError if `--scratch` cannot be written.
    """
    sync_ms = sync_s(options.scratch) * 1e3
    lines = asyncio.run(_measure(options, model_folder, say))
    return Overhead(model_folder.name, machine(), str(options.scratch), sync_ms, lines)


async def _measure(options: argparse.Namespace, model_folder: Path, say: Say) -> list[Line]:
    turns = options.turns or (TURNS_WITH_BOOKS if options.books else 1)
    try:
        async with asyncio.timeout(options.timeout_s):
            return await measure(
                options.concurrency, options.seconds, model_folder, options.scratch, say,
                kinds=options.loads, turns=turns, books=options.books,
            )  # fmt: skip
    except TimeoutError:
        message = f"not done after {options.timeout_s:g} s; expected a longer --timeout-s"
        raise BenchError(message) from None


def _counts(text: str) -> tuple[int, ...]:
    counts = tuple(int(part) for part in text.split(","))
    if min(counts) < 1:
        raise argparse.ArgumentTypeError(f"{text}: expected numbers of 1 or more")
    return counts


def _kinds(text: str) -> tuple[str, ...]:
    kinds = tuple(text.split(","))
    if not set(kinds) <= set(KINDS):
        raise argparse.ArgumentTypeError(f"{text!r}: expected some of {','.join(KINDS)}")
    return kinds


def main() -> int:
    """Run the bench and print its report."""
    options = parse_arguments()
    # On SIGTERM, unwind, which stops the servers.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    config, _ = load_config(None, os.environ, {})

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    try:
        name = config.served_models()[0].source
        card = prepared_model(name, config.models_dir, say, lambda *progress: None)
        report = run_overhead_bench(options, Path(card.folder), say)
    except (BenchError, OSError) as error:
        say(f"overhead: {error}")
        return 1
    print(report.json() if options.json else report.text(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
