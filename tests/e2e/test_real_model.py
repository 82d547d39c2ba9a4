"""The default model against `transformers`, with the same dequantised weights and real text.

Two implementations that share only torch: wrong names, order of q and k, rotation, masks, norms or
paged layout in one of them would show. Needs the model on disk (`make pull`); `make test` runs that
first.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, pre_tokenizers

from engine.api import CacheGrant, Request, Sampling, Tokens
from engine.attention.batch import make_batch
from engine.cache import PrefixCache
from engine.config import EngineConfig
from engine.core.core import Core
from engine.model_store import Architecture, ModelCard
from engine.plan import Row, StepPlan
from engine.runner.cpu_runner import CpuRunner
from engine.weights import load_weights
from tests.e2e.real_core import exact_runner, real_card

pytestmark = [pytest.mark.model, pytest.mark.slow]

LOGIT_ERROR_MAX = 2e-4
"""In units of the logits' standard deviation (6.8). Both sides compute in fp32 and differ in the
order of sums, each rounded at 6e-8 relative: measured 1.8e-5 over 400 tokens. A wrong norm epsilon
(1e-6 for 1e-5) moves a logit by 7e-3, a rotation base that is off by a thousandth by 1.3e-3."""

BLOCK, BLOCKS, CONTEXT, VOCAB = 16, 128, 1024, 49_152
COUNT = 32
"""Greedy tokens that are compared."""

PROSE = Path(__file__).parents[2] / "LICENSE"
"""Real text that every checkout has."""

QUESTIONS = (
    "What is the capital of France?",
    "Write a short poem about the sea.",
    "Explain in two sentences why the sky is blue.",
)


@pytest.fixture(scope="module")
def card() -> ModelCard:
    return real_card()


@pytest.fixture(scope="module")
def tokenizer(card: ModelCard) -> Tokenizer:
    return Tokenizer.from_file(str(card.tokenizer_path))


@pytest.fixture(scope="module")
def runner(card: ModelCard) -> CpuRunner:
    return exact_runner(card, "torch", BLOCKS, CONTEXT)


@pytest.fixture(scope="module", params=["torch", "C"])
def either_runner(request: pytest.FixtureRequest, card: ModelCard) -> CpuRunner:
    """Return a runner by torch and one by the C kernels, both in fp32."""
    return exact_runner(card, request.param, BLOCKS, CONTEXT)


@pytest.fixture(scope="module")
def reference(card: ModelCard) -> Iterator[Any]:
    """Return transformers' Llama, built from the card's shape with our weights."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # theirs
        import transformers

        model = transformers.LlamaForCausalLM(reference_config(card.config))
        weights = load_weights(card, torch.float32)
        missing, unexpected = model.load_state_dict(weights, strict=False, assign=True)
        model.tie_weights()
        assert unexpected == []
        assert set(missing) <= {"lm_head.weight"}
        yield model.eval()


@pytest.fixture(scope="module")
def generated(reference: Any) -> Callable[[tuple[int, ...]], Any]:
    """Return what transformers writes greedily after a prompt, computed once."""

    @cache
    def written(prompt: tuple[int, ...]) -> Any:
        return reference.generate(
            torch.tensor([prompt]),
            max_new_tokens=COUNT,
            do_sample=False,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )

    return written


def reference_config(config: Architecture) -> Any:
    import transformers

    return transformers.LlamaConfig(
        vocab_size=config.vocab,
        hidden_size=config.hidden,
        intermediate_size=config.intermediate,
        num_hidden_layers=len(config.layers),
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        max_position_embeddings=config.context,
        rms_norm_eps=config.norm_eps,
        tie_word_embeddings=config.tie_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": config.ropes["full"].theta},
        bos_token_id=None,
        eos_token_id=None,
    )


