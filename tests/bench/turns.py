"""Rendering time of turn 50 of a long chat, with and without the renderer's cached pieces.

Prints processor time of the renderer alone, in one process, alternating: after it has rendered turn
49, and when it is new. The ratio is the gain of cached pieces.

    python -m tests.bench.turns
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from pathlib import Path

from gateway.dialects.canonical import Prompt, Segment
from gateway.prompt import Renderer
from tests.bench.models import default_card

TURNS, WORDS = 50, 120
LETTERS = "etaoinshrdlu"


def conversation(draw: random.Random) -> list[Segment]:
    """Return alternating user and assistant messages of 120 words each, and a final user
    message."""
    found = []
    for number in range(2 * TURNS - 1):
        words = ("".join(draw.choices(LETTERS, k=draw.randint(2, 9))) for _ in range(WORDS))
        found.append(
            Segment(
                "assistant" if number % 2 else "user",
                " ".join(words),
                f"messages[{number}]",
                message=number,
            )
        )
    return found


def seconds(renderer: Renderer, segments: list[Segment]) -> tuple[float, int]:
    """Return the processor time of one rendering, and its number of tokens."""
    began = time.process_time()
    tokens = len(renderer.render(Prompt(tuple(segments))).token_ids)
    return time.process_time() - began, tokens


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="a prepared model's folder")
    parser.add_argument("--runs", type=int, default=15)
    options = parser.parse_args()
    model = options.model or Path(default_card().folder)
    warm, cold, tokens = [], [], 0
    for run in range(options.runs):
        said = conversation(random.Random(run))
        new = Renderer.load(model)
        took, tokens = seconds(new, said)
        cold.append(took)
        used = Renderer.load(model)
        seconds(used, said[:-2])
        warm.append(seconds(used, said)[0])
    slow, quick = statistics.median(cold), statistics.median(warm)
    print(
        f"turn {TURNS} of a chat of {tokens} tokens, median of {options.runs}:"
        f" new {1000 * slow:.2f} ms, after turn {TURNS - 1} {1000 * quick:.2f} ms,"
        f" ratio {slow / quick:.1f}"
    )


if __name__ == "__main__":
    main()
