"""The default model on a GPU against the CPU path, with equal weights and real text.

Kernels, graphs and paged layout differ; text, weights and the core are the same. Needs a CUDA
device and the model on disk (`make pull`).
"""

from __future__ import annotations

import pytest
import torch
from tokenizers import Tokenizer

from engine.api import CacheGrant, Finished, PromptLogprobs, Request, SampledToken, Sampling, Tokens
from engine.cache import PrefixCache
from engine.config import EngineConfig
from engine.core.core import Core
from engine.kv.format import kv_format
from engine.kv.storage import KvStorage
from engine.model_store import ModelCard
from engine.models.decoder import DecoderModel
from engine.models.gpu_layers import GpuOps
from engine.plan import Runner
from engine.runner.cpu_runner import CpuRunner
from engine.runner.gpu_runner import GpuRunner
from engine.weights import load_weights
from tests.e2e.real_core import exact_runner, real_card
from tests.e2e.test_real_model import PROSE, QUESTIONS

pytestmark = [pytest.mark.gpu, pytest.mark.model, pytest.mark.slow]

BLOCK, BLOCKS, CONTEXT, TEXT_TOKENS = 16, 256, 1024, 400
SYSTEM = "<|im_start|>system\nYou answer briefly and in plain words.<|im_end|>\n"
MEAN_ERROR_MAX = {torch.float32: 0.01, torch.bfloat16: 0.08}
WORST_ERROR_MAX = {torch.float32: 0.1, torch.bfloat16: 0.8}
"""Of the logprobs of the 20 likeliest tokens of each position against the CPU's in fp32. On the
device fp32 attention multiplies in tf32 (measured: mean 0.0040, worst 0.054); bf16 rounds weights,
KV and activations to 8 bits."""


@pytest.fixture(scope="module")
def card() -> ModelCard:
    return real_card()


@pytest.fixture(scope="module")
def tokenizer(card: ModelCard) -> Tokenizer:
    return Tokenizer.from_file(str(card.tokenizer_path))


@pytest.fixture(scope="module")
def on_cpu(card: ModelCard) -> CpuRunner:
    return exact_runner(card, "torch", BLOCKS, CONTEXT)


def on_device(card: ModelCard, dtype: torch.dtype) -> GpuRunner:
    device = torch.device("cuda")
    model = DecoderModel(card.config, load_weights(card, dtype, device), GpuOps())
    kv = KvStorage(kv_format(card.config, dtype, BLOCK), BLOCKS, device)
    return GpuRunner(model, kv, context=CONTEXT, seats=16, tokens_max=600)


class Answers:
    """Events of a core for a few requests; one core each, so its cache is empty."""

    def __init__(self, card: ModelCard, runner: Runner, depth: int) -> None:
        settings = EngineConfig(step_tokens_max=512, prefill_chunk_tokens_max=150, sequences_max=8)
        self.core = Core(
            PrefixCache(blocks=BLOCKS, block_size=BLOCK), runner, settings, lambda: 0.0,
            vocab_size=card.config.vocab, context_tokens=CONTEXT, pipeline_depth=depth,
        )  # fmt: skip
        self.cached: dict[str, int] = {}
        self.written: dict[str, list[SampledToken]] = {}
        self.prompt: list[SampledToken | None] = []

    def run(self, *requests: Request) -> None:
        for request in requests:
            self.core.submit(request)
        while self.core.has_work():
            for event in self.core.step():
                if isinstance(event, Tokens):
                    self.written.setdefault(event.request_id, []).extend(event.tokens)
                if isinstance(event, PromptLogprobs):
                    self.prompt.extend(event.tokens)
                if isinstance(event, Finished):
                    assert event.ending == "done", event
                    self.cached[event.request_id] = event.usage.cached_tokens


def prompt_logprobs(card: ModelCard, runner: Runner, tokens: list[int]) -> list[dict[int, float]]:
    """Return the 20 likeliest tokens at each position of a text, with the one that follows."""
    answers = Answers(card, runner, 1)
    grant = CacheGrant(b"x", read=False)
    answers.run(Request("r", tuple(tokens), 0, grant, Sampling(temperature=0), prompt_logprobs=20))
    found = []
    for token in answers.prompt[1:]:
        assert token is not None
        assert token.logprob is not None
        found.append({t.token_id: t.logprob for t in token.top} | {token.token_id: token.logprob})
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_logits_agree_with_the_cpu(
    dtype: torch.dtype, card: ModelCard, tokenizer: Tokenizer, on_cpu: CpuRunner
) -> None:
    """Several hundred positions, in chunks: a wrong head, rotation or block would show."""
    tokens = tokenizer.encode(PROSE.read_text(), add_special_tokens=False).ids[:TEXT_TOKENS]
    expected = prompt_logprobs(card, on_cpu, tokens)

    found = prompt_logprobs(card, on_device(card, dtype), tokens)

    errors = torch.tensor(
        [
            abs(logprob - mine[token])
            for mine, theirs in zip(found, expected, strict=True)
            for token, logprob in theirs.items()
            if token in mine
        ]
    )
    assert len(errors) > 18 * (TEXT_TOKENS - 1), "the likeliest tokens are others"
    assert float(errors.mean()) < MEAN_ERROR_MAX[dtype], (errors.mean(), errors.max())
    assert float(errors.max()) < WORST_ERROR_MAX[dtype], (errors.mean(), errors.max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_greedy_tokens_on_a_shared_prefix_agree_with_the_cpu(
    dtype: torch.dtype, card: ModelCard, tokenizer: Tokenizer, on_cpu: CpuRunner
) -> None:
    """Under graphs, batched, first cold and then cached. Each token of the device is the CPU's
    for the same prefix, or as likely within the tolerance."""
    prompts = [
        tokenizer.encode(f"{SYSTEM}<|im_start|>user\n{q}<|im_end|>\n<|im_start|>assistant\n").ids
        for q in QUESTIONS
    ]
    answers = Answers(card, on_device(card, dtype), 2)

    for turn in range(2):
        answers.run(
            *(
                Request(f"{turn}.{i}", tuple(p), 32, CacheGrant(b"x"), Sampling(temperature=0))
                for i, p in enumerate(prompts)
            )
        )

    for name, written in answers.written.items():
        prompt, drawn = prompts[int(name[2:])], [token.token_id for token in written]
        assert len(drawn) == 32
        known = prompt_logprobs(card, on_cpu, prompt + drawn)[len(prompt) - 1 :]
        for token, likely in zip(drawn, known, strict=True):
            assert max(likely.values()) - likely[token] < WORST_ERROR_MAX[dtype] / 2
    assert min(answers.cached[f"1.{i}"] for i in range(3)) >= 16
