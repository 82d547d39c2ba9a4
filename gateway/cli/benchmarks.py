"""`trunkline bench`, `replay` and `simulate`: runs of `gateway.bench` as commands."""

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
from gateway.bench.simulation.cli import SimulationReport, add_simulate_arguments, run_simulate
from gateway.bench.trace import BadTrace
from gateway.cli.arguments import UsageError
from gateway.cli.result import CommandCall, CommandError, CommandResult, Entry


def _run(work: Callable[[], Report | SimulationReport]) -> CommandResult:
    try:
        report = work()
    except BadTrace as error:
        raise UsageError(str(error)) from error
    except BenchError as error:
        raise CommandError(str(error)) from error
    return CommandResult(report.text(), msgspec.to_builtins(report))


def _load(call: CommandCall, run: Callable[..., Report]) -> CommandResult:
    model, models_dir = call.config.served_models()[0].source, call.config.models_dir
    return _run(lambda: run(call.options, model, models_dir, call.warn))


def _simulate(call: CommandCall) -> CommandResult:
    return _run(lambda: run_simulate(call.options, call.show))


COMMANDS: Mapping[str, Entry] = {
    "bench": Entry(add_bench_arguments, lambda call: _load(call, run_bench)),
    "replay": Entry(add_replay_arguments, lambda call: _load(call, run_replay)),
    "simulate": Entry(add_simulate_arguments, _simulate),
}
