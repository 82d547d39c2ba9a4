"""Runs clients as they come against a server, and prints a table of what passed: `make clients`.

Each client has an environment of its own, `.venv-clients-<family>`, installed from the package
indexes once, and a program in `programs/` that prints its cases. A server with the default model is
started on loopback, with keys of its own. With names of families, only those run.

The exit status is 1 if a case fails for a reason of Trunkline's, or a client cannot be installed.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Awaitable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from msgspec import Struct

from gateway.bench.server import bench_server
from tests.clients.environments import FAMILIES, Family, install, program_command

MODEL = "smollm2-135m-instruct"
PROGRAM_TIMEOUT_S = 300.0


class CaseResult(Struct, frozen=True):
    """A case as its program told it. `theirs`: why it may fail; empty, if it may not."""

    case: str
    passed: bool
    reason: str = ""
    theirs: str = ""


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
    """Return the table, and below it a line for each failed case."""
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
    return "\n".join(rows)


async def run_client(family: Family, url: str, key: str) -> ClientResult:
    """Run a family's program against the server and return its cases."""
    began_s = time.monotonic()
    command, folder = program_command(family)
    process = await asyncio.create_subprocess_exec(
        *(*command, url, key, MODEL),
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
    data = Path(os.environ.get("TRUNKLINE_DATA_DIR", "data"))
    with ThreadPoolExecutor(1) as pool:  # installs the next environments while programs run
        loop = asyncio.get_running_loop()
        installs = [loop.run_in_executor(pool, install, family) for family in wanted]
        async with bench_server(MODEL, data / "models", time.monotonic, tenants=1) as server:
            results = await run_all(
                wanted, installs, server.url.removesuffix("/v1"), server.keys[0]
            )
    sys.stdout.write(table(results) + "\n")
    return 1 if any(one.ours for one in results) else 0


async def run_all(
    families: Sequence[Family], installs: Sequence[Awaitable[str | None]], url: str, key: str
) -> list[ClientResult]:
    """Run each family's program once its environment is installed."""
    results: list[ClientResult] = []
    for family, installed in zip(families, installs, strict=True):
        if (reason := await installed) is not None:
            results.append(
                ClientResult(family.name, {}, (CaseResult("installation", False, reason),), 0.0)
            )
            continue
        one = await run_client(family, url, key)
        results.append(one)
        sys.stderr.write(f"{one.name}: {len(one.cases)} cases, {one.seconds:.0f} s\n")
    return results


if __name__ == "__main__":
    sys.exit(asyncio.run(run(sys.argv[1:])))
