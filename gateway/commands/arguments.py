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
    text = "Create, list, change, suspend and resume tenants."
    actions = commands.add_parser("tenant", help=text, description=text).add_subparsers(
        dest="action", required=True, metavar="ACTION"
    )
    texts = {
        "create": "Make a tenant.",
        "list": "All tenants with their shares.",
        "set": "Change a tenant's shares; what is not named stays.",
        "suspend": "Its keys stop working within a second.",
        "resume": "Its keys work again within a second.",
    }
    for action, text in texts.items():
        parser = actions.add_parser(action, help=text, description=text, parents=[shared])
        if action != "list":
            parser.add_argument("name")
        if action in ("create", "set"):
            text = "blocks of the cache that nobody takes from it"
            parser.add_argument("--floor", type=int, metavar="BLOCKS", help=text)
            text = "blocks it never exceeds, or `none`"
            parser.add_argument("--ceiling", type=_ceiling, metavar="BLOCKS", help=text)
            parser.add_argument("--weight", type=float, help="its share of service and of the rest")
            parser.add_argument("--priority", type=int, help="higher is served first")


def _ceiling(text: str) -> int | str:
    return text if text == "none" else int(text)


_ceiling.__name__ = "number of blocks"  # argparse: "invalid number of blocks value: 'x'"


def policy_changes(options: argparse.Namespace) -> dict[str, object]:
    """What `tenant create` and `tenant set` were told, by the policy's field."""
    names = {"floor": "floor_blocks", "ceiling": "ceiling_blocks"}
    given = {
        names.get(name, name): getattr(options, name)
        for name in ("floor", "ceiling", "weight", "priority")
        if getattr(options, name, None) is not None
    }
    return {name: None if value == "none" else value for name, value in given.items()}


def _add_key_actions(commands: Any, shared: Parser) -> None:
    text = "Create, list and revoke keys."
    actions = commands.add_parser("key", help=text, description=text).add_subparsers(
        dest="action", required=True, metavar="ACTION"
    )

    def add(action: str, text: str) -> argparse.ArgumentParser:
        parser: argparse.ArgumentParser = actions.add_parser(
            action, help=text, description=text, parents=[shared]
        )
        return parser

    parser = add("create", "Make a key and print it, once.")
    parser.add_argument("--tenant", required=True, metavar="NAME")
    text = "the scope of its cache inside the tenant"
    parser.add_argument("--workspace", default="default", metavar="NAME", help=text)
    parser.add_argument("--label", default="", help="a note for lists")
    parser.add_argument("--expires", metavar="TIME", help="such as 90d, 12h, 30m")
    parser = add("list", "Keys by their beginnings.")
    parser.add_argument("--tenant", metavar="NAME")
    parser = add("revoke", "It stops working within a second.")
    parser.add_argument("key", help="its id, or its beginning as lists show it")
