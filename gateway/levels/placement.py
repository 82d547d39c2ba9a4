"""Where the disk level has its folder, and whether this machine can hold the configured levels.

`gateway.cli.serve` checks before a model is loaded, `trunkline doctor` at any time. The module
changes nothing but what `ServerLock` makes: the folder itself.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from engine.config import EngineConfig, LevelsConfig
from engine.storage.folder import check_folder
from engine.storage.remote.address import CLOUD_EXTRA, can_reach
from engine.storage.sealing.master_key import MasterKeyRefused, read_key, read_key_file
from engine.storage.sealing.unlocking import EXTRA, can_seal
from gateway.config import Config, ConfigError

GIB, MIB = 2**30, 2**20
FOLDER = "levels"
"""The folder on disk, in the data directory, unless `engine.levels.dir` names another."""


class LevelProblem(Struct, frozen=True):
    """A setting that this machine cannot have: its key, and its value with what would be right."""

    key: str
    text: str

    def __str__(self) -> str:
        return f"{self.key}: {self.text}"


def levels_dir(config: Config) -> Path:
    """Return the absolute folder of the disk level. Asks the system for the working directory."""
    return configured_dir(config).absolute()


def configured_dir(config: Config) -> Path:
    """Return the folder of the disk level as it is configured; it may be relative to the working
    directory, as the data directory may."""
    return config.data / (config.engine.levels.dir or FOLDER)


def model_folders(config: Config) -> list[Path]:
    """Return the folder of each model's store: below the disk level's, if there are several."""
    models, folder = config.served_models(), levels_dir(config)
    return [folder] if len(models) == 1 else [folder / model.name for model in models]


def engine_config(config: Config, engine: EngineConfig, model: str = "") -> EngineConfig:
    """Return an engine's settings with an absolute folder of its disk level, and absolute key
    files.

    `model`: one of several models, whose folder lies in the configured one.
    """
    levels = engine.levels
    if not levels.disk_gib:
        return engine
    folder = config.data / (levels.dir or FOLDER) / model
    files = {
        name: str(Path(path).absolute())
        for name in ("key_file", "key_file_before")
        if (path := getattr(levels, name))
    }
    return replace(engine, levels=replace(levels, dir=str(folder.absolute()), **files))


def with_host_mib(engine: EngineConfig, host_mib: int) -> EngineConfig:
    """Return an engine's settings with the number that its host level of "auto" gets."""
    return replace(engine, levels=replace(engine.levels, host_mib=host_mib))


def find_remote_problem(levels: LevelsConfig) -> LevelProblem | None:
    """Return why this machine cannot reach the remote store as it is installed; asks no network."""
    if not levels.remote.url or can_reach(levels.remote.url):
        return None
    return LevelProblem("engine.levels.remote.url", CLOUD_EXTRA)


def find_key_problem(levels: LevelsConfig, environment: Mapping[str, str]) -> LevelProblem | None:
    """Return why this machine cannot seal copies as it is configured. Whether the key is that of
    the store shows only when the store is opened."""
    if not levels.seal or not levels.disk_gib:
        return None
    if not can_seal():
        return LevelProblem("engine.levels.seal", EXTRA)
    name = "key_file" if levels.key_file else "key_env"
    try:
        read_key(levels.key_file, levels.key_env, environment)
        if levels.key_file_before:
            name = "key_file_before"
            read_key_file(Path(levels.key_file_before))
    except MasterKeyRefused as error:
        return LevelProblem(f"engine.levels.{name}", error.message.removesuffix("."))
    return None


