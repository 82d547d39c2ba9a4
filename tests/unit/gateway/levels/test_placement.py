"""The configured levels against what the machine has."""

from __future__ import annotations

import shutil
from contextlib import ExitStack
from pathlib import Path

import pytest
from msgspec.structs import replace

from engine.config import EngineConfig, LevelsConfig
from gateway.config import Config, ConfigError, ServedModelSettings, load_config
from gateway.levels.placement import (
    ServerLock,
    check_levels,
    engine_config,
    find_problems,
    levels_dir,
    levels_here,
    lock_disks,
    own_cgroups,
    total_memory_mib,
)


def config(folder: Path, **levels: object) -> Config:
    made = replace(LevelsConfig(), **levels)
    return Config(data_dir=str(folder), engine=EngineConfig(levels=made))


def test_two_lines_switch_a_disk_on(tmp_path: Path) -> None:
    """The section, and its size; the folder is in the data directory."""
    file = tmp_path / "trunkline.toml"
    file.write_text(f'data_dir = "{tmp_path}"\n[engine.levels]\ndisk_gib = 1\n')
    found, _ = load_config(file, {}, {})

    assert find_problems(found, 1_000_000) == []
    assert engine_config(found, found.engine).levels.dir == str(tmp_path / "levels")


def test_folder_is_absolute_and_by_default_in_the_data_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine runs in another working directory some day; without a disk it gets none."""
    monkeypatch.chdir(tmp_path)

    assert levels_dir(config(Path("data"))) == tmp_path / "data" / "levels"
    assert levels_dir(config(Path("data"), dir="kv")) == tmp_path / "data" / "kv"
    assert levels_dir(config(Path("data"), dir="/kv")) == Path("/kv")
    without_disk = config(Path("data"), host_mib=4)
    assert engine_config(without_disk, without_disk.engine).levels.dir == ""


def test_several_models_have_a_folder_each() -> None:
    """Two engines never share one."""
    found = config(Path("/data"), disk_gib=1)

    assert engine_config(found, found.engine, "small").levels.dir == "/data/levels/small"


@pytest.mark.parametrize(
    ("levels", "told"),
    [
        (
            {"host_mib": 4_096},
            "engine.levels.host_mib: 4096 MiB, and this machine has 2000 MiB of memory; expected"
            " less than 2000",
        ),
        ({"disk_gib": 1.0, "stage_mib": 3_000}, "engine.levels.stage_mib: 3000 MiB, and this"),
        ({"disk_gib": 1e9}, "engine.levels.disk_gib: 1e+09 GiB, and the file system of "),
        ({"disk_gib": 0.5}, "0.5 GiB is less than one slab of 1024 MiB; expected at least 1"),
        ({"disk_gib": 1.0, "dir": "file"}, "is a file; expected a folder"),
    ],
)
def test_problem_names_key_value_and_what_would_be_right(
    tmp_path: Path, levels: dict[str, object], told: str
) -> None:
    (tmp_path / "file").touch()
    (problem,) = find_problems(config(tmp_path, **levels), 2_000)

    assert told in str(problem)


def test_nothing_is_asked_of_a_machine_without_levels(tmp_path: Path) -> None:
    """Neither is there a problem where the system does not tell its memory."""
    assert find_problems(config(tmp_path / "none", dir="\\"), 1) == []
    assert find_problems(config(tmp_path, host_mib=10**9), None) == []


def test_size_is_that_of_the_file_system(tmp_path: Path) -> None:
    """All of it is allowed: the level keeps its own distance from a full disk."""
    size_gib = shutil.disk_usage(tmp_path).total / 2**30

    assert find_problems(config(tmp_path, disk_gib=size_gib), None) == []
    assert find_problems(config(tmp_path, disk_gib=size_gib * 1.01), None) != []


@pytest.mark.parametrize(("limit", "total"), [(None, 4_000), ("max", 4_000), (str(2**30), 1_024)])
def test_memory_is_the_containers_if_that_is_less(
    tmp_path: Path, limit: str | None, total: int
) -> None:
    (tmp_path / "meminfo").write_text("MemFree: 9 kB\nMemTotal:    4096000 kB\n")
    if limit is not None:
        (tmp_path / "memory.max").write_text(limit)

    assert total_memory_mib(tmp_path / "meminfo", tmp_path) == total
    assert total_memory_mib(tmp_path / "none", tmp_path) is None


def test_limits_of_all_groups_above_a_process_count(tmp_path: Path) -> None:
    """A service's own group, its slice, and the container's root: the least of them."""
    own = tmp_path / "system.slice" / "trunkline.service"
    own.mkdir(parents=True)
    (tmp_path / "meminfo").write_text("MemTotal:    4096000 kB\n")
    (own / "memory.max").write_text("max\n")
    (own.parent / "memory.max").write_text(f"{2**30}\n")
    listing = tmp_path / "cgroup"
    listing.write_text("1:name=systemd:/elsewhere\n0::/system.slice/trunkline.service\n")
    groups = own_cgroups(listing, tmp_path)

    assert groups == (own, own.parent, tmp_path)
    assert total_memory_mib(tmp_path / "meminfo", *groups) == 1_024
    assert own_cgroups(tmp_path / "none", tmp_path) == (tmp_path,)
    listing.write_text("0::/\n")
    assert own_cgroups(listing, tmp_path) == (tmp_path,)


def test_auto_is_a_level_that_any_machine_can_have(tmp_path: Path) -> None:
    """Its number is what is left; the disk's stage is checked as before."""
    assert LevelsConfig(host_mib="auto").is_on
    assert find_problems(config(tmp_path, host_mib="auto"), 1) == []
    (problem,) = find_problems(config(tmp_path, host_mib="auto", disk_gib=1.0, stage_mib=9), 9)
    assert problem.key == "engine.levels.stage_mib"


