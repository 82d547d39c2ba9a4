"""Says which checks of CI a change asks for: `python -m tests.tools.changed_checks [BASE]`.

Some checks take minutes and depend on few files. CI runs them where one of these files differs from
the merge base with BASE (default: the commit that `origin/main` or `main` names), or, where that is
the commit itself, from main as it was a day before; `make nightly` runs all of them. `--marks`
prints for pytest which tests CI runs. What cannot be compared, as in a clone without history, asks
for all.
"""

from __future__ import annotations

import argparse
import sys
import tomllib
from collections.abc import Collection, Iterable

from tests.tools.changed_tests import (
    ROOT,
    changed_files,
    commit_a_day_before,
    file_at,
    merge_base,
)

DEPENDENCIES = ("pyproject.toml", "constraints.txt")
FILES: dict[str, tuple[str, ...]] = {
    "linters": (
        *("deploy/", "Dockerfile", ".dockerignore", "compose.yaml", "tests/tools/binaries.py"),
        *("tests/test_deploy.py", "tests/test_containers.py", "tests/e2e/test_deployments.py"),
    ),
    "buckets": ("engine/storage/remote/", "tests/unit/engine/storage/test_cloud_objects.py"),
    "older": ("gateway/dialects/", "tests/e2e/older_", "tests/e2e/test_older_sdks.py"),
    "bounds": ("tests/e2e/dependency_bounds.py",),
    "kernels": (
        *("kernels/", "engine/attention/", "engine/encoder/", "engine/kv/", "engine/models/"),
        *("engine/runner/", "engine/sampling/", "engine/weights/", "engine/plan.py"),
        *("tests/unit/kernels/", "tests/unit/engine/encoder/", "tests/unit/engine/models/"),
        *("tests/unit/engine/runner/", "tests/unit/engine/sampling/", "tests/families.py"),
    ),
    "compiled": ("kernels/", "tests/unit/kernels/"),
    "planted": (
        *("engine/cache/", "engine/core/", "engine/levels/", "engine/scheduler/"),
        *("engine/storage/", "engine/moves.py", "engine/plan.py", "tests/property/", "tests/sim/"),
        *("tests/fake_levels.py", "tests/fakes.py", "tests/checkers.py", "tests/memory_storage.py"),
    ),
    "crash": (
        *("tenancy/ledger/", "tenancy/storage/", "tenancy/accounting/", "engine/storage/"),
        *("engine/server/", "engine/client/", "gateway/ledger/", "gateway/engines/"),
        *("gateway/fleet", "gateway/cli/fleet/", "gateway/processes/", "tests/crash/"),
    ),
    "ray": (
        "gateway/fleet/",
        "gateway/cli/fleet/",
        "tests/e2e/ray_cluster.py",
        "tests/e2e/test_ray",
    ),
    "dashboard": (
        *("gateway/analytics/", "gateway/api/admin/", "gateway/dashboard/", "gateway/findings/"),
        "gateway/observability/",
        *("tests/e2e/browser.py", "tests/e2e/dashboard_", "tests/e2e/test_dashboard"),
    ),
}
"""The checks by name, each with how the names of files begin that it depends on beside
`DEPENDENCIES`. Those of `MARKERS` are slow tests with this marker, the others targets of make."""
MARKERS = ("kernels", "compiled", "planted", "crash", "ray", "dashboard")


def checks_of(changed: Iterable[str]) -> list[str]:
    """Names of the checks that depend on one of these files; all of them for no file at all."""
    names = list(changed)
    return [
        check
        for check, files in FILES.items()
        if not names or any(name.startswith((*files, *DEPENDENCIES)) for name in names)
    ]


def dependencies_of(text: str) -> list[object]:
    """The tables of a pyproject.toml that say what is installed."""
    found = tomllib.loads(text)
    project = found.get("project", {})
    names = ("requires-python", "dependencies", "optional-dependencies")
    return [found.get("dependency-groups"), *(project.get(name) for name in names)]


def without_settings(changed: Collection[str], commit: str) -> list[str]:
    """The changed files, without a pyproject.toml that installs what it installed at `commit`."""
    name = DEPENDENCIES[0]
    if name not in changed:
        return list(changed)
    is_same = dependencies_of(file_at(commit, name)) == dependencies_of((ROOT / name).read_text())
    return [one for one in changed if one != name or not is_same]


def marks_of(checks: Collection[str]) -> str:
    """An expression for pytest's `-m`. Slow attacks run one after another, by `make attacks`, and
    further forms of what other tests try by `make nightly`."""
    left_out = ("attacks", *(name for name in MARKERS if name not in checks))
    return f"not (nightly or slow and ({' or '.join(left_out)}))"


def main(arguments: list[str]) -> int:
    """Print the checks' names, or the expression; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("base", nargs="?", help="a branch or commit; by default main")
    parser.add_argument("--marks", action="store_true", help="print an expression for pytest's -m")
    asked = parser.parse_args(arguments)
    fork = merge_base(asked.base)
    if not changed_files(fork):
        fork = commit_a_day_before()
    changed = changed_files(fork) if fork else []
    names = without_settings(changed, fork)
    checks = checks_of(names) if names or not changed else []
    sys.stdout.write((marks_of(checks) if asked.marks else " ".join(checks)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
