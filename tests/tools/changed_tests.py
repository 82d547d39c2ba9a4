"""Prints the test folders of what changed: `python -m tests.tools.changed_tests [BASE]`.

`make check` runs them. A changed product file selects the folder of tests/unit that mirrors its
package, a changed test file itself, anything else only the tests of documents and architecture.
Compares the working tree with BASE (default: the commit that `origin/main` or `main` names).
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parents[2]
DAY_S = 86_400
ALWAYS = ("tests/test_architecture.py", "tests/test_docs.py")
FAST = (
    *(f"tests/unit/engine/{name}" for name in ("cache", "core", "scheduler")),
    *(f"tests/unit/gateway/{name}" for name in ("caching", "dialects", "prompt")),
    *(f"tests/unit/tenancy/{name}" for name in ("pricing", "reuse")),
    *(
        f"tests/property/test_{name}.py"
        for name in ("cache_machine", "engine_machine", "isolation")
    ),
)
"""What runs where nothing changed: the rules of cache, scheduler, dialects and money."""


def folders_of(changed: Iterable[str]) -> list[str]:
    """Test paths for changed files, each path relative to the root, without duplicates."""
    found = dict.fromkeys(ALWAYS)
    for name in changed:
        path = PurePosixPath(name)
        if path.suffix not in {".py", ".c", ".h", ".sql"}:
            continue
        if path.parts[0] == "tests":
            if path.name.startswith("test_") and (ROOT / path).exists():
                found[name] = None
        elif path.parts[0] in {"gateway", "engine", "tenancy", "kernels"}:
            folder = next(
                (f for f in path.parents if (ROOT / "tests/unit" / f).is_dir() and f.parts), None
            )
            if folder is not None:
                found[f"tests/unit/{folder}"] = None
    folders = [name for name in found if (ROOT / name).is_dir()]
    return [
        name
        for name in found
        if not any(name != folder and name.startswith(f"{folder}/") for folder in folders)
    ]


def merge_base(base: str | None = None) -> str:
    """The commit at which this branch left `base`, by default `origin/main` or `main`."""
    if base is None:
        names = ("origin/main", "main", "HEAD")
        base = next(name for name in names if _git("rev-parse", "--verify", "--quiet", name))
    return (_git("merge-base", base, "HEAD") or [base])[0]


def changed_files(base: str | None) -> list[str]:
    """Files that differ from `base`, committed or not, and files that git does not track yet."""
    fork = merge_base(base)
    untracked = _git("ls-files", "--others", "--exclude-standard")
    return [*_git("diff", "--name-only", fork), *untracked]


def file_at(commit: str, name: str) -> str:
    """The text of a file as a commit has it; empty if it has none."""
    return "\n".join(_git("show", f"{commit}:{name}"))


def commit_a_day_before(commit: str = "HEAD") -> str:
    """The last commit at least a day older than this one, by the committers' clocks: what is pushed
    together is compared together. Empty if there is none."""
    (now,) = _git("show", "--no-patch", "--format=%ct", commit)
    return "".join(_git("rev-list", "-1", f"--before={int(now) - DAY_S}", commit))


def _git(*arguments: str) -> list[str]:
    done = subprocess.run(
        ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.stdout.splitlines()


if __name__ == "__main__":
    changes = changed_files(sys.argv[1] if len(sys.argv) > 1 else None)
    paths = folders_of(changes) if changes else [*ALWAYS, *FAST]
    sys.stdout.write(" ".join(paths) + "\n")
