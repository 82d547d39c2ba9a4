"""The wheel: its files, its metadata, and servers that run from it alone, as in a container too."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
import zipfile
from email.parser import Parser
from importlib import metadata
from pathlib import Path
from urllib.request import urlopen

import pytest

from tests.e2e.installed_wheel import (
    ROOT,
    build_wheel,
    clean_environment,
    install_wheel,
    tracked_files,
)
from tests.models import write_folder
from tests.server_process import SETTINGS, serve_command, serving

pytestmark = pytest.mark.slow

DATA_SUFFIXES = {".c", ".h", ".sql", ".html", ".css", ".js", ".svg", ".png", ".ico", ".woff2"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def commands(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install_wheel(wheel, tmp_path_factory.mktemp("installed") / "venv")


def test_the_wheel_has_every_file_that_the_product_reads(wheel: Path) -> None:
    """A file that setuptools leaves out is missed at run time only."""
    names = set(zipfile.ZipFile(wheel).namelist())
    wanted = {
        name
        for name in tracked_files("gateway", "engine", "kernels", "tenancy")
        if Path(name).suffix in DATA_SUFFIXES | {".py"} or "/vendor/" in name
    }

    assert wanted - names == set()
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {
        "engine",
        "gateway",
        "kernels",
        "tenancy",
    }


def test_the_metadata_says_what_the_package_is(wheel: Path) -> None:
    """A package index shows these fields, and pip resolves by them."""
    archive = zipfile.ZipFile(wheel)
    (name,) = [one for one in archive.namelist() if one.endswith(".dist-info/METADATA")]
    found = Parser().parsestr(archive.read(name).decode())

    assert found["Name"] == "trunkline"
    assert found["License-Expression"] == "Apache-2.0"
    assert found["Requires-Python"] == ">=3.11"
    assert found["Keywords"]
    assert len(found.get_all("Classifier", [])) > 5
    assert found.get_all("Provides-Extra") == [
        "gpu",
        "exports",
        "sealed",
        "remote",
        "fleet",
        "ray",
        "postgres",
        "shared",
        "otel",
    ]
    assert "# Trunkline" in str(found.get_payload())


def test_constraints_lock_every_package_of_a_server() -> None:
    """`pip install --constraint constraints.txt 'trunkline[…]'` leaves no version to chance."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    wanted = [*project["dependencies"], *(one for extra in extras for one in extra)]
    locked = {plain_name(line) for line in (ROOT / "constraints.txt").read_text().splitlines()[1:]}
    found = set[str]()
    for requirement in wanted:
        collect(plain_name(requirement), found)

    assert {"torch", "aiohttp", "asyncpg", "pyarrow"} <= found
    assert found - locked == set()


def plain_name(requirement: str) -> str:
    """Return the normalised name of a requirement's package."""
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert match is not None, requirement
    return re.sub(r"[-_.]+", "-", match[0]).lower()


def collect(name: str, found: set[str]) -> None:
    """Add a package and all that it requires, as far as it is installed."""
    if name in found:
        return
    try:
        requires = metadata.distribution(name).requires or []
    except metadata.PackageNotFoundError:
        return
    found.add(name)
    for requirement in requires:
        if "extra ==" not in requirement:
            collect(plain_name(requirement), found)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_folder(tmp_path_factory.mktemp("models") / "tiny")
    (folder.parent / "settings.toml").write_text(SETTINGS)
    return folder


def test_the_installed_command_runs_outside_the_checkout(commands: Path, tmp_path: Path) -> None:
    """Nothing of the checkout is needed: the product is where the wheel put it."""
    run = [str(commands / "python"), "-c", "import gateway; print(gateway.__file__)"]
    where = subprocess.run(
        run, capture_output=True, text=True, check=True, cwd=tmp_path, env=clean_environment()
    )
    version = subprocess.run(
        [str(commands / "trunkline"), "version"],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
        env=clean_environment(),
    )
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

    assert Path(where.stdout.strip()).is_relative_to(commands.parent)
    assert version.stdout.strip() == f"trunkline {project['version']}"


def test_doctor_finds_all_that_a_server_needs(commands: Path, model: Path, tmp_path: Path) -> None:
    """The packages, the data folder and the model; its addresses are chosen freely here."""
    settings = tmp_path / "settings.toml"
    settings.write_text(
        f'[model]\nname = "{model}"\n[server]\nlisten = "127.0.0.1:0"\n'
        '[admin]\nlisten = "127.0.0.1:0"\n'
    )
    command = [str(commands / "trunkline"), "doctor", "--config", str(settings)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=tmp_path, env=clean_environment()
    )

    assert done.returncode == 0, done.stdout + done.stderr


def test_the_installed_server_serves_and_drains(
    commands: Path, model: Path, tmp_path: Path
) -> None:
    """The command of the systemd unit and of the container: engine, kernels, migrations and
    dashboard come from the wheel; SIGTERM ends it with status 0."""
    settings, data = model.parent / "settings.toml", tmp_path / "data"
    command = serve_command(model, data, settings, [str(commands / "trunkline")])
    log = tmp_path / "server.log"
    with serving(command, log, clean_environment(), tmp_path) as server:
        with urlopen(f"{server.url}/readyz", timeout=60) as ready:
            ready_status = ready.status
        with urlopen(f"{server.admin_url}/dashboard", timeout=60) as page:
            html = page.read().decode()
        status = server.stop()

    assert (ready_status, status) == (200, 0)
    assert "<html" in html
    assert sys.prefix not in log.read_text()


def test_what_the_container_runs_serves_is_healthy_and_drains(
    commands: Path, model: Path, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    """The image's environment, command and health check, with the wheel in a new environment; only
    the volume is written."""
    text = (ROOT / "Dockerfile").read_text()
    volume = tmp_path_factory.mktemp("volume")
    settings = tmp_path_factory.mktemp("etc") / "trunkline.toml"
    shipped = (ROOT / "deploy" / "docker" / "trunkline.toml").read_text()
    settings.write_text(re.sub(r"0\.0\.0\.0:\d+", "127.0.0.1:0", shipped))
    places = {"/var/lib/trunkline": str(volume), "/etc/trunkline/trunkline.toml": str(settings)}
    environment = {
        name: places.get(value, value)
        for name, value in re.findall(r"^(?:ENV|   ) ([A-Z_]+)=(\S+)(?: \\)?$", text, re.MULTILINE)
        if name != "PATH"
    }
    (entry,), (argument,) = (
        re.findall(rf'^{word} \["(\w+)"\]$', text, re.MULTILINE) for word in ("ENTRYPOINT", "CMD")
    )
    environment["TRUNKLINE_MODEL"] = str(model)
    command, given = [str(commands / entry), argument], clean_environment(**environment)
    with serving(command, tmp_path / "server.log", given, tmp_path) as server:
        probe = json.loads("[" + re.findall(r"^    CMD \[(.+)\]$", text, re.MULTILINE)[0] + "]")
        probe[0] = sys.executable
        probe[-1] = probe[-1].replace("http://127.0.0.1:8080", server.url)
        healthy = subprocess.run(probe, capture_output=True, text=True, check=False)
        status = server.stop()
        unhealthy = subprocess.run(probe, capture_output=True, text=True, check=False)

    assert environment.keys() >= {"HOME", "TRUNKLINE_DATA_DIR", "TRUNKLINE_CONFIG"}
    assert healthy.returncode == 0, healthy.stderr
    assert unhealthy.returncode == 1
    assert status == 0
    assert (volume / "trunkline.db").exists()
    assert [file.name for file in tmp_path.iterdir()] == ["server.log"]