def existing_parent(path: Path) -> Path:
    """Return the path, or its nearest parent that exists."""
    path = path.absolute()
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def own_cgroups(
    listing: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> tuple[Path, ...]:
    """Return the folders of this process's control group and of those above it, in version 2 of
    them; only the root if the system does not say. Any of them may bound its memory."""
    try:
        lines = listing.read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return (root,)
    own = [line[3:] for line in lines if line.startswith("0::/")]
    folder = root / own[0].lstrip("/") if own else root
    # A container sees its own group as the root, and sometimes its path outside beside it.
    return tuple(one for one in (folder, *folder.parents) if one.is_relative_to(root))


def total_memory_mib(meminfo: Path, *cgroups: Path) -> int | None:
    """Return the memory of the machine, or of its container if that is less; None if not known."""
    try:
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        total_mib = int(fields["MemTotal"].split()[0]) // 1024
    except (OSError, KeyError, ValueError):
        return None
    for cgroup in cgroups:
        with suppress(OSError, ValueError):  # no group, or one without a limit ("max")
            total_mib = min(total_mib, int((cgroup / "memory.max").read_text()) // MIB)
    return total_mib


def find_problems(config: Config, memory_mib: int | None) -> list[LevelProblem]:
    """Return what this machine cannot have of the configured levels.

    `memory_mib`: of the machine; None if that is not known.
    """
    levels, found = config.engine.levels, []
    host_mib = levels.arena_mib
    if levels.is_on and memory_mib is not None and host_mib >= memory_mib:
        is_stage = levels.host_mib in (0, "auto")
        key = "engine.levels.stage_mib" if is_stage else "engine.levels.host_mib"
        text = (
            f"{host_mib} MiB, and this machine has {memory_mib} MiB of memory; expected less than"
            f" {memory_mib}"
        )
        found.append(LevelProblem(key, text))
    if not levels.disk_gib:
        return found
    folder = levels_dir(config)
    if problem := check_folder(folder):
        found.append(LevelProblem("engine.levels.dir", problem.removesuffix(".")))
        return found
    size_gib = shutil.disk_usage(existing_parent(folder)).total / GIB
    if levels.disk_gib > size_gib:
        text = (
            f"{levels.disk_gib:g} GiB, and the file system of {folder} has {size_gib:.1f} GiB;"
            f" expected at most {size_gib:.1f}"
        )
        found.append(LevelProblem("engine.levels.disk_gib", text))
    elif levels.disk_gib * GIB < levels.slab_mib * MIB:
        text = (
            f"{levels.disk_gib:g} GiB is less than one slab of {levels.slab_mib} MiB; expected at"
            f" least {levels.slab_mib / 1024:g}"
        )
        found.append(LevelProblem("engine.levels.disk_gib", text))
    return found


def levels_here(config: Config) -> list[LevelsConfig]:
    """Return the levels of the models whose engines this server starts, each once: engines
    elsewhere have levels on their own machines."""
    found = []
    for model in config.served_models():
        levels = config.engine_of(model).levels
        if not model.is_elsewhere and levels not in found:
            found.append(levels)
    return found


def find_all_problems(config: Config, levels: LevelsConfig) -> list[LevelProblem]:
    """Return why a server with these levels would not start on this machine."""
    memory_mib = total_memory_mib(Path("/proc/meminfo"), *own_cgroups())
    others = find_key_problem(levels, os.environ), find_remote_problem(levels)
    found = find_problems(replace(config, engine=replace(config.engine, levels=levels)), memory_mib)
    return [*found, *(one for one in others if one is not None)]


def check_levels(config: Config, each: Sequence[LevelsConfig]) -> None:
    """Raise ConfigError if this machine cannot have one of the levels."""
    for levels in each:
        for problem in find_all_problems(config, levels):
            raise ConfigError(str(problem))


def lock_disks(config: Config, each: Sequence[LevelsConfig], opened: ExitStack) -> None:
    """Lock the folder of each disk level until `opened` is closed. Raises ConfigError, OSError."""
    folders = [config.data / (one.dir or FOLDER) for one in each if one.disk_gib]
    for folder in dict.fromkeys(one.absolute() for one in folders):
        opened.callback(ServerLock(folder).close)


class ServerLock:
    """The lock of one server on the folder of its disk level, until it is closed.

    It is the server's own: the storage process has another, so that it can be replaced.
    """

    def __init__(self, folder: Path) -> None:
        """Make the folder with mode 0700 if it is missing, and lock it. Raises ConfigError if
        another server has it, and OSError."""
        if not folder.is_dir():
            folder.mkdir(mode=0o700, parents=True)
        self._descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise ConfigError(
                f"engine.levels.dir: {str(folder)!r} is used by another server; expected a folder"
                " of its own for each server"
            ) from None

    def close(self) -> None:
        """Let another server have the folder."""
        os.close(self._descriptor)
