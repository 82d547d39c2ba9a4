"""Builds the wheel from the tracked files, installs it into a new environment, and starts servers.

The environment finds the dependencies in the environment of the tests, through a path file, so that
an install takes a second. It does not see the checkout.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Timer

ROOT = Path(__file__).parents[2]
START_S = 60.0


def tracked_files(*folders: str) -> list[str]:
    """Return the paths of the checkout's files that git tracks or would add, without the ignored
    ones."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *folders]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [name for name in done.stdout.splitlines() if (ROOT / name).is_file()]


def copy_sources(folder: Path) -> Path:
    """Copy what the wheel is built from into a folder, and return it."""
    wanted = ("pyproject.toml", "README.md", "LICENSE", "gateway", "engine", "kernels", "tenancy")
    for name in tracked_files(*wanted):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name)
    return folder


def build_wheel(folder: Path) -> Path:
    """Build the wheel in a folder, with the setuptools of this environment. Takes 3 s."""
    sources = copy_sources(folder / "sources")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index"]
    command += ["--no-build-isolation", "--wheel-dir", str(folder), str(sources)]
    subprocess.run(command, capture_output=True, check=True)
    (wheel,) = folder.glob("trunkline-*.whl")
    return wheel


def install_wheel(wheel: Path, folder: Path) -> Path:
    """Make an environment in a folder, install the wheel, and return the folder of its commands."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    site = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder)}))
    ours = [place for place in sys.path if Path(place).name == "site-packages"]
    (site / "dependencies.pth").write_text("\n".join(ours) + "\n")
    command = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "install"]
    command += ["--quiet", "--no-deps", "--no-index", "--ignore-installed", str(wheel)]
    subprocess.run(command, capture_output=True, check=True, env=clean_environment())
    return folder / "bin"


def clean_environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of this process without the checkout and without our settings."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name != "PYTHONPATH" and not name.startswith("TRUNKLINE_")
    }
    return {**kept, "OMP_NUM_THREADS": "1", **(more or {})}


@dataclass(frozen=True, slots=True)
class ServerCommand:
    """A server that a command started: its process and the addresses that it printed."""

    process: subprocess.Popen[str]
    url: str
    admin_url: str

    def stop(self) -> int:
        """Send SIGTERM and return the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(START_S)


@contextmanager
def serving(
    command: list[str], environment: Mapping[str, str], folder: Path
) -> Iterator[ServerCommand]:
    """Run a command that serves, and yield it when it has printed its addresses.

    Kills its process afterwards, if it still runs. The log is in `folder`.
    """
    log = folder / "server.log"
    with log.open("w") as errors:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=clean_environment(environment),
            cwd=folder,
        )
    deadline = Timer(START_S, process.kill)
    deadline.start()
    try:
        assert process.stdout is not None
        text = ""
        addresses = re.compile(r"(http://\S+)/v1\n.*(http://\S+)/metrics", re.DOTALL)
        while (found := addresses.search(text)) is None:
            line = process.stdout.readline()
            assert line, f"the server ended: {text}{log.read_text()}"
            text += line
        deadline.cancel()
        yield ServerCommand(process, found[1], found[2])
    finally:
        deadline.cancel()
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
