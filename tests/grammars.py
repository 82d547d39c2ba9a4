"""Grammars for tests: tiny vocabularies, and a source that is ready when the test says so.

The three-token vocabulary is the token oracle's: "a", "b" and an end. `constrained_output` computes
the output of a sequence alone under a grammar, with the same matcher and no engine.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Final

from llguidance import LLTokenizer

from engine.api import Grammar, Namespace, Payer, Request
from engine.errors import EngineError
from engine.grammar.compiler import Outcome
from engine.grammar.grammar import (
    CompiledGrammar,
    GrammarLimits,
    MaskFiller,
    Vocabulary,
    compile_grammar,
)
from engine.grammar.sandbox import SandboxSettings
from tests.fakes import next_token, tag_after
from tests.tiny_tokenizer import TOKENS

END: Final = 2
LETTERS: Final = ("a", "b")
VOCAB: Final = len(TOKENS) - 2
"""Of `schema_file`: every byte and some words, and one end, which is the last."""


@functools.cache
def letters(limits: GrammarLimits | None = None) -> Vocabulary:
    """Return the token oracle's vocabulary: "a" is 0, "b" is 1, and 2 is the end token."""
    return Vocabulary(
        LLTokenizer(tokenizer_json([*LETTERS], "<end>"), eos_token=[END]), limits or GrammarLimits()
    )


def tokenizer_json(words: list[str], end: str) -> str:
    """Return a byte-level `tokenizer.json` of these words, one token each, and an end token."""
    vocab = {word: index for index, word in enumerate([*words, end])}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    byte_level = {
        "type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False,
    }  # fmt: skip
    return json.dumps(
        {
            "version": "1.0",
            "added_tokens": [{"id": len(words), "content": end, "special": True, **flags}],
            "pre_tokenizer": byte_level,
            "decoder": byte_level,
            "model": {"type": "BPE", "vocab": vocab, "merges": []},
        }
    )


@functools.cache
def characters(size: int) -> Vocabulary:
    """Return a vocabulary of `size` tokens: the characters from "@" on, and an end token last."""
    words = [chr(ord("@") + index) for index in range(size - 1)]
    return Vocabulary(
        LLTokenizer(tokenizer_json(words, "<end>"), eos_token=[size - 1]), GrammarLimits()
    )


@functools.cache
def compiled(grammar: Grammar, vocabulary: Vocabulary | None = None) -> CompiledGrammar:
    """Compile a grammar, by default over the oracle's vocabulary. Raises RequestRefused."""
    return compile_grammar(grammar, vocabulary or letters())


class PolledGrammars:
    """A `GrammarSource` without threads: a grammar is ready `polls` polls after its submission."""

    def __init__(self, polls: int = 0, vocabulary: Vocabulary | None = None) -> None:
        self.polls = polls
        self.vocabulary = vocabulary or letters()
        self.asked: list[tuple[str, Namespace, Grammar]] = []
        self.turns: list[Payer] = []
        self.dropped: list[tuple[Namespace, Grammar]] = []
        self.erased: list[Namespace] = []
        self._waiting: list[tuple[str, Outcome, int]] = []

    def submit(self, request_id: str, payer: Payer, namespace: Namespace, grammar: Grammar) -> None:
        """Queue a grammar; a refusal comes with `take_ready`, like a success."""
        self.asked.append((request_id, namespace, grammar))
        self.turns.append(payer)
        outcome: Outcome
        try:
            outcome = compiled(grammar, self.vocabulary)
        except EngineError as refusal:
            outcome = refusal
        self._waiting.append((request_id, outcome, self.polls))

    def cancel(self, request_id: str) -> None:
        self._waiting = [entry for entry in self._waiting if entry[0] != request_id]

    def take_ready(self) -> list[tuple[str, Outcome]]:
        ready = [(name, outcome) for name, outcome, polls in self._waiting if polls <= 0]
        self._waiting = [(name, out, polls - 1) for name, out, polls in self._waiting if polls > 0]
        return ready

    def mark_too_big(self, namespace: Namespace, grammar: Grammar) -> None:
        self.dropped.append((namespace, grammar))

    def erase(self, namespace: Namespace) -> None:
        self.erased.append(namespace)

    def close(self) -> None:
        self._waiting = []


def constrained_output(request: Request, index: int, vocab: int) -> tuple[list[int], str]:
    """Return the tokens of a sample alone under its grammar, and how it ended.

    The ending is "stop", "length", "dead end", or "refused" without output. Written from the rules
    at `engine.api.Request`, without a scheduler.
    """
    assert request.grammar is not None
    try:
        start = compiled(request.grammar)
    except EngineError:
        return [], "refused"
    matcher, filler = start.matcher.fork(), MaskFiller()
    tag = 0
    out: list[int] = []
    for token in request.tokens:
        tag = tag_after(tag, token)
    while len(out) < request.max_tokens:
        (mask,) = filler.fill([matcher], [len(out) + 1 < request.min_tokens])
        if not mask.any():
            return out, "dead end"
        token = next_token(tag, request.sampling, index, len(out), vocab, mask)
        assert matcher.consume(token)
        out.append(token)
        tag = tag_after(tag, token)
        if token in request.stop_token_ids and len(out) >= request.min_tokens:
            return out, "stop"
        if matcher.is_complete:
            return out, "stop"
    return out, "length"


def schema_file(folder: Path) -> Path:
    """Write a `tokenizer.json` over every byte, for code that reads a file; return its path."""
    path = folder / "tokenizer.json"
    path.write_text(tokenizer_json(TOKENS[3:], TOKENS[0]), encoding="utf-8")
    return path


def sandbox_settings(
    folder: Path, *, cpu_s_max: int = 2, memory_mib_max: int = 96
) -> SandboxSettings:
    """Return a sandbox's settings over the tokenizer of `schema_file`, which it writes."""
    path = str(schema_file(folder))
    return SandboxSettings(
        path, VOCAB, (VOCAB - 1,), cpu_s_max=cpu_s_max, memory_mib_max=memory_mib_max
    )
