"""The arguments of every command, and what is wrong with those that came.

It decides nothing: a command's name and its options. `gateway.__main__` runs what was asked for.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from engine.model_store import DEFAULT_MODEL

Adder = Callable[[argparse.ArgumentParser], None]


class UsageError(Exception):
    """Arguments that cannot be; the message is one line that says where and what."""


class Parser(argparse.ArgumentParser):
    """Raises instead of exiting, in one line instead of the whole usage; knows no abbreviations."""

    def __init__(self, *args: Any, **options: Any) -> None:
        options.setdefault("allow_abbrev", False)
        super().__init__(*args, **options)

    def error(self, message: str) -> NoReturn:
        """Raises UsageError."""
        words = self.prog.removeprefix("trunkline").strip()
        where = f"{words}: " if words else ""
        raise UsageError(f"{where}{message} (see {self.prog} --help)")


def build_parser(more: Mapping[str, tuple[str, Adder]]) -> Parser:
    """All commands. `more`: further ones by name, with their help and their arguments.

    What is parsed has `command`, for tenants and keys `action`, and the options.
    """
    parser = Parser(prog="trunkline", description="Prompt caching for models you run yourself.")
    shared = _shared()
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, text: str) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=text, description=text, parents=[shared])

    command = add("serve", "Run the gateway and its engine.")
    command.add_argument("model", nargs="?", help=f"model to serve (default: {DEFAULT_MODEL})")
    command.add_argument("--listen", metavar="HOST:PORT", help="for clients")
    command.add_argument("--admin-listen", metavar="HOST:PORT", help="for metrics")
    command.add_argument("--device", choices=("auto", "cpu", "cuda"))
    command = add("pull", "Fetch a model.")
    command.add_argument("model", nargs="?", help=f"default: {DEFAULT_MODEL}")
    command.add_argument("--verify", action="store_true", help="hash what is already here")
    command.add_argument("--quiet", action="store_true", help="no progress bar, no path")
    add("check-config", "Print every setting and where it comes from.")
    add("doctor", "Is everything here that a server needs?")
    add("version", "Print the version.")
    for name, (text, add_arguments) in more.items():
        add_arguments(add(name, text))
    command = add("usage", "Sums of the ledger, by tenant.")
    command.add_argument("--tenant", metavar="NAME")
    command.add_argument("--days", type=int, metavar="N", help="only the last N days")
    _add_tenant_actions(commands, shared)
    _add_key_actions(commands, shared)
    return parser


def _shared() -> Parser:
    shared = Parser(add_help=False)
    shared.add_argument("--config", type=Path, metavar="FILE", help="TOML settings")
    text = "models, database and key (default: data)"
    shared.add_argument("--data-dir", metavar="DIR", help=text)
    shared.add_argument("--json", action="store_true", help="print JSON")
    return shared


def _add_tenant_actions(commands: Any, shared: Parser) -> None:
    text = "Create, list, change, suspend, resume and delete tenants."
    actions = commands.add_parser("tenant", help=text, description=text).add_subparsers(
        dest="action", required=True, metavar="ACTION"
    )
    texts = {
        "create": "Make a tenant.",
        "list": "All tenants with what is set of them.",
        "set": "Change what is named of a tenant; the rest stays.",
        "suspend": "Its keys stop working within a second; what runs is finished.",
        "resume": "Its keys work again within a second.",
        "delete": "Delete a tenant with all it keeps; its entries stay, under a pseudonym.",
    }
    for action, text in texts.items():
        parser = actions.add_parser(action, help=text, description=text, parents=[shared])
        if action != "list":
            parser.add_argument("name")
        if action in ("create", "set"):
            _add_shares(parser)
            _add_limits(parser)


def _add_shares(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tier", metavar="NAME", help="which prices hold for it")
    text = "blocks of the cache that nobody takes from it"
    parser.add_argument("--floor", type=int, metavar="BLOCKS", help=text)
    text = "blocks it never exceeds, or `none`"
    parser.add_argument("--ceiling", type=_blocks, metavar="BLOCKS", help=text)
    parser.add_argument("--weight", type=float, help="its share of service and of the rest")
    parser.add_argument("--priority", type=int, help="higher is served first")
    text = "retention classes it may ask for, with commas between, or `all`"
    parser.add_argument("--classes", type=_classes, metavar="NAMES", help=text)
    text = "blocks that may be promised to it at once, or `none` for no limit"
    parser.add_argument("--promised", type=_blocks, metavar="BLOCKS", help=text)


def _add_limits(parser: argparse.ArgumentParser) -> None:
    texts = {
        "requests-per-minute": "requests",
        "tokens-per-minute": "prompt tokens not in the cache, and output tokens",
        "input-tokens-per-minute": "prompt tokens not in the cache",
        "output-tokens-per-minute": "output tokens",
        "requests-at-once": "requests that run",
    }
    for name, text in texts.items():
        parser.add_argument(f"--{name}", type=_limit, metavar="N", help=f"{text}; or `none`")


def _number_or_none(text: str) -> int | str:
    return text if text == "none" else int(text)


def _blocks(text: str) -> int | str:
    return _number_or_none(text)


def _limit(text: str) -> int | str:
    return _number_or_none(text)


def _classes(text: str) -> tuple[str, ...] | str:
    return "none" if text == "all" else tuple(filter(None, text.split(",")))


# What argparse calls them when what came is none.
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
"""Options by what they set."""


def changes(options: argparse.Namespace, names: Mapping[str, str]) -> dict[str, object]:
    """What was told to be set, by the setting's own name; `none` takes a limit away."""
    given = {setting: getattr(options, option, None) for option, setting in names.items()}
    return {
        setting: None if value == "none" else value
        for setting, value in given.items()
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

    which = "its id, or its beginning as lists show it"
    scopes = "what it is for, with commas between: inference, usage, cache"
    parser = add("create", "Make a key and print it, once.")
    owner = parser.add_mutually_exclusive_group(required=True)
    owner.add_argument("--tenant", metavar="NAME")
    owner.add_argument("--admin", action="store_true", help="an administrator's key")
    text = "the scope of its cache inside the tenant"
    parser.add_argument("--workspace", default="default", metavar="NAME", help=text)
    parser.add_argument("--label", default="", help="a note for lists")
    parser.add_argument("--expires", metavar="TIME", help="such as 90d, 12h, 30m")
    parser.add_argument("--scopes", metavar="NAMES", help=f"{scopes} (default: all of them)")
    _add_limits(parser)
    parser = add("list", "Keys by their beginnings.")
    parser.add_argument("--tenant", metavar="NAME")
    parser = add("set", "Change what is named of a key; the rest stays.")
    parser.add_argument("key", help=which)
    parser.add_argument("--label", help="a note for lists")
    parser.add_argument("--scopes", metavar="NAMES", help=scopes)
    _add_limits(parser)
    parser = add("rotate", "Print a new key like this one, which works on for a while.")
    parser.add_argument("key", help=which)
    text = "how long the old one works on: 30m, 24h, 7d (default: 24h)"
    parser.add_argument("--grace", default="24h", metavar="TIME", help=text)
    parser = add("revoke", "It stops working within a second.")
    parser.add_argument("key", help=which)
