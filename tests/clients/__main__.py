"""Runs clients as they come against a server, and prints a table of what passed: `make clients`.

Each client has an environment of its own, `.venv-clients-<family>`, installed from the package
indexes once, and a program in `programs/` that prints its cases. A server with the default model is
started on loopback, with keys of its own, and after it one with the scripted model. With names of
families, only those run.

The exit status is 1 if a case fails for a reason of Trunkline's, or a client cannot be installed.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path

from msgspec import Struct

from engine.model_store import prepare, resolve
from gateway.bench.server import bench_server
from tenancy.accounts.keys import PREFIX
from tests.clients.environments import FAMILIES, Family, install, program_command
from tests.clients.scripted_model import write_scripted_model

MODEL = "smollm2-135m-instruct"
SCRIPTED = "scripted"
PROGRAM_TIMEOUT_S = 600.0
SCRIPTED_CONFIG = """
[[models]]
name = "scripted"
path = "{folder}"
aliases = ["*"]
[[tenants]]
name = "lenient"
[[tenants.keys]]
label = "agents"
file = "{key_file}"
tolerance = "lenient"
"""


class CaseResult(Struct, frozen=True):
    """A case as its program told it. `theirs`: why it may fail; empty, if it may not. `told`: what
    it measured."""

    case: str
    passed: bool
    reason: str = ""
    theirs: str = ""
    told: str = ""


class ClientResult(Struct, frozen=True):
    """A family's cases, the versions of its packages and the seconds that it took."""

    name: str
    versions: dict[str, str]
    cases: tuple[CaseResult, ...]
    seconds: float

    @property
    def ours(self) -> list[CaseResult]:
        """Cases that fail for a reason of Trunkline's."""
        return [case for case in self.cases if not case.passed and not case.theirs]

    @property
    def theirs(self) -> list[CaseResult]:
        """Cases that fail for a reason that is known and told in docs/clients.md."""
        return [case for case in self.cases if not case.passed and case.theirs]


def read_output(name: str, output: str, status: int, errors: str, seconds: float) -> ClientResult:
    """Return the result that a program printed; a program that broke off is a failed case."""
    versions: dict[str, str] = {}
    cases: list[CaseResult] = []
    for line in output.splitlines():
        if line.startswith('{"versions":'):
            versions = json.loads(line)["versions"]
        elif line.startswith('{"case":'):
            cases.append(CaseResult(**json.loads(line)))
    if status != 0 or not cases:
        end = errors.strip()[-400:] or "no errors were printed"
        cases.append(CaseResult("program", False, f"exit status {status}: {end}"))
    return ClientResult(name, versions, tuple(cases), seconds)


def table(results: Sequence[ClientResult]) -> str:
    """Return the table, and below it a line for each failed case and for each measurement."""
    rows = ["| client | versions | cases | passed | failed | known | s |", "|" + " --- |" * 7]
    for one in results:
        passed = sum(case.passed for case in one.cases)
        versions = ", ".join(f"{name} {version}" for name, version in one.versions.items())
        counts = f"{len(one.cases)} | {passed} | {len(one.ours)} | {len(one.theirs)}"
        rows.append(f"| {one.name} | {versions} | {counts} | {one.seconds:.0f} |")
    rows.append("")
    for one in results:
        rows += [f"FAILED {one.name}, {case.case}: {case.reason}" for case in one.ours]
        rows += [f"known {one.name}, {case.case}: {case.theirs}" for case in one.theirs]
        rows += [
            f"measured {one.name}, {case.case}: {case.told}" for case in one.cases if case.told
        ]
    return "\n".join(rows)


async def run_client(family: Family, *parameters: str) -> ClientResult:
    """Run a family's program with a server's URL, a key and a model's name; return its cases."""
    began_s = time.monotonic()
    command, folder = program_command(family)
    process = await asyncio.create_subprocess_exec(
        *(*command, *parameters),
        cwd=folder,
        env={**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "PYTHONPATH": ""},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    reading = asyncio.ensure_future(process.communicate())
    done, _ = await asyncio.wait((reading,), timeout=PROGRAM_TIMEOUT_S)
    if not done:
        process.kill()
    out, errors = await reading
    status = -1 if process.returncode is None else process.returncode
    seconds = time.monotonic() - began_s
    return read_output(
        family.name, out.decode(errors="replace"), status, errors.decode(errors="replace"), seconds
    )


async def run(names: Sequence[str]) -> int:
    """Install, run and print; return the exit status."""
    wanted = [family for family in FAMILIES if not names or family.name in names]
    models = Path(os.environ.get("TRUNKLINE_DATA_DIR", "data")) / "models"
    results: list[ClientResult] = []
    with ThreadPoolExecutor(1) as pool:  # installs the next environments while programs run
        loop = asyncio.get_running_loop()
        installs = {one: loop.run_in_executor(pool, install, one) for one in wanted}
        for is_scripted, serve in ((False, serve_default), (True, serve_scripted)):
            families = [family for family in wanted if family.is_scripted is is_scripted]
            if families:
                async with serve(models) as parameters:
                    results += await run_all(families, installs, parameters)
    sys.stdout.write(table(results) + "\n")
    return 1 if any(one.ours for one in results) else 0


@asynccontextmanager
async def serve_default(models: Path) -> AsyncIterator[tuple[str, ...]]:
    """Start a server with the default model; yield its URL, a key and the model's name."""
    async with bench_server(MODEL, models, time.monotonic, tenants=1) as server:
        yield server.url.removesuffix("/v1"), server.keys[0], MODEL


@asynccontextmanager
async def serve_scripted(models: Path) -> AsyncIterator[tuple[str, ...]]:
    """Start a server with the scripted model under every name; yield its URL, a key, the model's
    name, and a key whose tolerance is lenient."""
    with tempfile.TemporaryDirectory(prefix="trunkline-scripted-") as temporary:
        folder = Path(temporary)
        card = prepare(MODEL, resolve(MODEL, models), models)
        write_scripted_model(card, folder / SCRIPTED)
        key_file, config = folder / "lenient.key", folder / "trunkline.toml"
        lenient = PREFIX + secrets.token_hex(22)[:43]
        key_file.touch(mode=0o600)
        key_file.write_text(lenient)
        config.write_text(SCRIPTED_CONFIG.format(folder=folder / SCRIPTED, key_file=key_file))
        clock = time.monotonic
        async with bench_server(
            SCRIPTED, folder / "models", clock, tenants=1, config=config
        ) as server:
            yield server.url.removesuffix("/v1"), server.keys[0], SCRIPTED, lenient


async def run_all(
    families: Sequence[Family],
    installs: Mapping[Family, Awaitable[str | None]],
    parameters: Sequence[str],
) -> list[ClientResult]:
    """Run each family's program once its environment is installed."""
    results: list[ClientResult] = []
    for family in families:
        if (reason := await installs[family]) is not None:
            results.append(
                ClientResult(family.name, {}, (CaseResult("installation", False, reason),), 0.0)
            )
            continue
        one = await run_client(family, *parameters)
        results.append(one)
        sys.stderr.write(f"{one.name}: {len(one.cases)} cases, {one.seconds:.0f} s\n")
    return results


if __name__ == "__main__":
    sys.exit(asyncio.run(run(sys.argv[1:])))
