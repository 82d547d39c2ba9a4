"""One environment for each family of clients, installed from the package indexes and kept.

A Python family's versions are in `programs/<name>.txt`, a Node family's in
`programs/<name>.json`, a package.json. An environment is installed completely or not at all, and
again after its list has changed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent / "programs"
ROOT = Path(os.environ.get("TRUNKLINE_CLIENTS_DIR", Path(__file__).parent.parent.parent))
INSTALL_TIMEOUT_S = 1_800.0
"""GuideLLM and aiperf bring some 150 packages each, and PyTorch with CUDA."""


@dataclass(frozen=True, slots=True)
class Family:
    """A family of clients: its name, its program, and the environment that it shares, if any.

    `is_scripted`: it is run against the scripted model, for clients whose loops need a model that
    calls tools as it is told.
    """

    name: str
    program: str
    shares: str = ""
    is_scripted: bool = False

    @property
    def packages(self) -> Path:
        """The list of the environment's packages."""
        kind = "json" if self.program.endswith(".mjs") else "txt"
        return HERE / f"{self.shares or self.name}.{kind}"

    @property
    def folder(self) -> Path:
        """The environment."""
        return ROOT / f".venv-clients-{self.shares or self.name}"


FAMILIES = (
    Family("litellm", "litellm_client.py"),
    Family("litellm-proxy", "litellm_proxy.py", "litellm"),
    Family("ai-sdk-6", "ai_sdk.mjs"),
    Family("ai-sdk-7", "ai_sdk.mjs"),
    Family("pydantic-ai", "pydantic_ai_models.py"),
    Family("langchain", "langchain_models.py"),
    Family("agents-sdk", "agents_sdk.py"),
    Family("guidellm", "guidellm_load.py"),
    Family("aiperf", "aiperf_load.py"),
    Family("agents-sdk-js", "agents_sdk.mjs", is_scripted=True),
    Family("coding-agents", "coding_agents.mjs", is_scripted=True),
)


def install(family: Family) -> str | None:
    """Install a family's environment unless its list is unchanged; return why it failed."""
    wanted, stamp = family.packages.read_text(), family.folder / "installed"
    if stamp.exists() and stamp.read_text() == wanted:
        return None
    shutil.rmtree(family.folder, ignore_errors=True)
    family.folder.mkdir(parents=True)
    commands: list[list[str]]
    if family.packages.suffix == ".json":
        if shutil.which("npm") is None:
            return "npm is not installed"
        shutil.copy(family.packages, family.folder / "package.json")
        commands = [["npm", "install", "--silent", "--no-audit", "--no-fund"]]
    else:
        pip = [str(family.folder / "bin/python"), "-m", "pip", "install", "--quiet"]
        commands = [
            [sys.executable, "-m", "venv", str(family.folder)],
            [*pip, "--disable-pip-version-check", "--requirement", str(family.packages)],
        ]
    for command in commands:
        try:
            subprocess.run(
                command,
                cwd=family.folder,
                capture_output=True,
                text=True,
                check=True,
                timeout=INSTALL_TIMEOUT_S,
            )
        except subprocess.CalledProcessError as error:
            return f"{command[0]} failed: {error.stderr.strip()[-400:]}"
        except subprocess.TimeoutExpired:
            return f"{command[0]} took longer than {INSTALL_TIMEOUT_S:.0f} s"
    stamp.write_text(wanted)
    return None


def program_command(family: Family) -> tuple[list[str], Path]:
    """Return the start of a program's command line, and the folder to run it in."""
    program = str(HERE / family.program)
    if family.program.endswith(".mjs"):
        return ["node", program], family.folder
    return [str(family.folder / "bin/python"), program], family.folder
