"""Grammars: which tokens a request's output allows next, as one bit per token.

A grammar is compiled once over the model's vocabulary; each sample then walks its own matcher,
token by token, and asks for the mask of the tokens that may come next. This module knows
llguidance, and nothing of requests, steps, logits or torch. `engine.grammar.sandbox` compiles here
in a process that may die, then `engine.grammar.compiler` in a thread; core walks the matchers.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Final

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer
from llguidance.numpy import fill_next_token_bitmask, fill_next_token_bitmask_par
from msgspec import Struct

from engine.api import Grammar
from engine.errors import RequestRefused
from engine.plan import Mask

MESSAGE_CHARACTERS: Final = 300
"""The most characters of an llguidance error that are passed on."""

_WHITESPACE: Final = r" |\r?\n[ \t]{0,40}"
"""Whitespace between two JSON tokens: one space, or a newline and its indent. With more freedom,
small models fill whole answers with whitespace."""

_TOO_BIG: Final = ("too many", "too big", "too large", "too deep", "limit", "max is", "fuel")
"""Words in llguidance's errors that mean an exceeded bound, not a mistake."""

_IN_SCHEMA: Final = "failed to compile JSON schema: "
"""Stands before llguidance's words of a schema inside a grammar; lines of the grammar follow."""


class GrammarLimits(Struct, frozen=True, forbid_unknown_fields=True):
    """Bounds of one grammar. The bounds of a step apply during generation.

    `symbols_max`, `compile_fuel`: of the compiled form (a millisecond is about 50,000 of fuel).
    `step_fuel`, `step_items`: of one mask.
    """

    text_bytes_max: int = 131_072
    """The longest source, in bytes."""
    symbols_max: int = 100_000
    compile_fuel: int = 1_000_000
    step_fuel: int = 50_000
    step_items: int = 10_000
    row_items_max: int = 1_000
    """Places in the grammar where one text may be, about four for an optional property;
    `lark_row_items_max` where a grammar may be ambiguous, whose masks cost its square."""
    lark_row_items_max: int = 400
    lexer_states_max: int = 10_000
    """Lexer states that a matcher may keep, one to two kilobytes each."""