def our_logits(runner: CpuRunner, tokens: list[int], slices: tuple[int, ...]) -> torch.Tensor:
    """Return logits [T, vocab] of a prompt computed in slices, in scattered blocks of the pool."""
    blocks = list(range(BLOCKS - 1, BLOCKS - 1 - math.ceil(len(tokens) / BLOCK), -1))
    hidden, start = [], 0
    for count in (*slices, len(tokens) - sum(slices)):
        known = -(-(start + count) // BLOCK)
        row = Row(0, start, count, blocks[:known], 0, tokens[start : start + count])
        plan = StepPlan(step=0, rows=(row,))
        with torch.inference_mode():
            batch = make_batch(plan, BLOCK, lambda _: 0)
            runner.attention.begin(plan, batch)
            hidden.append(runner.model.forward(batch.token_ids, runner.attention))
        start += count
    with torch.inference_mode():
        return runner.model.logits(torch.cat(hidden))


@pytest.mark.parametrize(
    "slices",
    [pytest.param((), marks=pytest.mark.nightly), (1, 15, 100, 16, 33)],
    ids=["whole", "in slices"],
)
def test_logits_agree_with_transformers(
    slices: tuple[int, ...], runner: CpuRunner, reference: Any, tokenizer: Tokenizer
) -> None:
    """Every logit of every position of several hundred tokens of real text."""
    text = PROSE.read_text()
    tokens = tokenizer.encode(text, add_special_tokens=False).ids[:400]
    with torch.inference_mode():
        expected = reference(torch.tensor([tokens])).logits[0]

    logits = our_logits(runner, tokens, slices)

    error = float((logits - expected).abs().max() / expected.std())
    assert error < LOGIT_ERROR_MAX
    likely = torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(tokens[1:]))
    assert float(likely) < 4.0, "the model does not know its own language"


@pytest.mark.parametrize(
    "question",
    [QUESTIONS[0], *(pytest.param(one, marks=pytest.mark.nightly) for one in QUESTIONS[1:])],
)
def test_greedy_text_agrees_with_transformers_generate(
    question: str,
    either_runner: CpuRunner,
    generated: Callable[[tuple[int, ...]], Any],
    tokenizer: Tokenizer,
) -> None:
    """Token by token, through scheduler, cache and sampler. If the reference has two tokens
    within the tolerance of each other, either is accepted, and the comparison ends."""
    text = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    prompt = tokenizer.encode(text, add_special_tokens=False).ids
    written = generated(tuple(prompt))
    expected = written.sequences[0, len(prompt) :].tolist()

    answer = greedy(either_runner, prompt, COUNT)

    for at, (ours, theirs) in enumerate(zip(answer, expected, strict=True)):
        if ours != theirs:
            logits = written.logits[at][0]
            gap = float((logits[theirs] - logits[ours]) / logits.std())
            assert gap < 2 * LOGIT_ERROR_MAX, f"token {at} of {tokenizer.decode(expected)!r}"
            break
    assert len(answer) == COUNT


def greedy(runner: CpuRunner, prompt: list[int], count: int) -> list[int]:
    """Return `count` tokens from a new core, ignoring end tokens."""
    core = Core(
        PrefixCache(blocks=BLOCKS, block_size=BLOCK),
        runner,
        EngineConfig(prefill_chunk_tokens_max=16),
        lambda: 0.0,
        vocab_size=VOCAB,
        context_tokens=CONTEXT,
    )
    core.submit(Request("r", tuple(prompt), count, CacheGrant(b"n"), Sampling(temperature=0.0)))
    answer: list[int] = []
    while core.has_work():
        for event in core.step():
            if isinstance(event, Tokens):
                answer.extend(token.token_id for token in event.tokens)
    return answer


def test_tokenizer_agrees_with_transformers_reading_the_same_file(
    card: ModelCard, tokenizer: Tokenizer
) -> None:
    """Their conversion of this file does not split digits, as the published tokenizer does; with
    that corrected, vocabulary, merges and special tokens must give the same ids for any text."""
    from transformers import AutoTokenizer

    source = Path(card.source)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # theirs
        theirs = AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name)
    backend = theirs.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), backend.pre_tokenizer]
    )

    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert ids == backend.encode(text, add_special_tokens=False).ids, text
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


TEXTS = (
    "Hello, world! It's 12345 o'clock — don't you'd we'll?",
    "  leading,   doubled \t tabs\n\n\nand \r\n ends  ",
    "def f(x: int) -> int:\n    return x ** 2  # ½ of 10²\n",
    "Größe, naïve, São Paulo, Ελληνικά, Русский, العربية, עברית",
    "日本語と中文 한국어 ไทย हिन्दी",
    "🦊👩‍👩‍👧‍👦🇫🇷 e\u0301 \u00a0\u200b\ufeff end",
    "<|im_start|>system\nYou are<|im_end|>\n<|im_start|>user\n<repo_name>x<|endoftext|>",
    "<|im_start |> <|im_end> not special",
    "a" * 500 + "1" * 50,
    "",
)


def test_known_text_has_its_published_tokens(tokenizer: Tokenizer, card: ModelCard) -> None:
    """Fixed ids, so that a change of both sides at once shows."""
    ids = tokenizer.encode("<|im_start|>user\nHello world 42<|im_end|>\n").ids

    assert ids == [1, 4093, 198, 19556, 905, 216, 36, 34, 2, 198]
    assert card.stop_token_ids == (0, 2)