def test_levels_of_engines_elsewhere_are_not_this_machines(tmp_path: Path) -> None:
    """Their keepers check and lock them, on machines with other disks and other memory."""
    impossible = {"disk_gib": 1e9, "host_mib": 10**9}
    asked = config(tmp_path, **impossible)
    away = ServedModelSettings("away", "/away", replicas=("e0=10.0.0.1:7443",))
    small = {"levels": {"disk_gib": 1.0, "host_mib": 0, "dir": "kv"}}
    near = ServedModelSettings("near", "/near", engine=small)
    elsewhere, mixed = replace(asked, models=(away,)), replace(asked, models=(away, near))

    assert levels_here(elsewhere) == []
    check_levels(mixed, levels_here(mixed))
    with pytest.raises(ConfigError, match=r"engine\.levels"):
        check_levels(asked, levels_here(asked))
    with ExitStack() as opened:
        lock_disks(mixed, levels_here(mixed), opened)
        with pytest.raises(ConfigError, match="another server"):
            ServerLock(tmp_path / "kv")
    assert not (tmp_path / "levels").exists()


def test_a_folder_is_one_servers(tmp_path: Path) -> None:
    """The second server is told at its start; the folder is free once the first has ended."""
    folder = tmp_path / "a" / "levels"
    first = ServerLock(folder)
    with pytest.raises(ConfigError, match=r"engine\.levels\.dir: .* is used by another server"):
        ServerLock(folder)
    first.close()

    ServerLock(folder).close()
    assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("disk_gib = inf", "engine.levels.disk_gib: inf; expected a finite number"),
        ("disk_gib = -1", "engine.levels.disk_gib: Expected `float` >= 0"),
        ("look_ms = inf", "engine.levels.look_ms: inf"),
        ("dir = 'a\\u0000b'", "expected a path without NUL"),
        ("disk = 1", "unknown setting engine.levels.disk; did you mean engine.levels.disk_gib?"),
        ("host_mib = 'half'", "engine.levels.host_mib: Expected a whole number, or 'auto' (it is"),
        (
            "host_mib = 1.5",
            "engine.levels.host_mib: Expected a whole number, or 'auto' (it is 1.5)",
        ),
        ("host_mib = -1", "engine.levels.host_mib: Expected `int` >= 0"),
    ],
)
def test_file_with_impossible_values_is_refused(tmp_path: Path, line: str, told: str) -> None:
    file = tmp_path / "trunkline.toml"
    file.write_text("[engine.levels]\n" + line.replace("'", '"'))
    with pytest.raises(ConfigError) as caught:
        load_config(file, {}, {})

    assert told in str(caught.value)