class Vocabulary:
    """A model's tokens in llguidance's form. About 0.3 s and 30 MB for 49,152 tokens."""

    def __init__(self, tokenizer: LLTokenizer, limits: GrammarLimits) -> None:
        self.tokenizer = tokenizer
        self.limits = limits
        self.words = -(-tokenizer.vocab_size // 32)
        self.parser_limits = self._limits(limits.row_items_max)
        self.lark_parser_limits = self._limits(limits.lark_row_items_max)
        self.ends = np.zeros((1, self.words), np.int32)
        for token_id in tokenizer.eos_tokens:
            self.ends[0, token_id // 32] |= np.uint32(1 << token_id % 32).astype(np.int32)

    @classmethod
    def load(
        cls,
        tokenizer_path: Path,
        vocab_size: int,
        end_token_ids: Sequence[int],
        limits: GrammarLimits,
    ) -> Vocabulary:
        """Read a `tokenizer.json`. Raises ValueError or OSError if it cannot be used."""
        text = tokenizer_path.read_text(encoding="utf-8")
        tokenizer = LLTokenizer(text, n_vocab=vocab_size, eos_token=list(end_token_ids))
        return cls(tokenizer, limits)

    def _limits(self, row_items_max: int) -> LLParserLimits:
        return LLParserLimits(
            max_items_in_row=row_items_max,
            initial_lexer_fuel=self.limits.compile_fuel,
            step_lexer_fuel=self.limits.step_fuel,
            step_max_items=self.limits.step_items,
            max_lexer_states=self.limits.lexer_states_max,
            max_grammar_size=self.limits.symbols_max,
            verbose_errors=False,
        )


class Matcher:
    """One sample's place in its grammar, as llguidance's `ll_matcher` has it. Not thread-safe."""

    __slots__ = ("ll_matcher", "vocabulary")

    def __init__(self, ll_matcher: LLMatcher, vocabulary: Vocabulary) -> None:
        self.ll_matcher = ll_matcher
        self.vocabulary = vocabulary

    def consume(self, token_id: int) -> bool:
        """Advance by one token; return False, for good, if the grammar does not allow it."""
        return self.ll_matcher.consume_token(token_id)

    def fork(self) -> Matcher:
        """Return another matcher at the same place. Microseconds: they share the compiled
        grammar.
        """
        return Matcher(self.ll_matcher.deep_copy(), self.vocabulary)

    def fill_mask(self, row: Mask) -> None:
        """Write the tokens that may come next. row: int32 [1, words], written. Microseconds; at
        most `step_fuel`.
        """
        fill_next_token_bitmask(self.ll_matcher, row, 0)

    def forced_tokens(self) -> list[int]:
        """Return the tokens of the text that must come next, cut as usual. Changes nothing."""
        found: list[int] = self.ll_matcher.compute_ff_tokens()
        return found

    @property
    def is_accepting(self) -> bool:
        """Return whether the text may end here; then the end tokens are in the mask."""
        return self.ll_matcher.is_accepting()

    @property
    def is_complete(self) -> bool:
        """Return whether the text is complete: only an end token can follow."""
        return self.ll_matcher.is_stopped() and not self.ll_matcher.is_error()

    @property
    def failure(self) -> str:
        """Return a stable error code once the matcher has failed, else an empty string."""
        if not self.ll_matcher.is_error():
            return ""
        is_big = _is_limit_error(self.ll_matcher.get_error())
        return "grammar_too_big" if is_big else "grammar_dead_end"


class CompiledGrammar(Struct, frozen=True):
    """A compiled grammar and its first mask. Its matchers share cached lexer states."""

    matcher: Matcher
    first_mask: Mask


class MaskFiller:
    """Fills the masks of several matchers at once, in its own threads."""

    def __init__(self, threads: int = 1) -> None:
        self._executor = LLExecutor(threads) if threads > 1 else None

    def fill(self, matchers: Sequence[Matcher], suppress_end: Sequence[bool]) -> Mask:
        """Return a new int32 [matchers, words]: the tokens that may come next; all zeros if none
        may.

        `suppress_end`: samples that must not end yet; the text may end if nothing else can come. A
        matcher that exceeds a bound has a `failure` afterwards. Releases the interpreter lock.
        """
        words = matchers[0].vocabulary.words
        masks = np.zeros((len(matchers), words), np.int32)
        if self._executor is None or len(matchers) == 1:
            for row, matcher in enumerate(matchers):
                matcher.fill_mask(masks[row : row + 1])
        else:
            pairs = [(matcher.ll_matcher, row) for row, matcher in enumerate(matchers)]
            fill_next_token_bitmask_par(self._executor, pairs, masks)
        for row, matcher in enumerate(matchers):
            if matcher.failure:
                masks[row] = 0
            elif suppress_end[row]:
                masks[row] = without_end_tokens(masks[row], matcher.vocabulary)
        return masks


def without_end_tokens(mask: Mask, vocabulary: Vocabulary) -> Mask:
    """Return the mask without end tokens, or the mask itself if nothing would be left. Changes
    nothing.
    """
    rest: Mask = mask & ~vocabulary.ends[0]
    return rest if rest.any() else mask


def check_source(grammar: Grammar, limits: GrammarLimits) -> None:
    """Raise RequestRefused for a source above its size bound. O(length of the text)."""
    text_bytes = len(grammar.text.encode("utf-8", "surrogatepass"))
    if text_bytes > limits.text_bytes_max:
        raise RequestRefused(
            "grammar_too_big",
            f"The grammar has {text_bytes} bytes; limit {limits.text_bytes_max}.",
        )


def compile_grammar(grammar: Grammar, vocabulary: Vocabulary) -> CompiledGrammar:
    """Compile a grammar and compute its first mask. Raises RequestRefused with the reason.

    Cost: below a millisecond for common schemas. The limits bound most costs of a hostile grammar,
    not all (`multipleOf` is computed digit by digit, outside the fuel): call it where it can be
    killed.
    """
    check_source(grammar, vocabulary.limits)
    try:
        limits = (
            vocabulary.lark_parser_limits if grammar.kind == "lark" else vocabulary.parser_limits
        )
        ll_matcher = LLMatcher(vocabulary.tokenizer, _source(grammar), log_level=0, limits=limits)
    except ValueError as error:
        raise RequestRefused("grammar_invalid", _message(grammar, str(error))) from error
    _raise_error(grammar, ll_matcher)
    matcher = Matcher(ll_matcher, vocabulary)
    mask = np.zeros((1, vocabulary.words), np.int32)
    matcher.fill_mask(mask)
    _raise_error(grammar, ll_matcher)
    if not mask.any():
        raise RequestRefused("grammar_invalid", "No token of this model can begin the grammar.")
    mask.setflags(write=False)
    return CompiledGrammar(matcher, mask[0])


def _source(grammar: Grammar) -> str:
    match grammar.kind:
        case "json_object":
            return _json_grammar('{"type": "object"}', lenient=False)
        case "json_schema":
            return _json_grammar(grammar.text, lenient=False)
        case "lenient_json_schema":
            return _json_grammar(grammar.text, lenient=True)
        case "regex":
            return LLMatcher.grammar_from_regex(grammar.text)
        case "lark":
            return LLMatcher.grammar_from_lark(grammar.text)


def _json_grammar(schema: str, *, lenient: bool) -> str:
    """Translate a JSON Schema into a grammar; the schema itself may not choose these options.

    `lenient`: ignore keywords that llguidance does not support, for requests that did not ask for
    strict enforcement of their schema.
    """
    return LLMatcher.grammar_from_json_schema(
        schema,
        overrides={
            "lenient": lenient,
            "coerce_one_of": lenient,
            "whitespace_pattern": _WHITESPACE,
        },
    )


def _raise_error(grammar: Grammar, ll_matcher: LLMatcher) -> None:
    if ll_matcher.is_error():
        reason = ll_matcher.get_error()
        if reason.startswith("NoExtension"):
            raise RequestRefused("grammar_invalid", "No text satisfies the grammar.")
        code = "grammar_too_big" if _is_limit_error(reason) else "grammar_invalid"
        raise RequestRefused(code, _message(grammar, reason))


def _is_limit_error(reason: str) -> bool:
    return any(words in reason.lower() for words in _TOO_BIG)


def _is_prose(line: str) -> bool:
    """Whether a line is no numbered line of a grammar."""
    number, bar, _ = line.partition(" | ")
    return not (bar and number.strip().isdigit())


def _message(grammar: Grammar, reason: str) -> str:
    """Return the refusal's message with llguidance's error, cut to a length that can be shown. A
    grammar that was built around a JSON schema is not quoted: its client wrote the schema."""
    what = {"lark": "grammar", "regex": "regular expression"}.get(grammar.kind, "JSON schema")
    reason = reason.replace("<non-verbose/>", "")
    _, is_inner, inner = reason.partition(_IN_SCHEMA)
    if is_inner:
        what, reason = "JSON schema", "\n".join(takewhile(_is_prose, inner.split("\n")))
    if reason.startswith("oneOf "):
        reason = "alternatives of oneOf that may overlap are not supported; write anyOf"
    text = " ".join(reason.split())[:MESSAGE_CHARACTERS]
    return f"The {what} cannot be used: {text}"
