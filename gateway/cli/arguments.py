"""Arguments of every command, and errors for wrong ones.

This module runs no command: `gateway.__main__` does.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from engine.model_store import DEFAULT_MODEL
from tenancy.types import TOLERANCE_MODES

Adder = Callable[[argparse.ArgumentParser], None]


class UsageError(Exception):
    """A wrong argument; the message is one line that names it."""


class Parser(argparse.ArgumentParser):
    """A parser that raises instead of exiting, with one line of message; it allows no
    abbreviations."""

    def __init__(self, *args: Any, **options: Any) -> None:
        options.setdefault("allow_abbrev", False)
        super().__init__(*args, **options)

    def error(self, message: str) -> NoReturn:
        """Raise UsageError."""
        words = self.prog.removeprefix("trunkline").strip()
        prefix = f"{words}: " if words else ""
        raise UsageError(f"{prefix}{message} (see {self.prog} --help)")


def build_parser(more: Mapping[str, tuple[str, Adder]]) -> Parser:
    """Return the parser of all commands. `more`: further commands by name, each with help and
    arguments.

    Parsed options have `command`, for tenants and keys also `action`.
    """
    parser = Parser(prog="trunkline", description="Prompt caching for models you run yourself.")
    shared = _shared()
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, text: str) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=text, description=text, parents=[shared])

    command = add("serve", "Run the gateway and its engine.")
    command.add_argument("model", nargs="?", help=f"model to serve (default: {DEFAULT_MODEL})")
    command.add_argument("--listen", metavar="HOST:PORT", help="public listener")
    command.add_argument("--admin-listen", metavar="HOST:PORT", help="admin listener")
    command.add_argument("--device", choices=("auto", "cpu", "cuda"))
    command = add("pull", "Fetch a model.")
    command.add_argument("model", nargs="?", help=f"default: {DEFAULT_MODEL}")
    command.add_argument("--verify", action="store_true", help="hash files that exist")
    command.add_argument("--quiet", action="store_true", help="no progress bar, no path")
    add("check-config", "Print every setting and its source.")
    add("doctor", "Check what a server needs: packages, database, addresses, model.")
    add("version", "Print the version.")
    for name, (text, add_arguments) in more.items():
        add_arguments(add(name, text))
    command = add("usage", "Print usage by tenant.")
    command.add_argument("--tenant", metavar="NAME")
    command.add_argument("--days", type=int, metavar="N", help="only the last N days")
    _add_tenant_actions(commands, shared)
    _add_key_actions(commands, shared)
    return parser


def _shared() -> Parser:
    shared = Parser(add_help=False)
    shared.add_argument("--config", type=Path, metavar="FILE", help="TOML settings")
    text = "models, database and keys (default: data)"
    shared.add_argument("--data-dir", metavar="DIR", help=text)
    shared.add_argument("--json", action="store_true", help="print JSON")
    return shared


def _add_tenant_actions(commands: Any, shared: Parser) -> None:
    text = "Create, list, change, suspend, resume and delete tenants."
    actions = commands.add_parser("tenant", help=text, description=text).add_subparsers(
        dest="action", required=True, metavar="ACTION"
    )
    texts = {
        "create": "Create a tenant.",
        "list": "List tenants with their settings.",
        "set": "Change the given settings of a tenant.",
        "suspend": "Disable a tenant's keys within a second; running requests finish.",
        "resume": "Enable a suspended tenant's keys within a second.",
        "delete": "Delete a tenant and its data; ledger entries stay under a pseudonym.",
    }
    for action, text in texts.items():
        parser = actions.add_parser(action, help=text, description=text, parents=[shared])
        if action != "list":
            parser.add_argument("name")
        if action in ("create", "set"):
            _add_shares(parser)
            _add_limits(parser)


def _add_shares(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tier", metavar="NAME", help="pricing tier")
    text = "guaranteed cache blocks"
    parser.add_argument("--floor", type=int, metavar="BLOCKS", help=text)
    text = "most cache blocks, or `none`"
    parser.add_argument("--ceiling", type=_blocks, metavar="BLOCKS", help=text)
    parser.add_argument("--weight", type=float, help="scheduling weight")
    parser.add_argument("--priority", type=int, help="scheduling priority; higher runs first")
    text = "allowed retention classes, comma-separated, or `all`"
    parser.add_argument("--classes", type=_classes, metavar="NAMES", help=text)
    text = "most promised blocks, or `none`"
    parser.add_argument("--promised", type=_blocks, metavar="BLOCKS", help=text)


def _add_limits(parser: argparse.ArgumentParser) -> None:
    texts = {
        "requests-per-minute": "requests per minute",
        "tokens-per-minute": "uncached prompt tokens and output tokens per minute",
        "input-tokens-per-minute": "uncached prompt tokens per minute",
        "output-tokens-per-minute": "output tokens per minute",
        "requests-at-once": "concurrent requests",
    }
    for name, text in texts.items():
        parser.add_argument(f"--{name}", type=_limit, metavar="N", help=f"{text}, or `none`")


def _number_or_none(text: str) -> int | str:
    return text if text == "none" else int(text)


def _blocks(text: str) -> int | str:
    return _number_or_none(text)


def _limit(text: str) -> int | str:
    return _number_or_none(text)


def _classes(text: str) -> tuple[str, ...] | str:
    return "none" if text == "all" else tuple(filter(None, text.split(",")))


# argparse names these types in its errors: "invalid limit value: 'x'".
_blocks.__name__ = "number of blocks"
_limit.__name__ = "limit"

LIMITS = {
    name: name
    for name in (
        "requests_per_minute",
        "tokens_per_minute",
        "input_tokens_per_minute",
        "output_tokens_per_minute",
        "requests_at_once",
    )
}
"""Rate limits by option name."""
SETTINGS = {
    "tier": "tier",
    "floor": "floor_blocks",
    "ceiling": "ceiling_blocks",
    "weight": "weight",
    "priority": "priority",
    "classes": "classes",
    "promised": "promised_blocks_max",
    **LIMITS,
}
"""Tenant settings by option name."""


def changes(options: argparse.Namespace, names: Mapping[str, str]) -> dict[str, object]:
    """Return the given settings by their names; the value `none` removes a limit."""
    values = {setting: getattr(options, option, None) for option, setting in names.items()}
    return {
        setting: None if value == "none" else value
        for setting, value in values.items()
        if value is not None
    }


def _add_key_actions(commands: Any, shared: Parser) -> None:
    text = "Create, list, change, rotate and revoke keys."
    actions = commands.add_parser("key", help=text, description=text).add_subparsers(
        dest="action", required=True, metavar="ACTION"
    )

    def add(action: str, text: str) -> argparse.ArgumentParser:
        parser: argparse.ArgumentParser = actions.add_parser(
            action, help=text, description=text, parents=[shared]
        )
        return parser

    which = "key id, or the prefix that lists show"
    scopes = (
        "comma-separated scopes: inference, usage, cache; of an administrator's key: read, tenants,"
        " money, erase"
    )
    parser = add("create", "Create a key and print it, once.")
    owner = parser.add_mutually_exclusive_group(required=True)
    owner.add_argument("--tenant", metavar="NAME")
    owner.add_argument("--admin", action="store_true", help="create an administrator's key")
    text = "cache scope inside the tenant (default: default)"
    parser.add_argument("--workspace", default="default", metavar="NAME", help=text)
    parser.add_argument("--label", default="", help="label shown in lists")
    parser.add_argument(
        "--expires", metavar="TIME", help="lifetime: 90d, 12h, 30m (default: unlimited)"
    )
    parser.add_argument("--scopes", metavar="NAMES", help=f"{scopes} (default: all)")
    tolerance = "fields that are not honoured (default: as the server)"
    parser.add_argument("--tolerance", choices=TOLERANCE_MODES, help=tolerance)
    _add_limits(parser)
    parser = add("list", "List keys by prefix.")
    parser.add_argument("--tenant", metavar="NAME")
    parser = add("set", "Change the given settings of a key.")
    parser.add_argument("key", help=which)
    parser.add_argument("--label", help="label shown in lists")
    parser.add_argument("--scopes", metavar="NAMES", help=scopes)
    parser.add_argument("--tolerance", choices=(*TOLERANCE_MODES, "server"), help=tolerance)
    _add_limits(parser)
    parser = add(
        "rotate", "Create and print a replacement; the old key expires after a grace period."
    )
    parser.add_argument("key", help=which)
    text = "grace period of the old key: 30m, 24h, 7d (default: 24h)"
    parser.add_argument("--grace", default="24h", metavar="TIME", help=text)
    parser = add("revoke", "Disable a key within a second, for good.")
    parser.add_argument("key", help=which)
