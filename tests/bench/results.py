"""What a benchmark prints: lines as they come, figures as lines of JSON, and a file of these."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def print_line(text: str) -> None:
    """Print a line at once, also into a pipe."""
    print(text, flush=True)


class Results:
    """Figures that are printed as they come, and written to a file at the end."""

    def __init__(self) -> None:
        self.found: list[dict[str, Any]] = []

    def add(self, figures: dict[str, Any]) -> None:
        """Print a line of JSON."""
        self.found.append(figures)
        print_line(json.dumps(figures))

    def write(self, path: Path | None) -> None:
        """Write all figures, if a file is wanted."""
        if path is not None:
            path.write_text(json.dumps(self.found, indent=1))


def spread(values: Sequence[float], form: str = ".1f") -> str:
    """Return the least and the most of several runs."""
    return f"({min(values):{form}} to {max(values):{form}})"


def middle_and_spread(values: Sequence[float], form: str = ".1f", unit: str = "") -> str:
    """Return the median of several runs, the least and the most."""
    return f"{statistics.median(values):{form}}{unit} {spread(values, form)}"
