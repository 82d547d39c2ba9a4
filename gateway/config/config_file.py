"""Which configuration file a command reads: a named one, or `trunkline.toml` in the working folder.

A named file is read whosever it is. The working folder may be one that others write to, such as
/tmp, and the settings name files, addresses and tenants, so the file there has to be this user's.
This module reads no setting; `loading` does.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Mapping
from pathlib import Path

from msgspec import Struct

from gateway.config.decoding import ConfigError
from gateway.config.tables import Config

CONFIG_FILE = "trunkline.toml"
"""Read from the working folder where no other file is named."""
PLACES = f"--config, TRUNKLINE_CONFIG or ./{CONFIG_FILE}"
ROOT_UID = 0


def find_config_file(
    given: Path | None, environment: Mapping[str, str], folder: Path
) -> Path | None:
    """Return the file to read: `given`, else `TRUNKLINE_CONFIG`, else `trunkline.toml` in `folder`,
    else None.

    Raises ConfigError for a file in the folder, or a link there, that belongs to another user than
    root, and for one that every user may write.
    """
    if given is not None:
        return given
    if named := environment.get("TRUNKLINE_CONFIG"):
        return Path(named)
    file = folder / CONFIG_FILE
    try:
        link, target = file.lstat(), file.stat()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from error
    strangers = {link.st_uid, target.st_uid} - {ROOT_UID, os.geteuid()}
    anyway = f"or name it, as in --config {CONFIG_FILE}"
    if strangers:
        raise ConfigError(
            f"{file} belongs to the user {min(strangers)}; expected a file of yours or root's:"
            f" move it away, {anyway}"
        )
    if target.st_mode & stat.S_IWOTH:
        raise ConfigError(
            f"{file} can be changed by every user; expected one that others cannot write: chmod"
            f" o-w {file}, {anyway}"
        )
    return file


def describe(file: Path | str | None) -> str:
    """Return a file's path, or that there is none and where one would be read."""
    return f"none ({PLACES})" if file is None else str(file)


class ConfigSource(Struct, frozen=True):
    """Where a server's settings come from."""

    file: Path | None
    """The one that was read at the start."""
    read: Callable[[], Config]
    """Reads the settings anew; raises ConfigError."""
