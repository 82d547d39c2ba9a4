"""The command line: parses arguments, runs one command, prints its result.

No other file prints or exits. docs/operations.md says what each exit status means.
"""

from __future__ import annotations

import argparse
import errno
import io
import json
import os
import shutil
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from gateway.cli.arguments import UsageError, build_parser, find_entry
from gateway.cli.commands import version_text

if TYPE_CHECKING:
    from tqdm import tqdm

    from gateway.config import Config, Origin


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    _print_any_character()
    try:
        options = build_parser(given[:1]).parse_args(given)
        if options.version:
            print(version_text(), flush=True)
            return 0
        if options.command is None:
            raise UsageError("required: COMMAND (see trunkline --help)")
        return _run(options)
    except UsageError as error:
        return _fail(2, str(error))
    except BrokenPipeError:  # the reader of standard output has closed it
        _drop_output()
        return 0
    except OSError as error:
        if error.filename is None:
            _drop_output()
        return _fail(1, _reason(error))
    except KeyboardInterrupt:
        return _fail(130, "interrupted")


def _print_any_character() -> None:
    """Let output that cannot hold a character write its number: a label may have any."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _flags(options: argparse.Namespace) -> dict[str, object]:
    """Return the settings given as options, by their key path in the configuration file."""
    flags = {
        "data_dir": options.data_dir,
        "server.listen": getattr(options, "listen", None),
        "admin.listen": getattr(options, "admin_listen", None),
        "engine.device": getattr(options, "device", None),
        "engine.role": getattr(options, "role", None),
        "model.name": getattr(options, "model", None),
    }
    return {path: value for path, value in flags.items() if value is not None}


def _run(options: argparse.Namespace) -> int:
    """Run the command of the options. The imports take longer than `--help` may."""
    from engine.errors import EngineError
    from gateway.cli.result import CommandCall, CommandError
    from gateway.config import ConfigError, load_config
    from gateway.config.config_file import ConfigSource, find_config_file
    from tenancy.errors import BadName, BadPrice, TenancyError

    def find() -> Path | None:
        return find_config_file(options.config, os.environ, Path.cwd())

    def read(file: Path | None) -> tuple[Config, Origin]:
        return load_config(file, os.environ, _flags(options))

    try:
        file = find()
        config, origin = read(file)
        with _ProgressBar(not is_terminal()) as bar:
            call = CommandCall(
                options=options,
                config=config,
                origin=origin,
                # A file that was read and is gone is an error, not a server of defaults.
                source=ConfigSource(file, lambda: read(find() or file)[0]),
                say=lambda line: print(line, flush=True),
                warn=_print_error,
                write=sys.stdout.buffer.write,
                show=bar.show,
                columns=shutil.get_terminal_size().columns,
                has_colours=has_colours(sys.stdout.isatty()),
            )
            result = find_entry(options.command).run(call)
    except (ConfigError, BadName, BadPrice) as error:
        return _fail(2, str(error))
    except (CommandError, EngineError, TenancyError) as error:
        return _fail(1, str(error))
    if options.json and result.data is not None:
        print(json.dumps(result.data, indent=1), flush=True)
    elif result.text:
        print(_with_heading(result.text) if result.has_heading else result.text, flush=True)
    return result.status


def _with_heading(text: str) -> str:
    """Return a table with a bold first line, on a terminal with colours."""
    heading, _, rest = text.partition("\n")
    return f"{_bold(heading)}\n{rest}" if has_colours(sys.stdout.isatty()) else text


def has_colours(is_a_terminal: bool) -> bool:
    """Return whether to colour output: on a terminal that can, unless `NO_COLOR` is set."""
    return is_a_terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _bold(text: str) -> str:
    return f"\x1b[1m{text}\x1b[0m"


_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def _drop_output() -> None:
    """Let what standard output still holds go nowhere: Python writes it at its end, and fails
    again."""
    with suppress(OSError):  # it is no file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _reason(error: OSError) -> str:
    """Return the line of a failed system call: the file, the reason, the remedy for a full disk.

    A write that names no file is one to standard output: files are written under their names.
    """
    reason = f"{error.filename or 'standard output'}: {error.strerror or error}"
    if error.errno in _NO_ROOM:
        reason += "; free space there, or write to another disk"
    return reason


def _print_error(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _fail(status: int, message: str) -> int:
    name = "trunkline:"
    if has_colours(is_terminal()):
        name = f"\x1b[31m{name}\x1b[0m"
    _print_error(f"{name} {' '.join(message.split())}")
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

    def show(self, part: str, done: int, total: int) -> None:
        """Show that `done` of `total` rows, or bytes of a model, are done.

        Each part of the work has its own bar.
        """
        if self._is_quiet:
            return
        if self._bar is None or self._part != part:
            from tqdm import tqdm

            self.__exit__()
            self._part = part
            unit = {"unit": "B", "unit_divisor": 1024} if part == "model" else {"unit": " rows"}
            self._bar = tqdm(desc=part, total=total, unit_scale=True, **unit)
        self._bar.update(done - self._bar.n)


if __name__ == "__main__":
    sys.exit(main())
