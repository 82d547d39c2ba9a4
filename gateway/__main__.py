"""The command line: parses arguments, runs one command, prints its result.

No other file prints or exits. Exit status 0: the command succeeded. 1: it failed, and one line on
standard error says why. 2: an argument or a setting is wrong, and one line says which one, its
value and what is expected.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence

from tqdm import tqdm

from engine.errors import EngineError
from engine.model_store import pull
from gateway.bench import cli as bench
from gateway.bench.client import BenchError
from gateway.cli import audit, backups, billing, checks, serve, shared_scopes, tenants
from gateway.cli.arguments import LIMITS, SETTINGS, UsageError, build_parser, changes
from gateway.cli.result import CommandError, CommandResult
from gateway.config import Config, ConfigError, Origin, load_config
from tenancy.errors import BadName, TenancyError

COMMANDS = {
    **billing.COMMANDS,
    **backups.COMMANDS,
    "shared-scope": (
        "List, create, change or remove caches that tenants share.",
        shared_scopes.add_arguments,
    ),
    "audit": ("List changes of tenants, keys, prices, budgets and caches.", audit.add_arguments),
    "bench": ("Measure an endpoint, or a server started for it.", bench.add_bench_arguments),
    "replay": ("Replay a recorded trace against an endpoint.", bench.add_replay_arguments),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit status."""
    try:
        options = build_parser(COMMANDS).parse_args(arguments)
        config, origin = load_config(options.config, os.environ, _flags(options))
        return _run(options, config, origin)
    except (UsageError, ConfigError, BadName) as error:
        return _fail(2, str(error))
    except (CommandError, EngineError, TenancyError, BenchError) as error:
        return _fail(1, str(error))
    except BrokenPipeError:  # the reader of standard output has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        reason = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        return _fail(1, reason)
    except KeyboardInterrupt:
        return _fail(130, "interrupted")


def _flags(options: argparse.Namespace) -> dict[str, object]:
    """Return the settings given as options, by their key path in the configuration file."""
    flags = {
        "data_dir": options.data_dir,
        "server.listen": getattr(options, "listen", None),
        "admin.listen": getattr(options, "admin_listen", None),
        "engine.device": getattr(options, "device", None),
        "model.name": getattr(options, "model", None),
    }
    return {path: value for path, value in flags.items() if value is not None}


def _run(options: argparse.Namespace, config: Config, origin: Origin) -> int:
    report: bench.Report
    match options.command:
        case "serve":
            return _serve(options, config)
        case "bench":
            report = bench.run_bench(options, config.model.name, config.models_dir, _print_error)
        case "replay":
            report = bench.run_replay(options, config.model.name, config.models_dir, _print_error)
        case _:
            result = _run_command(options, config, origin)
            output = json.dumps(result.data, indent=1) if options.json else result.text
            if output:
                print(output, flush=True)
            return result.status
    print(report.json() if options.json else report.text(), flush=True)
    return 0


def _run_command(options: argparse.Namespace, config: Config, origin: Origin) -> CommandResult:
    match options.command:
        case "pull":
            return _pull(options, config)
        case "check-config":
            return checks.check_config(config, origin)
        case "doctor":
            return checks.doctor(config)
        case command if command in backups.COMMANDS:
            with _ProgressBar(not is_terminal()) as bar:
                return backups.run(options, config, bar.show_part)
        case command if command in billing.COMMANDS:
            with _ProgressBar(not is_terminal()) as bar:
                return billing.run(options, config, sys.stdout.buffer.write, bar.show_part)
        case "usage":
            return tenants.usage(config, options.tenant, options.days)
        case "audit":
            return audit.run(options, config)
        case "shared-scope":
            return shared_scopes.run(options, config)
        case "tenant":
            return _tenant(options, config)
        case "key":
            return _key(options, config)
        case _:
            return checks.version()


def _tenant(options: argparse.Namespace, config: Config) -> CommandResult:
    match options.action:
        case "create":
            return tenants.tenant_create(config, options.name, changes(options, SETTINGS))
        case "list":
            return tenants.tenant_list(config)
        case "set":
            return tenants.tenant_set(config, options.name, changes(options, SETTINGS))
        case "suspend":
            return tenants.tenant_status(config, options.name, "suspended")
        case "delete":
            return tenants.tenant_delete(config, options.name)
        case _:
            return tenants.tenant_status(config, options.name, "active")


def _key(options: argparse.Namespace, config: Config) -> CommandResult:
    match options.action:
        case "create":
            return tenants.key_create(
                config,
                options.tenant,
                options.workspace,
                options.label,
                options.expires,
                options.scopes,
                changes(options, LIMITS),
                options.tolerance,
            )
        case "list":
            return tenants.key_list(config, options.tenant)
        case "set":
            return tenants.key_set(
                config,
                options.key,
                options.label,
                options.scopes,
                changes(options, LIMITS),
                options.tolerance,
            )
        case "rotate":
            return tenants.key_rotate(config, options.key, options.grace)
        case _:
            return tenants.key_revoke(config, options.key)


def _serve(options: argparse.Namespace, config: Config) -> int:
    def read_config() -> Config:
        return load_config(options.config, os.environ, _flags(options))[0]

    with _ProgressBar(not is_terminal()) as bar:
        return serve.run(config, lambda line: print(line, flush=True), bar.show, read_config)


def _pull(options: argparse.Namespace, config: Config) -> CommandResult:
    name = config.model.name
    with _ProgressBar(options.quiet or not is_terminal()) as bar:
        path = pull(name, config.models_dir, bar.show, verify=options.verify)
    return CommandResult("" if options.quiet else str(path), {"model": name, "path": str(path)})


def _print_error(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _fail(status: int, message: str) -> int:
    _print_error(f"trunkline: {' '.join(message.split())}")
    return status


def is_terminal() -> bool:
    """Return whether standard error is a terminal."""
    return sys.stderr.isatty()


class _ProgressBar:
    """A progress bar on a terminal; it draws nothing elsewhere."""

    def __init__(self, is_quiet: bool) -> None:
        self._is_quiet = is_quiet
        self._bar: tqdm | None = None
        self._part = ""

    def __enter__(self) -> _ProgressBar:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def show(self, done: int, total: int) -> None:
        """Show that `done` of `total` bytes are done."""
        if self._is_quiet:
            return
        if self._bar is None:
            self._bar = tqdm(total=total, unit="B", unit_scale=True, unit_divisor=1024)
        self._bar.update(done - self._bar.n)

    def show_part(self, part: str, done: int, total: int) -> None:
        """Show that `done` of `total` rows are done. Each part of the work has its own bar."""
        if self._is_quiet:
            return
        if self._bar is None or self._part != part:
            self.__exit__()
            self._part = part
            self._bar = tqdm(desc=part, total=total, unit=" rows", unit_scale=True)
        self._bar.update(done - self._bar.n)


if __name__ == "__main__":
    sys.exit(main())
