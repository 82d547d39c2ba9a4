"""`trunkline version`, `check-config` and `completion`: the program itself and its settings."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from msgspec.structs import replace

from gateway.cli.arguments import build_parser
from gateway.cli.commands import COMMANDS as ALL
from gateway.cli.commands import version_text
from gateway.cli.result import (
    CommandCall,
    CommandError,
    CommandResult,
    Entry,
    add_nothing,
    table_result,
)
from gateway.config import effective
from gateway.config.config_file import describe

SHELLS = ("bash", "zsh", "fish")


def _version(call: CommandCall) -> CommandResult:
    text = version_text()
    return CommandResult(text, {"trunkline": text.partition(" ")[2]})


def _check_config(call: CommandCall) -> CommandResult:
    """Return every setting with its source and its value."""
    rows: list[dict[str, object]] = [
        {"setting": path, "from": source, "value": value}  # the value is last: it may be long
        for path, value, source in effective(call.config, call.origin)
    ]
    table = table_result(rows)
    return replace(table, text=f"{table.text}\nconfiguration file: {describe(call.source.file)}")


def _add_completion(parser: argparse.ArgumentParser) -> None:
    text = "for example: trunkline completion bash > /etc/bash_completion.d/trunkline"
    parser.add_argument("shell", choices=SHELLS, help=text)


def _completion(call: CommandCall) -> CommandResult:
    """Return the script that completes commands, options and choices in a shell."""
    try:
        import shtab
    except ImportError as error:
        message = "completion requires the package shtab: pip install shtab"
        raise CommandError(message) from error
    script = shtab.complete(build_parser(ALL), call.options.shell)
    return CommandResult(script, {"shell": call.options.shell, "script": script})


COMMANDS: Mapping[str, Entry] = {
    "version": Entry(add_nothing, _version),
    "check-config": Entry(add_nothing, _check_config),
    "completion": Entry(_add_completion, _completion),
}
