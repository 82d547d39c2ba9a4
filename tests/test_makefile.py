"""The environment that `make` makes: by a Python that is new enough, and again where it is not."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
STAMP = ".venv/.server-stamp"

OLD = """
case "$1" in
--version) echo Python 3.9.18 ;;
-c) case "$2" in *print*) echo 3.9 ;; *) exit 1 ;; esac ;;
*) echo "$*" >> "$CALLS"; exit 1 ;;
esac
"""
"""A Python that is too old."""
NEW = f"""
if [ "$1" = -c ]; then exec {sys.executable} "$@"; fi
echo "$*" >> "$CALLS"
if [ "$2" = venv ]; then rm -rf "$4"; mkdir -p "$4/bin" && cp "$0" "$4/bin/python"; fi
"""
"""A Python that makes environments of itself, in which everything can be installed."""


class Checkout:
    """A copy of the Makefile, and Pythons that write down what they are asked."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("Makefile", "pyproject.toml", "constraints.txt"):
            shutil.copy(ROOT / name, folder)
        self.old, self.new = self.write("old", OLD), self.write("new", NEW)

    def write(self, name: str, body: str) -> Path:
        """Write a program."""
        file = self.folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"#!/bin/sh{body}")
        file.chmod(0o755)
        return file

    def make(self, python: Path | str) -> subprocess.CompletedProcess[str]:
        """Make the environment by a Python."""
        return subprocess.run(
            ["make", STAMP, f"PYTHON={python}", "TORCH=cuda"],
            cwd=self.folder,
            env={**os.environ, "CALLS": str(self.folder / "calls"), "MAKEFLAGS": ""},
            capture_output=True,
            text=True,
            check=False,
        )

    def calls(self, word: str) -> int:
        """Return how many calls with a word the Pythons were asked for."""
        file = self.folder / "calls"
        return sum(word in line for line in file.read_text().splitlines()) if file.exists() else 0


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_an_old_python_is_refused_before_anything_is_installed(checkout: Checkout) -> None:
    """With the version that was found and the remedy, in one line beside make's own."""
    done = checkout.make(checkout.old)
    told = [line for line in done.stderr.splitlines() if not line.startswith("make")]

    assert done.returncode == 2
    assert len(told) == 1
    assert "Python 3.11 or newer is needed" in told[0]
    assert "is: Python 3.9.18." in told[0]
    assert told[0].endswith("PYTHON=python3.12")
    assert checkout.calls("") == 0
    assert not (checkout.folder / ".venv").exists()


def test_a_python_that_is_not_there_is_named(checkout: Checkout) -> None:
    """In the same words."""
    done = checkout.make("python3.99")

    assert (done.returncode, "python3.99 is:" in done.stderr) == (2, True)


@pytest.mark.parametrize("has_stamp", [False, True])
@pytest.mark.parametrize("kind", ["old", "broken", "empty"])
def test_an_environment_that_cannot_be_used_is_made_again(
    checkout: Checkout, kind: str, has_stamp: bool
) -> None:
    """Of an old Python, of one that is gone since, and one that was interrupted."""
    if kind == "old":
        checkout.write(".venv/bin/python", OLD)
    elif kind == "broken":
        (checkout.folder / ".venv/bin").mkdir(parents=True)
        (checkout.folder / ".venv/bin/python").symlink_to("/nowhere/python3")
    if has_stamp:
        (checkout.folder / ".venv").mkdir(exist_ok=True)
        (checkout.folder / STAMP).touch()
    done = checkout.make(checkout.new)

    assert done.returncode == 0, done.stderr
    assert checkout.calls("venv") == 1
    assert checkout.calls("pip install") > 0


def test_an_environment_that_can_be_used_is_kept(checkout: Checkout) -> None:
    """The second start makes and installs nothing."""
    checkout.make(checkout.new)
    before = checkout.calls("")
    done = checkout.make(checkout.new)

    assert done.returncode == 0, done.stderr
    assert checkout.calls("") == before


def test_a_named_python_of_another_version_makes_the_environment_again(checkout: Checkout) -> None:
    """`make serve PYTHON=python3.12` beside an environment of 3.11 means 3.12."""
    checkout.make(checkout.new)
    other = checkout.write(
        "other", NEW.replace("if [", 'case "$2" in *print*) echo 3.99; exit ;; esac\nif [', 1)
    )
    done = checkout.make(other)

    assert done.returncode == 0, done.stderr
    assert checkout.calls("venv") == 2
