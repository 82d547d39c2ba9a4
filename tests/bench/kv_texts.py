"""Texts and recall tasks for `kv_quality`: seeded, from what every machine has.

Prose of Python's own documentation (`pydoc_data.topics`, in the standard library), this
repository's documents, a run of random tokens read twice, and pairs of keys and values asked back.
"""

from __future__ import annotations

import importlib
import random
from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct
from tokenizers import Tokenizer

ROOT = Path(__file__).parents[2]
NAMES = (
    "amber", "birch", "cobalt", "dahlia", "ember", "falcon", "granite", "harbor", "indigo",
    "jasper", "kestrel", "lantern", "marble", "nectar", "orchid", "pebble", "quartz", "raven",
    "saffron", "thistle", "umber", "velvet", "willow", "yarrow",
)  # fmt: skip


class Task(Struct, frozen=True):
    """Tokens to read, and the positions of those that the model should have predicted.

    `answers`: (first, end) of each answer; all of its tokens must be predicted.
    """

    token_ids: list[int]
    answers: list[tuple[int, int]]


def texts(file: Path | None) -> dict[str, str]:
    """Return texts by name: Python's topics and this repository's documents, or one file."""
    if file is not None:
        return {file.name: file.read_text()}
    topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    documents = sorted((ROOT / "docs").glob("*.md"))
    return {
        "python topics": "\n\n".join(topics[key] for key in sorted(topics)),
        "documents": "\n\n".join(path.read_text() for path in documents),
    }


def windows(text: str, tokenizer: Tokenizer, tokens: int, count: int, seed: int) -> list[list[int]]:
    """Return `count` windows of `tokens` tokens, at seeded places of the text, or fewer where it is
    shorter."""
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    starts = list(range(0, len(ids) - tokens + 1, tokens))
    chosen = sorted(random.Random(seed).sample(starts, min(count, len(starts))))
    return [ids[start : start + tokens] for start in chosen]


def copying(vocab: Sequence[int], tokens: int, seed: int) -> Task:
    """Return `tokens` random tokens twice; each token of the second half is an answer."""
    draw = random.Random(seed)
    once = [draw.choice(vocab) for _ in range(tokens)]
    answers = [(position, position + 1) for position in range(tokens + 1, 2 * tokens)]
    return Task(once + once, answers)


def pairs(tokenizer: Tokenizer, count: int, seed: int) -> Task:
    """Return `count` sentences with a number each, then half of the numbers asked in turn."""
    draw = random.Random(seed)
    names = draw.sample(NAMES, count)
    numbers = {name: str(draw.randrange(1000, 10000)) for name in names}
    told = " ".join(f"The number of {name} is {numbers[name]}." for name in names)
    token_ids: list[int] = tokenizer.encode(told, add_special_tokens=False).ids
    answers = []
    for name in draw.sample(names, count // 2):
        question = tokenizer.encode(f" The number of {name} is", add_special_tokens=False).ids
        answer = tokenizer.encode(f" {numbers[name]}", add_special_tokens=False).ids
        token_ids = token_ids + question
        answers.append((len(token_ids), len(token_ids) + len(answer)))
        token_ids = token_ids + answer + tokenizer.encode(".", add_special_tokens=False).ids
    return Task(token_ids, answers)
