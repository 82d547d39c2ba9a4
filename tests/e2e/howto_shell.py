"""A shell for the commands of docs/howto: a folder with a server, and commands that need no rights.

`trunkline`, `python`, `curl` and everything else of the pages is real. `sudo` runs what follows,
with the machine's folders under this one; `systemctl` starts and stops the server; `docker` and
`kubectl` run what they would run inside; `helm` renders. What remains (a build, a push, a user to
create) succeeds. Every stand-in writes its arguments down.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.e2e.installed_wheel import ROOT, clean_environment
from tests.models import tiny_config, write_folder
from tests.tools.binaries import find

MODEL = "smollm2-135m-instruct"
SHELL_S = 120.0

SETTINGS = """
[admin]
listen = "127.0.0.1:{admin}"
[server]
listen = "127.0.0.1:{public}"
"""
"""Of the folder's `trunkline.toml`, which every command finds by itself. It ends with the table
that a page adds lines to."""

STAND_INS = {
    "trunkline": 'exec "$PYTHON" -m gateway "$@"',
    "python": 'exec "$PYTHON" "$@"',
    # The rest of a command under sudo; `-u NAME` names a user.
    "sudo": 'if [ "$1" = -u ]; then shift 2; fi\nexec "$@"',
    # A server of this folder, started and drained as the unit does it.
    "systemctl": """
case "$1 $2" in
"start trunkline" | "enable --now")
    "$PYTHON" -m gateway serve "$HOWTO/$MODEL" >> "$HOWTO/server.out" 2>> "$HOWTO/server.log" &
    echo $! > "$HOWTO/server.pid"
    curl --silent --fail --output /dev/null --retry 60 --retry-connrefused --retry-delay 1 \
        --retry-all-errors "http://127.0.0.1:$PUBLIC_PORT/readyz"
    # A reader waits a second for the levels.
    for _ in $(seq 60); do
        trunkline levels show 2>&1 | grep --quiet "not .* yet$" || break
    done ;;
"stop trunkline")
    pid=$(cat "$HOWTO/server.pid")
    kill "$pid" || true
    while grep -qs 'State:.[^Z]' "/proc/$pid/status"; do :; done ;;
esac
""",
    "docker": """
case "$*" in
*"exec gateway cat /var/lib/trunkline/"*) cat "data/${*##*/}" ;;
*"exec gateway trunkline "*) eval "exec trunkline ${*#*gateway trunkline }" ;;
esac
""",
    "kubectl": """
case "$*" in
*"cat /var/lib/trunkline/"*) cat "data/${*##*/}" ;;
*"-- trunkline "*) eval "exec trunkline ${*#*-- trunkline }" ;;
esac
""",
    **dict.fromkeys(("useradd", "journalctl", "nvidia-smi", "chown", "make", "scp", "ssh"), "true"),
}
OPTIONAL = ("nginx", "caddy", "promtool", "helm")
"""Commands that stand in for themselves with true, where they are not installed."""


class HowToShell:
    """A folder in which the commands of a page run."""

    def __init__(self, folder: Path, public: int, admin: int, *engines: int) -> None:
        """`engines`: ports for those that a page starts."""
        self.folder, self.root = folder / "checkout", folder / "root"
        folder = self.folder
        folder.mkdir()
        self.ports = {"8080": public, "8081": admin}
        self.ports |= dict(zip(("7443", "7444"), engines, strict=False))
        for name in ("deploy", "examples", "compose.yaml", "Dockerfile", "constraints.txt"):
            (folder / name).symlink_to(ROOT / name)
        write_folder(folder / MODEL, tiny_config(context=2048))
        (folder / "trunkline.toml").write_text(SETTINGS.format(public=public, admin=admin))
        for name in ("data", "bin"):
            (folder / name).mkdir(mode=0o700)
        for name in ("nginx/conf.d", "systemd/system", "grafana/provisioning/dashboards"):
            (self.root / "etc" / name).mkdir(parents=True)
        for name in ("opt", "usr/local/bin", "var/lib"):
            (self.root / name).mkdir(parents=True)
        (self.root / "var/lib/trunkline").symlink_to(folder / "data")
        self._write_commands()

    def _write_commands(self) -> None:
        named = dict(STAND_INS)
        for name in OPTIONAL:
            named[name] = self._optional(name)
        for name, body in named.items():
            file = self.folder / "bin" / name
            said = f'echo "{name} $*" >> "$HOWTO/commands.log"'
            file.write_text(f"#!/bin/sh\n{said}\n{body}\n")
            file.chmod(0o755)

    def _optional(self, name: str) -> str:
        found = find(name)
        if found is None or name == "nginx":  # nginx would read the machine's own files
            return "true"
        if name == "helm":
            render = '-e "s/^upgrade --install/template/" -e "s/^upgrade/template/"'
            drop = '-e "s/--create-namespace//" -e "s/--reuse-values//"'
            return (
                f'eval "exec {found} $(echo "$*" | sed {render} {drop})" > "$HOWTO/rendered.yaml"'
            )
        return f'exec {found} "$@"'

    @property
    def environment(self) -> dict[str, str]:
        """The environment of the commands: no variable of ours, as in a reader's shell."""
        return clean_environment(
            PATH=f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
            PYTHON=sys.executable,
            PYTHONPATH=str(ROOT),
            HOWTO=str(self.folder),
            HOME=str(self.folder),
            PUBLIC_PORT=str(self.ports["8080"]),
            MODEL=MODEL,
        )

    def run(self, commands: str) -> subprocess.CompletedProcess[str]:
        """Run commands as a page has them, with this folder's addresses and root."""
        for port, ours in self.ports.items():
            commands = commands.replace(f"127.0.0.1:{port}", f"127.0.0.1:{ours}")
        ours = self.ports["8080"]
        for name in ("https://localhost", "https://llm.example.org"):
            commands = commands.replace(name, f"http://127.0.0.1:{ours}")
        root = re.compile(r"(?<= )(?=/(?:etc|opt|usr/local|var/lib)\b)")
        commands = "\n".join(
            root.sub(str(self.root), line) if line.startswith("sudo ") else line
            for line in commands.splitlines()
        )
        commands = commands.replace("\n[server]\nhosts", "\nhosts")  # the file has the table
        for model in ("/models/some-folder", "/models/llama-3.1-8b"):
            commands = commands.replace(model, str(self.folder / MODEL))
        return subprocess.run(
            ["sh", "-eu", "-c", commands],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=SHELL_S,
        )

    @property
    def commands(self) -> list[str]:
        """What the stand-ins were asked, in order."""
        file = self.folder / "commands.log"
        return file.read_text().splitlines() if file.exists() else []
