"""The tables of docs/models.md that come from the code: built-in models, families, tokenizers.

    python -m tests.tools.model_tables            # writes them into docs/models.md
    python -m tests.tools.model_tables --check    # exits with 1 if the page differs

Each stands between two comments that name it.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path

from engine.model_store.architecture import REFUSED
from engine.model_store.catalogue import CATALOGUE
from engine.model_store.families import FAMILIES
from engine.model_store.gguf_tokenizer import PRE_TOKENIZERS
from engine.model_store.parts import END_TOKENS

PAGE = Path(__file__).parents[2] / "docs" / "models.md"


def tables() -> dict[str, str]:
    """Return the text of each part by its name."""
    built_in = [
        f"| `{name}` | {model.about} | {model.size / 1e6:.0f} MB | {model.licence} |"
        for name, model in CATALOGUE.items()
    ]
    families = [
        f"| `{kind}` | {family.models} | `{family.gguf}` |" for kind, family in FAMILIES.items()
    ]
    by_reason: dict[str, list[str]] = defaultdict(list)
    for kind, reason in REFUSED.items():
        by_reason[reason].append(f"`{kind}`")
    refused = [f"| {', '.join(kinds)} | {reason} |" for reason, kinds in by_reason.items()]
    heads = {
        "built-in models": ("| name | model | size | licence |", 4, built_in),
        "families": ("| `model_type` | models | in GGUF |", 3, families),
        "refused": ("| `model_type` | why, and the nearest that runs |", 2, refused),
    }
    found = {
        name: "\n".join([head, "|" + " --- |" * columns, *rows])
        for name, (head, columns, rows) in heads.items()
    }
    words = {
        "pre-tokenizers": [f"`{name}`" for name in sorted(PRE_TOKENIZERS)],
        "end tokens": [f"`{token}`" for token in END_TOKENS],
    }
    for name, items in words.items():
        found[name] = "| | |\n| --- | --- |\n" + f"| {name} | {', '.join(items)} |"
    return found


def written(page: str) -> str:
    """Return a page with each table put between its comments."""
    for name, text in tables().items():
        first, last = f"<!-- {name} -->\n", "<!-- end -->"
        start = page.index(first) + len(first)
        page = f"{page[:start]}{text}\n{page[page.index(last, start) :]}"
    return page


def main() -> int:
    """Write or check the page; return the exit code."""
    page = PAGE.read_text()
    if "--check" in sys.argv[1:]:
        return int(written(page) != page)
    PAGE.write_text(written(page))
    return 0


if __name__ == "__main__":
    sys.exit(main())
