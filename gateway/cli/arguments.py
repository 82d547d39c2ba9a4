"""The parser of all commands, options that several have, and errors for wrong ones.

This module runs no command: `gateway.__main__` does.
"""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Callable, Collection, Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from gateway.cli.commands import COMMANDS

if TYPE_CHECKING:
    from gateway.cli.result import Entry  # its import takes longer than `trunkline --help` may

T = TypeVar("T")


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
        raise UsageError(f"{prefix}{_shorter(message)} (see {self.prog} --help)")


CHOICES_SHOWN_MAX = 8
"""Choices that an error names beside the one that was probably meant."""
_CHOICE = re.compile(r"argument (.*): invalid choice: ('.*') \(choose from (.*)\)")


def _shorter(message: str) -> str:
    """Return argparse's message for a word that is none of its choices with the one that was
    probably meant, in the place of many; other messages as they are."""
    found = _CHOICE.fullmatch(message)
    if found is None:
        return message
    what, given, choices = found.groups()
    known = [one.strip("' ") for one in choices.split(",")]
    close = difflib.get_close_matches(given.strip("'"), known, n=1)
    if not close:
        return message
    if len(known) <= CHOICES_SHOWN_MAX:
        return f"{message}; did you mean {close[0]!r}?"
    return f"unknown {what}: {given}; did you mean {close[0]!r}?"


def build_parser(wanted: Collection[str]) -> Parser:
    """Return the parser of all commands. `wanted`: the commands that get their arguments.

    Parsed options have `command`, for commands with actions also `action`. Imports the modules of
    the wanted commands.
    """
    parser = Parser(prog="trunkline", description="Prompt caching for models you run yourself.")
    parser.add_argument("--version", action="store_true", help="print the version")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, command in COMMANDS.items():
        parents = [] if command.has_actions else [shared_options()]
        added = commands.add_parser(
            name, help=command.text, description=command.text, parents=parents
        )
        if name in wanted:
            find_entry(name).add_arguments(added)
    return parser


def find_entry(name: str) -> Entry:
    """Return the arguments and the function of a command; imports its module."""
    entries: Mapping[str, Entry] = import_module(f"gateway.cli.{COMMANDS[name].module}").COMMANDS
    return entries[name]


def shared_options() -> Parser:
    """Return the options that every command has."""
    shared = Parser(add_help=False)
    shared.add_argument(
        "--config", type=Path, metavar="FILE", help="TOML settings (default: trunkline.toml)"
    )
    text = "models, database and keys (default: data)"
    shared.add_argument("--data-dir", metavar="DIR", help=text)
    shared.add_argument("--json", action="store_true", help="print JSON")
    return shared


def add_limits(parser: argparse.ArgumentParser) -> None:
    """Add an option for each rate limit."""
    for name, text in _LIMIT_TEXTS.items():
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=_limit, metavar="N", help=f"{text}, or `none`")


def add_actions(
    command: argparse.ArgumentParser, texts: Mapping[str, str]
) -> dict[str, argparse.ArgumentParser]:
    """Add an action with the shared options for each of the texts, which are its help; return their
    parsers."""
    actions = command.add_subparsers(dest="action", required=True, metavar="ACTION")
    shared = shared_options()
    return {
        action: actions.add_parser(action, help=text, description=text, parents=[shared])
        for action, text in texts.items()
    }


def named(words: str, expected: str) -> Callable[[Callable[[str], T]], Callable[[str], T]]:
    """Name what an option takes, and say what is expected where its parser raises ValueError."""

    def name(parse: Callable[[str], T]) -> Callable[[str], T]:
        def parse_or_tell(text: str) -> T:
            try:
                return parse(text)
            except ValueError as error:
                message = f"invalid {words}: {text[:64]!r}; expected {expected}"
                raise argparse.ArgumentTypeError(message) from error

        return parse_or_tell

    return name


def number_or_none(text: str) -> int | str:
    """Return a whole number, or the word `none`, which removes a limit."""
    return text if text == "none" else int(text)


@named("limit", "a whole number, or none")
def _limit(text: str) -> int | str:
    return number_or_none(text)


_LIMIT_TEXTS = {
    "requests_per_minute": "requests per minute",
    "tokens_per_minute": "uncached prompt tokens and output tokens per minute",
    "input_tokens_per_minute": "uncached prompt tokens per minute",
    "output_tokens_per_minute": "output tokens per minute",
    "requests_at_once": "concurrent requests",
}
LIMITS = {name: name for name in _LIMIT_TEXTS}
"""Rate limits by option name."""


def changes(options: argparse.Namespace, names: Mapping[str, str]) -> dict[str, object]:
    """Return the given settings by their names; the value `none` removes a limit."""
    values = {setting: getattr(options, option, None) for option, setting in names.items()}
    return {
        setting: None if value == "none" else value
        for setting, value in values.items()
        if value is not None
    }
