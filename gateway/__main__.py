"""The command line: the only file that prints or exits.

Exit status 0: done. 1: it failed, one line says why. 2: bad arguments or settings, one line says
what, where and what would be right.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from engine.errors import EngineError
from engine.model_store import DEFAULT_MODEL, pull
from gateway.bench import cli as bench
from gateway.bench.client import BenchError
from gateway.commands import checks, serve, tenants
from gateway.config import Config, ConfigError, Origin, load_config
from tenancy.errors import BadName, TenancyError

Table = list[dict[str, object]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit status."""
    options = _parser().parse_args(arguments)
    try:
        config, origin = _config(options)
        status: int = options.run(options, config, origin)
        return status
    except (ConfigError, BadName) as error:
        return _fail(2, str(error))
    except (EngineError, TenancyError, BenchError) as error:
        return _fail(1, str(error))
    except OSError as error:
        what = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        return _fail(1, what)
    except KeyboardInterrupt:
        return _fail(130, "interrupted")


def _fail(status: int, message: str) -> int:
    print(f"trunkline: {message}", file=sys.stderr)
    return status


def _config(options: argparse.Namespace) -> tuple[Config, Origin]:
    flags = {
        "data_dir": options.data_dir,
        "server.listen": getattr(options, "listen", None),
        "admin.listen": getattr(options, "admin_listen", None),
        "engine.device": getattr(options, "device", None),
        "model.name": getattr(options, "model", None),
    }
    given = {path: value for path, value in flags.items() if value is not None}
    return load_config(options.config, os.environ, given)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="trunkline", description="Prompt caching for models you run yourself."
    )
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--config", type=Path, metavar="FILE", help="TOML settings")
    shared.add_argument(
        "--data-dir", metavar="DIR", help="models, database and key (default: data)"
    )
    shared.add_argument("--json", action="store_true", help="print JSON")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, text: str, run: Callable[..., int]) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text, parents=[shared])
        command.set_defaults(run=run)
        return command

    command = add("serve", "Run the gateway and its engine.", _serve)
    command.add_argument("model", nargs="?", help=f"model to serve (default: {DEFAULT_MODEL})")
    command.add_argument("--listen", metavar="HOST:PORT")
    command.add_argument("--admin-listen", metavar="HOST:PORT")
    command.add_argument("--device", choices=("auto", "cpu", "cuda"))
    command = add("pull", "Fetch a model.", _pull)
    command.add_argument("model", nargs="?")
    command.add_argument("--verify", action="store_true", help="hash what is already here")
    command.add_argument("--quiet", action="store_true", help="no progress bar")
    add("check-config", "Print every setting and where it comes from.", _check_config)
    add("doctor", "Is everything here that a server needs?", _doctor)
    add("version", "Print the version.", _version)
    bench.add_bench_arguments(add("bench", "Measure an endpoint; ours if none is named.", _bench))
    bench.add_replay_arguments(add("replay", "Send an endpoint a recorded trace.", _replay))
    command = add("usage", "Sums of the ledger, by tenant.", _usage)
    command.add_argument("--tenant")
    command.add_argument("--days", type=int, help="only the last so many days")
    _add_tenant_commands(commands, shared)
    _add_key_commands(commands, shared)
    return parser


def _add_tenant_commands(commands: Any, shared: argparse.ArgumentParser) -> None:
    text = "Create, list, change, suspend and resume tenants."
    actions = commands.add_parser("tenant", help=text, description=text).add_subparsers(
        dest="action", required=True, metavar="ACTION"
    )
    for action in ("create", "list", "set", "suspend", "resume"):
        parser = actions.add_parser(action, parents=[shared])
        parser.set_defaults(run=_tenant)
        if action != "list":
            parser.add_argument("name")
        if action in ("create", "set"):
            parser.add_argument("--floor", type=int, help="blocks never taken by others")
            parser.add_argument("--ceiling", type=int, help="blocks never exceeded")
            parser.add_argument("--weight", type=float, help="share of service and of spare blocks")
            parser.add_argument("--priority", type=int, help="higher is served first")


