"""The workload (h) of `trunkline bench`: the same answers with drafts and without, in turns.

Its texts are real and come with Python: the language reference is summed up, code of the standard
library is edited. Beside them, JSON by a schema, and chat, where drafts should cost nothing.
"""

from __future__ import annotations

import heapq
import inspect
import random
import textwrap
from collections.abc import Callable, Mapping
from pydoc_data.topics import topics
from typing import Any

from msgspec import Struct

from gateway.bench.client import BenchError, Client, Measurement
from gateway.bench.figures import Figure, percentile
from gateway.bench.prompts import WORDS

DRAFTS_HEADER = "X-Trunkline-Drafts"
CODE = tuple(
    inspect.getsource(one)
    for one in (heapq.merge, heapq.nsmallest, heapq.nlargest, textwrap.dedent)
)
"""What is edited."""
PERSON: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        "full_name": {"type": "string", "maxLength": 40},
        "date_of_birth": {"type": "string", "maxLength": 12},
        "occupation": {"type": "string", "maxLength": 40},
        "postal_address": {
            "type": "object",
            "properties": {
                "street_and_number": {"type": "string", "maxLength": 40},
                "postal_code": {"type": "string", "maxLength": 10},
                "country": {"type": "string", "maxLength": 30},
            },
            "required": ["street_and_number", "postal_code", "country"],
            "additionalProperties": False,
        },
        "is_employed": {"type": "boolean"},
    },
    "required": ["full_name", "date_of_birth", "occupation", "postal_address", "is_employed"],
    "additionalProperties": False,
}
"""The schema of JSON answers."""


class DraftSizes(Struct, frozen=True):
    """How many requests of each kind a run has, the words of a text, and the longest answer."""

    each: int = 4
    text_words: int = 250
    output: int = 160


class Task(Struct, frozen=True):
    """A question, and further fields of its request."""

    question: str
    fields: Mapping[str, Any] = {}


class Pair(Struct, frozen=True):
    """One answer with drafts and without."""

    drafted: Measurement
    plain: Measurement

    @property
    def speed_ratio(self) -> float:
        """Tokens a second after the first piece, over those without drafts."""
        return _tokens_per_s(self.drafted) / _tokens_per_s(self.plain)

    @property
    def steps_ratio(self) -> float:
        """Pieces of text without drafts for each one with them: a step sends one piece."""
        return len(self.plain.pieces_s) / max(1, len(self.drafted.pieces_s))


def _tokens_per_s(done: Measurement) -> float:
    if not done.pieces_s or done.ended_s <= done.pieces_s[0]:
        raise BenchError("An answer has no text to time; choose a model that answers.")
    return done.output_tokens / (done.ended_s - done.pieces_s[0])


def edit(chance: random.Random, sizes: DraftSizes) -> Task:
    """Ask for a piece of code with other words in its comments."""
    code = chance.choice(CODE)
    word = chance.choice(WORDS)
    question = f"Add the comment '# {word}' at the top of this code. Answer with the code.\n\n"
    return Task(question + _cut(code, sizes))


def predicted_edit(chance: random.Random, sizes: DraftSizes) -> Task:
    """Ask for the same, with the code as the prediction."""
    task = edit(chance, sizes)
    _, _, code = task.question.partition("\n\n")
    return Task(task.question, {"prediction": {"type": "content", "content": code}})


def summary(chance: random.Random, sizes: DraftSizes) -> Task:
    """Ask for the sentences that matter of a text."""
    long = sorted(text for text in topics.values() if len(text.split(" ")) >= sizes.text_words)
    text = _cut(chance.choice(long), sizes)
    return Task("Quote the most important sentences of this text, word for word.\n\n" + text)


def json_by_schema(chance: random.Random, sizes: DraftSizes) -> Task:
    """Ask for a person as JSON."""
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
    question = f"Invent a person who likes the word '{chance.choice(WORDS)}'. Answer in JSON."
    return Task(question, {"response_format": form})


def chat(chance: random.Random, sizes: DraftSizes) -> Task:
    """Ask for free text, of which little can be guessed."""
    first, second = chance.sample(WORDS, 2)
    return Task(f"Tell me a short story about a {first} and a {second}.")


KINDS: Mapping[str, Callable[[random.Random, DraftSizes], Task]] = {
    "edit": edit,
    "predicted edit": predicted_edit,
    "summary": summary,
    "json": json_by_schema,
    "chat": chat,
}


async def measure_kind(
    client: Client, name: str, chance: random.Random, sizes: DraftSizes
) -> list[Figure]:
    """Return a kind's speed and steps with drafts, each over those without, and their spread.

    The prompt is cached beforehand, and the order changes with each request: neither the cache nor
    the machine's mood favours one.
    """
    pairs: list[Pair] = []
    for number in range(sizes.each):
        task = KINDS[name](chance, sizes)
        await _ask(client, task, 1, "off")
        order = ("auto", "off") if number % 2 else ("off", "auto")
        done = {word: await _ask(client, task, sizes.output, word) for word in order}
        pairs.append(Pair(done["auto"], done["off"]))
    ratios = [pair.speed_ratio for pair in pairs]
    same = sum(pair.drafted.text == pair.plain.text for pair in pairs)
    return [
        Figure(f"{name} tok/s with drafts / without", "x", percentile(ratios, 50)),
        Figure(f"{name} the least", "x", min(ratios)),
        Figure(f"{name} the most", "x", max(ratios)),
        Figure(f"{name} steps without / with", "x", percentile([p.steps_ratio for p in pairs], 50)),
        Figure(f"{name} same text", "%", 100 * same / len(pairs)),
    ]


async def _ask(client: Client, task: Task, output_tokens: int, drafts: str) -> Measurement:
    messages = [{"role": "user", "content": task.question}]
    fields = {**task.fields, "ignore_eos": False}
    return await client.chat(
        messages, output_tokens, fields=fields, headers={DRAFTS_HEADER: drafts}
    )


def _cut(text: str, sizes: DraftSizes) -> str:
    """Return the first words of a text, with its own spaces and lines."""
    return " ".join(text.split(" ")[: sizes.text_words])
