"""`trunkline openapi`: prints the OpenAPI document of a listener. It needs no server."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping

from gateway.api.listeners import described
from gateway.cli.result import CommandCall, CommandResult, Entry


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    text = "the admin listener's document (default: the public listener's)"
    parser.add_argument("--admin", action="store_true", help=text)


def _run(call: CommandCall) -> CommandResult:
    """Return a listener's document, as JSON in both forms."""
    found = described("admin" if call.options.admin else "public")
    return CommandResult(json.dumps(found, indent=1), found)


COMMANDS: Mapping[str, Entry] = {"openapi": Entry(_add_arguments, _run)}