def _add_key_commands(commands: Any, shared: argparse.ArgumentParser) -> None:
    text = "Create, list and revoke keys."
    actions = commands.add_parser("key", help=text, description=text).add_subparsers(
        dest="action", required=True, metavar="ACTION"
    )
    parser = actions.add_parser("create", parents=[shared])
    parser.add_argument("--tenant", required=True)
    parser.add_argument("--workspace", default="default")
    parser.add_argument("--label", default="")
    parser.add_argument("--expires", metavar="TIME", help="such as 90d, 12h, 30m")
    parser.set_defaults(run=_key)
    parser = actions.add_parser("list", parents=[shared])
    parser.add_argument("--tenant")
    parser.set_defaults(run=_key)
    parser = actions.add_parser("revoke", parents=[shared])
    parser.add_argument("key", help="its id, or its beginning as lists show it")
    parser.set_defaults(run=_key)


# --- commands ----------------------------------------------------------------------------------


def _serve(options: argparse.Namespace, config: Config, origin: Origin) -> int:
    with _Bar(not sys.stderr.isatty()) as bar:
        return serve.run(config, lambda line: print(line, flush=True), bar.show)


def _pull(options: argparse.Namespace, config: Config, origin: Origin) -> int:
    with _Bar(options.quiet or not sys.stderr.isatty()) as bar:
        path = pull(config.model.name, config.models_dir, bar.show, verify=options.verify)
    if options.json:
        print(json.dumps({"model": config.model.name, "path": str(path)}))
    elif not options.quiet:
        print(path)
    return 0


def _check_config(options: argparse.Namespace, config: Config, origin: Origin) -> int:
    _show(checks.check_config(config, origin), options.json)
    return 0


def _doctor(options: argparse.Namespace, config: Config, origin: Origin) -> int:
    table, is_well = checks.doctor(config)
    _show(table, options.json)
    return 0 if is_well else 1


def _version(options: argparse.Namespace, config: Config, origin: Origin) -> int:
    print(checks.version())
    return 0


def _bench(options: argparse.Namespace, config: Config, origin: Origin) -> int:
    report = bench.run_bench(options, config.model.name, config.models_dir, _say_aside)
    print(report.json() if options.json else report.text())
    return 0


def _replay(options: argparse.Namespace, config: Config, origin: Origin) -> int:
    report = bench.run_replay(options, config.model.name, config.models_dir, _say_aside)
    print(report.json() if options.json else report.text())
    return 0


def _say_aside(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _usage(options: argparse.Namespace, config: Config, origin: Origin) -> int:
    _show(checks.usage(config, options.tenant, options.days), options.json)
    return 0


def _tenant(options: argparse.Namespace, config: Config, origin: Origin) -> int:
    names = {"floor": "floor_blocks", "ceiling": "ceiling_blocks"}
    changes: dict[str, object] = {
        names.get(name, name): getattr(options, name)
        for name in ("floor", "ceiling", "weight", "priority")
        if getattr(options, name, None) is not None
    }
    match options.action:
        case "create":
            print(tenants.tenant_create(config, options.name, changes))
        case "list":
            _show(tenants.tenant_list(config), options.json)
        case "set":
            print(tenants.tenant_set(config, options.name, changes))
        case "suspend":
            print(tenants.tenant_status(config, options.name, "suspended"))
        case _:
            print(tenants.tenant_status(config, options.name, "active"))
    return 0


def _key(options: argparse.Namespace, config: Config, origin: Origin) -> int:
    match options.action:
        case "create":
            print(
                tenants.key_create(
                    config, options.tenant, options.workspace, options.label, options.expires
                )
            )
        case "list":
            _show(tenants.key_list(config, options.tenant), options.json)
        case _:
            print(tenants.key_revoke(config, options.key))
    return 0


def _show(table: Table, as_json: bool) -> None:
    """Rows for a program, or columns for a person."""
    if as_json:
        print(json.dumps(table, indent=1))
        return
    if not table:
        print("nothing yet")
        return
    names = list(table[0])
    rows = [names, *([_cell(row[name]) for name in names] for row in table)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(names))]
    for row in rows:
        print(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        )


def _cell(value: object) -> str:
    return "-" if value is None else str(value)


class _Bar:
    """A progress bar on a terminal, nothing elsewhere."""

    def __init__(self, is_quiet: bool) -> None:
        self._is_quiet = is_quiet
        self._bar: tqdm | None = None

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def show(self, done: int, total: int) -> None:
        """`done` of `total` bytes."""
        if self._is_quiet:
            return
        if self._bar is None:
            self._bar = tqdm(total=total, unit="B", unit_scale=True, unit_divisor=1024)
        self._bar.update(done - self._bar.n)


if __name__ == "__main__":
    sys.exit(main())
