"""Cost of a grammar: compilation, one mask, and a step of a real model with and without one.

    python -m tests.bench.grammar_step [--steps N]

The default model's tokenizer (49,152 tokens), and the same filled to 128,256 with pairs of its
words, about what a tokenizer of that size has. Masks are filled along a random document. Steps are
the CPU runner's: two engines alternate, one with free rows and one with constrained rows, so that
other load affects both.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import time
from functools import partial

import numpy as np
import torch
from llguidance import LLTokenizer

from engine.api import CacheGrant, Grammar, Request, Sampling
from engine.cache import PrefixCache
from engine.config import EngineConfig
from engine.core.constraints import Constraints
from engine.core.core import Core
from engine.grammar.grammar import GrammarLimits, MaskFiller, Vocabulary, compile_grammar
from engine.model_store import ModelCard
from engine.models.cpu_decoder import load_kernels
from engine.runner.cpu_runner import CpuRunner
from tests.bench.models import default_card
from tests.bench.results import print_line
from tests.bench.timing import seconds_of
from tests.grammars import PolledGrammars

LARGE = 128_256

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "email": {"type": "string", "pattern": "^[a-z.]{1,20}@[a-z]{2,20}\\.com$"},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}},
    },
    "required": ["name", "age", "email", "tags"],
    "additionalProperties": False,
}
GRAMMARS = {
    "any object": Grammar("json_object"),
    "nested, a pattern": Grammar("json_schema", json.dumps(PERSON)),
    "40 properties": Grammar(
        "json_schema",
        json.dumps({"properties": {f"field{i}": {"type": "string"} for i in range(40)}}),
    ),
    "enum of 3,000": Grammar(
        "json_schema", json.dumps({"enum": [f"value number {i}" for i in range(3_000)]})
    ),
    "tool call": Grammar(
        "lark",
        'start: "<tool_call>" call "</tool_call>"\ncall: %json ' + json.dumps(PERSON),
    ),
}


def vocabulary_of(card: ModelCard, size: int) -> Vocabulary:
    """Return the model's vocabulary, or one filled up with pairs of its words."""
    if size == card.config.vocab:
        return Vocabulary.load(card.tokenizer_path, size, card.stop_token_ids, GrammarLimits())
    tokenizer = json.loads(card.tokenizer_path.read_text(encoding="utf-8"))
    vocab, chance = tokenizer["model"]["vocab"], random.Random(5)
    words = [word for word, token_id in vocab.items() if token_id > 300]
    while len(vocab) < size:
        vocab.setdefault(chance.choice(words) + chance.choice(words), len(vocab))
    text = json.dumps(tokenizer)
    return Vocabulary(LLTokenizer(text, eos_token=list(card.stop_token_ids)), GrammarLimits())


def measure_masks(card: ModelCard, size: int) -> None:
    vocabulary, chance, filler = vocabulary_of(card, size), random.Random(1), MaskFiller()
    for name, grammar in GRAMMARS.items():
        compiled = compile_grammar(grammar, vocabulary)
        compiling_s = seconds_of(partial(compile_grammar, grammar, vocabulary), 5)
        filling_us, consuming_us = [], []
        for _ in range(20):
            matcher = compiled.matcher.fork()
            for _ in range(60):
                at_s = time.perf_counter()
                (mask,) = filler.fill([matcher], [False])
                filling_us.append((time.perf_counter() - at_s) * 1e6)
                bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
                may = np.nonzero(bits)[0].tolist()
                at_s = time.perf_counter()
                matcher.consume(chance.choice(may))
                consuming_us.append((time.perf_counter() - at_s) * 1e6)
                if matcher.is_complete:
                    break
        filling_us.sort()
        print_line(
            f"{size:>7} {name:<20} compile {min(compiling_s) * 1e3:6.1f} ms"
            f"   mask p50 {statistics.median(filling_us):5.0f}"
            f" p99 {filling_us[len(filling_us) * 99 // 100]:5.0f} us"
            f"   consume p50 {statistics.median(consuming_us):4.0f} us"
        )
    matchers = [compile_grammar(GRAMMARS["any object"], vocabulary).matcher] * 16
    for threads in (1, 2):
        rows, batch = MaskFiller(threads), [matcher.fork() for matcher in matchers]
        times_s = seconds_of(partial(rows.fill, batch, [False] * len(batch)), 50)
        print_line(f"{size:>7} 16 rows at once, {threads} thread(s): {min(times_s) * 1e6:.0f} us")


class Contender:
    """An engine with `rows` sequences, all free or all under one grammar."""

    def __init__(self, card: ModelCard, vocabulary: Vocabulary, threads: int) -> None:
        self.kernels = load_kernels(card.config, threads)
        runner = CpuRunner(card, EngineConfig(), blocks=300, context=1024, kernels=self.kernels)
        self.core = Core(
            PrefixCache(blocks=300, block_size=16),
            runner,
            EngineConfig(),
            time.monotonic,
            vocab_size=card.config.vocab,
            context_tokens=1024,
            constraints=Constraints(PolledGrammars(vocabulary=vocabulary), MaskFiller(threads)),
        )

    def begin(self, rows: int, tokens: int, sampling: Sampling, grammar: Grammar | None) -> None:
        for row in range(rows):
            prompt = tuple(range(300 + row, 330 + row))
            grant = CacheGrant(b"n")
            self.core.submit(
                Request(f"{row}", prompt, tokens + 8, grant, sampling, grammar=grammar)
            )
        for _ in range(4):
            self.core.step()

    def step(self) -> float:
        return seconds_of(self.core.step)[0]

    def end(self, rows: int) -> None:
        for row in range(rows):
            self.core.cancel(f"{row}")
        self.core.step()


def measure_steps(card: ModelCard, steps: int) -> None:
    threads = os.cpu_count() or 1
    torch.set_num_threads(1)
    vocabulary = vocabulary_of(card, card.config.vocab)
    free, held = (Contender(card, vocabulary, threads) for _ in range(2))
    # Long texts without an end, so that both have the same rows at every step.
    grammar = Grammar("json_schema", json.dumps({"type": "string", "minLength": 4_000}))
    for rows in (1, 16):
        for sampling in (Sampling(temperature=0), Sampling(temperature=1.0, seed=1)):
            free.begin(rows, steps, sampling, None)
            held.begin(rows, steps, sampling, grammar)
            pairs = [(free.step(), held.step()) for _ in range(steps)]
            free.end(rows)
            held.end(rows)
            plain, bound = (statistics.median(times) for times in zip(*pairs, strict=True))
            added = statistics.median(b - a for a, b in pairs)
            ratio = statistics.median(b / a for a, b in pairs)
            print_line(
                f"{rows:>3} rows, temperature {sampling.temperature}: free {plain * 1e3:.2f} ms,"
                f" constrained {bound * 1e3:.2f} ms a step; by pairs {added * 1e3:+.2f} ms,"
                f" ratio {ratio:.3f}"
            )
    for contender in (free, held):
        if contender.kernels is not None:
            contender.kernels.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--steps", type=int, default=60)
    arguments = parser.parse_args()
    card = default_card()
    for size in (card.config.vocab, LARGE):
        measure_masks(card, size)
    measure_steps(card, arguments.steps)


if __name__ == "__main__":
    main()
