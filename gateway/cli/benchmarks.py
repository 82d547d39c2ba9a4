"""`trunkline bench` and `replay`: runs of `gateway.bench` as commands."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from gateway.bench.cli import (
    Report,
    add_bench_arguments,
    add_replay_arguments,
    run_bench,
    run_replay,
)
from gateway.bench.client import BenchError
from gateway.cli.result import CommandCall, CommandError, CommandResult, Entry


def _run(call: CommandCall, work: Callable[..., Report]) -> CommandResult:
    config = call.config
    try:
        report = work(call.options, config.served_models()[0].source, config.models_dir, call.warn)
    except BenchError as error:
        raise CommandError(str(error)) from error
    return CommandResult(report.text(), msgspec.to_builtins(report))


COMMANDS: Mapping[str, Entry] = {
    "bench": Entry(add_bench_arguments, lambda call: _run(call, run_bench)),
    "replay": Entry(add_replay_arguments, lambda call: _run(call, run_replay)),
}
