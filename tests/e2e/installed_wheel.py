"""Builds the wheel from the tracked files, and installs it into a new environment.

The environment finds the dependencies in the environment of the tests, through a path file, so that
an install takes a second. It does not see the checkout.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).parents[2]


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


def clean_environment(**more: str) -> dict[str, str]:
    """Return the environment of this process without the checkout and without our settings."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name != "PYTHONPATH" and not name.startswith("TRUNKLINE_")
    }
    return {**kept, "OMP_NUM_THREADS": "1", **more}
