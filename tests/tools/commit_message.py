"""Checks commit messages: `python -m tests.tools.commit_message FILE`, or `--since COMMIT`.

A subject names folders and begins with an imperative verb: `engine, tests: fix the drain timeout`.
It has at most 72 characters. A commit that changes over 50 lines says why in its body. The hook
that `make hooks` installs checks one message; CI checks every commit since this rule began.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SUBJECT_CHARS_MAX = 72
BODY_FROM_LINES = 50
VERBS = frozenset(Path(__file__).with_name("imperative_verbs.txt").read_text().split())
_SUBJECT = re.compile(r"[a-z0-9_./-]+(, [a-z0-9_./-]+)*: ([a-z]+)\b.*[^.]")


def problems_of(message: str, changed_lines: int = 0) -> list[str]:
    """What is wrong with a commit message; empty where nothing is."""
    subject, _, body = message.strip().partition("\n")
    found = []
    match = _SUBJECT.fullmatch(subject)
    if match is None:
        found.append(
            f"subject {subject!r}; expected 'folder[, folder]: verb …' without a full stop"
        )
    elif match[2] not in VERBS:
        found.append(f"subject begins with {match[2]!r}; expected an imperative verb")
    if len(subject) > SUBJECT_CHARS_MAX:
        found.append(f"subject has {len(subject)} characters; limit {SUBJECT_CHARS_MAX}")
    if changed_lines > BODY_FROM_LINES and not body.strip():
        found.append(f"{changed_lines} changed lines without a body; say why in the body")
    return found


def commits_since(base: str) -> list[tuple[str, str, int]]:
    """(commit, message, changed lines) of every commit after `base`; merges are left out."""
    log = _git("log", "--no-merges", "--format=%H", f"{base}..HEAD").split()
    return [(one, _git("log", "-1", "--format=%B", one), _changed_lines(one)) for one in log]


def rule_began() -> str:
    """The commit that added this file; later commits are held to it."""
    name = Path(__file__).relative_to(ROOT).as_posix()
    added = _git("log", "--diff-filter=A", "--format=%H", "--", name).split()
    return added[-1] if added else "HEAD"


def _changed_lines(commit: str) -> int:
    rows = _git("show", "--numstat", "--format=", commit).splitlines()
    counts = [row.split("\t")[:2] for row in rows]
    return sum(int(count) for row in counts for count in row if count.isdigit())


def _git(*arguments: str) -> str:
    command = ["git", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def main(arguments: list[str]) -> int:
    """Print every problem; 1 where there is one."""
    if arguments[:1] == ["--since"]:
        base = arguments[1] if len(arguments) > 1 else rule_began()
        found = [
            f"{commit[:9]}: {problem}"
            for commit, message, lines in commits_since(base)
            for problem in problems_of(message, lines)
        ]
    else:
        text = Path(arguments[0]).read_text()
        kept = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
        found = problems_of(kept)
    for problem in found:
        sys.stderr.write(f"commit message: {problem}\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
