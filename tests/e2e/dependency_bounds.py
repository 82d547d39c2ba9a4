"""Smoke tests with the oldest and the newest dependencies that pyproject.toml allows.

Run as a program (`make bounds`), it installs each set into a separate folder beside the packages of
this environment, and runs the tests in a process that finds that folder first. A version that the
package index does not have is left out, and the last lines say so; any other failure is an error.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from itertools import chain
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
FOLDER = Path(sys.prefix) / "bounds"
UNTRIED = ("torch",)
"""Dependencies that are too large to install twice."""
EXTRAS = ("exports", "otel", "postgres", "sealed")
"""Extras that are tried too. `gpu` belongs to a build of torch; `remote` and `shared` need a server
to test."""
BULKY = ("tokenizers",)
"""Installed without what they depend on, none of which is used here."""
TESTS = (
    "tests/e2e/test_smoke.py",
    "tests/unit/engine/attention/test_cpu_backend.py",
    "tests/unit/engine/model_store/test_gguf_header.py",
    "tests/unit/engine/model_store/test_gguf_tokenizer.py",
    "tests/unit/engine/sampling/test_token_masks.py",
    "tests/unit/engine/storage/test_sealing.py",
    "tests/unit/engine/weights/test_weights.py",
    "tests/unit/gateway/cli/test_backups.py",
    "tests/unit/gateway/cli/test_program.py",
    "tests/unit/gateway/http",
    "tests/unit/gateway/observability/test_otel_exporter.py",
    "tests/unit/gateway/observability/test_otel_metrics.py",
    "tests/unit/gateway/prompt/test_template.py",
    "tests/unit/gateway/prompt/test_tokenizer.py",
    "tests/unit/tenancy/accounting/test_exports.py",
    "tests/unit/tenancy/storage/test_conformance.py",
    "tests/unit/tenancy/storage/test_sqlite.py",
)


def allowed() -> dict[str, str]:
    """Return the specifier of each package that is tried; all have a lower bound."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lists = [project["dependencies"], *(project["optional-dependencies"][one] for one in EXTRAS)]
    given = dict(re.split("(?=[<>=!~])", one, maxsplit=1) for one in chain(*lists))
    return {name: one for name, one in given.items() if name not in UNTRIED}


def install(folder: Path, wanted: dict[str, str]) -> dict[str, str]:
    """Install `wanted` (package: specifier) into a folder; return versions missing from the index.

    Raises CalledProcessError if it fails for another reason.
    """
    shutil.rmtree(folder, ignore_errors=True)
    missing: dict[str, str] = {}
    for names in ([n for n in wanted if n not in BULKY], list(BULKY)):
        more = ["--no-deps"] if names == list(BULKY) else []
        while left := [name + wanted[name] for name in names if name not in missing]:
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--only-binary", ":all:"]
            command = [*pip, "--upgrade", "--target", str(folder), *more, *left]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode == 0:
                break
            unknown = re.search(r"No matching distribution found for ([\w-]+)", done.stderr)
            if unknown is None or unknown[1] not in wanted:
                sys.stderr.write(done.stderr)
                done.check_returncode()
                break
            missing[unknown[1]] = wanted[unknown[1]]
    return missing


def run_tests(folder: Path) -> int:
    """Run the smoke tests with a folder's packages first; return the exit status."""
    paths = os.pathsep.join((str(folder), str(ROOT)))
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", *TESTS]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": paths}, check=False)
    return done.returncode


def installed(folder: Path, wanted: dict[str, str]) -> str:
    """Return the versions of the wanted packages, as a process finds them in a folder."""
    found = sorted(
        one.name.removesuffix(".dist-info").replace("-", " ") for one in folder.glob("*.dist-info")
    )
    names = {name.replace("-", "_") for name in wanted}
    return ", ".join(one for one in found if one.split()[0].lower() in names)


def main(folder: Path) -> int:
    """Run both sets; return 0 if both pass."""
    specifiers = allowed()
    oldest = {name: one.replace(">=", "==") for name, one in specifiers.items()}
    status, untested = 0, []
    for name, wanted in (("oldest", oldest), ("newest", specifiers)):
        missing = install(folder / name, wanted)
        untested += [f"{name}: {package}{one}" for package, one in missing.items()]
        sys.stdout.write(f"{name}: {installed(folder / name, wanted)}\n")
        sys.stdout.flush()
        status |= run_tests(folder / name)
    if untested:
        sys.stdout.write("\nNOT TESTED, for the package index does not have them:\n  ")
        sys.stdout.write("\n  ".join(untested) + "\n")
    return status


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if sys.argv[1:] else FOLDER))
