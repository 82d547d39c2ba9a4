"""An engine over the GPU runner of a small random model, on one lane or on several.

Without a GPU the kernels run in Triton's interpreter, and no graphs are captured.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from msgspec import structs

from engine.api import (
    CacheGrant,
    Finished,
    Grammar,
    PromptLogprobs,
    Request,
    SampledToken,
    Sampling,
    Started,
    Tokens,
)
from engine.attention.batch import make_batch
from engine.attention.torch_backend import TorchAttention
from engine.cache import PrefixCache
from engine.config import EngineConfig, LevelsConfig
from engine.core.constraints import Constraints
from engine.core.core import Core
from engine.kv.format import kv_format
from engine.kv.storage import KvStorage
from engine.lanes.sharding import sharing
from engine.model_store import Architecture, Layer, Rope
from engine.model_store.architecture import Delta, Latent, Mamba, Moe
from engine.models.decoder import DecoderModel
from engine.models.layers import TorchOps
from engine.plan import BegunSequence, Row, StepPlan
from engine.runner.gpu_build import assemble
from engine.runner.warmup import WarmupLimits
from engine.server.levels_below import build_levels
from engine.states.sequence_states import SequenceStates
from engine.weights import Tensors, random_weights
from kernels.reference_weights import as_dense
from tests.fakes import FakeClock
from tests.grammars import PolledGrammars, characters
from tests.unit.engine.models.dense_llama import dense_logits

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
VOCAB, CONTEXT = 64, 256
OUTPUT = 3
HEADS = {"mha": (2, 2), "gqa": (4, 2), "mqa": (2, 1)}
GREEDY = Sampling(temperature=0)
ERROR_MAX = 1e-3 if DEVICE.type == "cpu" else 5e-3
"""Largest error of a logprob; on a GPU fp32 attention multiplies in tf32."""


IN_INTERPRETER = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.usefixtures("many_heads_per_merge"),
]
"""Vectors of a tile without a row compute with old memory, which makes the interpreter's numpy
warn."""


def config_of(heads: int, kv_heads: int, head_dim: int = 16) -> Architecture:
    return Architecture(
        family="llama", layers=(Layer(),), hidden=32, intermediate=48, heads=heads,
        kv_heads=kv_heads, head_dim=head_dim, vocab=VOCAB, context=CONTEXT,
        ropes={"full": Rope(10_000.0, head_dim)},
    )  # fmt: skip


def devices_of(lanes: int) -> list[torch.device]:
    """Return a device for each lane; skips the test where there are too few GPUs."""
    if DEVICE.type == "cpu" or lanes == 1:
        return [DEVICE] * lanes
    if torch.cuda.device_count() < lanes:
        pytest.skip(f"{torch.cuda.device_count()} GPUs here; {lanes} lanes need as many")
    return [torch.device("cuda", number) for number in range(lanes)]


class Engine:
    """A core over a GPU runner of a small random model, on so many lanes: on a CPU all lanes are
    there, otherwise each has a GPU."""

    def __init__(
        self, depth: int = 1, heads: tuple[int, int] = (4, 2), blocks: int = 48, seats: int = 8,
        *, dtype: torch.dtype = torch.float32, head_dim: int = 16, step_tokens: int = 64,
        graphs: bool = True, config: Architecture | None = None,
        kv_dtype: torch.dtype | None = None, lanes: int = 1, levels: LevelsConfig | None = None,
    ) -> None:  # fmt: skip
        self.config = config or config_of(*heads, head_dim)
        self.weights = random_weights(self.config, dtype, 0, DEVICE)
        for name, tensor in self.weights.items():
            if name.endswith(("bias", "sinks")):
                tensor.copy_(torch.linspace(-1, 1, tensor.numel()))
        share, devices = sharing(self.config, lanes), devices_of(lanes)
        weights = self.weights.items()
        shares = [
            {name: as_dense(share(name, one, lane), dtype).to(device) for name, one in weights}
            for lane, device in enumerate(devices)
        ]
        layout = kv_format(self.config, kv_dtype or dtype, 16, has_groups=True, lanes=lanes)
        self.runner, pool = assemble(
            self.config, shares, layout, blocks, devices, context=CONTEXT, seats=seats,
            tokens_max=step_tokens + 64, dtype=dtype, graphs=graphs,
        )  # fmt: skip
        self.kv = pool.shards[0]
        self.limits = WarmupLimits(
            block_size=16, blocks=blocks, context=CONTEXT, sequences=6, step_tokens=step_tokens,
            vocab=VOCAB, kv_groups=layout.blocks_per_run,
        )  # fmt: skip
        settings = EngineConfig(
            step_tokens_max=step_tokens, prefill_chunk_tokens_max=step_tokens * 5 // 8,
            sequences_max=6, levels=levels or LevelsConfig(),
        )  # fmt: skip
        cache = PrefixCache(
            blocks=blocks, block_size=16, windows=layout.windows,
            state_blocks=self.runner.state_blocks,
        )  # fmt: skip
        self.levels, off = build_levels(cache, settings, pool)
        assert not off, off
        self.core = Core(
            cache, self.runner, settings, FakeClock(), levels=self.levels,
            vocab_size=VOCAB, context_tokens=CONTEXT, pipeline_depth=depth,
            run_up=self.config.run_up,
            constraints=Constraints(PolledGrammars(vocabulary=characters(VOCAB))),
        )  # fmt: skip
        self.drawn: dict[tuple[str, int], list[SampledToken]] = {}
        self.started: dict[str, Started] = {}
        self.finished: dict[str, Finished] = {}
        self.prompt_logprobs: dict[str, list[SampledToken | None]] = {}

    def run(self, *requests: Request) -> None:
        """Run all requests to their end, then check the cache's invariants."""
        for request in requests:
            self.core.submit(request)
        while self.core.has_work():
            self.step()
        self.core.cache.check()

    def settle(self) -> None:
        """Run turns until nothing moves between the levels."""
        while self.levels is not None and self.levels.is_busy:
            self.step()

    def step(self) -> None:
        """Run one step, and keep what it reports."""
        for event in self.core.step():
            if isinstance(event, Tokens):
                self.drawn.setdefault((event.request_id, event.index), []).extend(event.tokens)
            if isinstance(event, Started):
                self.started[event.request_id] = event
            if isinstance(event, Finished):
                self.finished[event.request_id] = event
            if isinstance(event, PromptLogprobs):
                self.prompt_logprobs.setdefault(event.request_id, []).extend(event.tokens)

    def output(self, request_id: str, index: int = 0) -> list[int]:
        return [token.token_id for token in self.drawn[request_id, index]]

    def logprobs(self, tokens: list[int]) -> torch.Tensor:
        if self.config.family != "llama":
            return torch_logits(self.config, self.weights, tokens).log_softmax(-1)
        return dense_logits(self.config, self.weights, tokens).log_softmax(-1)

    def check_logprobs(self, request_id: str, prompt: tuple[int, ...]) -> torch.Tensor:
        """Compare each token's logprob with recomputation; return the logprobs of all tokens."""
        known = self.logprobs([*prompt, *self.output(request_id)])
        for at, token in enumerate(self.drawn[request_id, 0], start=len(prompt) - 1):
            expected = float(known[at, token.token_id])
            assert token.logprob == pytest.approx(expected, abs=ERROR_MAX), (request_id, at)
        return known

    def expected(self, prompt: tuple[int, ...], count: int = OUTPUT) -> list[int]:
        """Return greedy output, with the whole sequence recomputed for every token."""
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(self.logprobs(tokens)[-1].argmax()))
        return tokens[len(prompt) :]


def torch_logits(
    config: Architecture, weights: Tensors, tokens: list[int],
    kv_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:  # fmt: skip
    """Return the logits of every position by the torch twin, in one piece."""
    kv = KvStorage(kv_format(config, kv_dtype, 16), CONTEXT // 16, DEVICE)
    attention = TorchAttention(config, kv, CONTEXT)
    states = None
    begun = (BegunSequence(0, GREEDY, tokens, len(tokens)),)
    row = Row(0, 0, len(tokens), list(range(CONTEXT // 16)), 0, tokens)
    plan = StepPlan(0, (row,), begun=begun)
    if config.recurrent_layers:
        dtype = next(w for n, w in weights.items() if n.endswith("proj.weight")).dtype
        states = SequenceStates(config, dtype, DEVICE)
        states.begin(plan)
    model = DecoderModel(config, dict(weights), TorchOps(), states)
    batch = make_batch(plan, 16, lambda _: 0)
    with torch.inference_mode():
        attention.begin(plan, batch)
        return model.logits(model.forward(batch.token_ids.to(DEVICE), attention))


def tokens_of(seed: int, count: int) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(VOCAB) for _ in range(count))


def request(
    request_id: str, prompt: tuple[int, ...], sampling: Sampling = GREEDY, *,
    count: int = OUTPUT, samples: int = 1, prompt_logprobs: int | None = None,
    grammar: Grammar | None = None,
) -> Request:  # fmt: skip
    return Request(
        request_id, prompt, count, CacheGrant(b"x"), sampling, samples=samples,
        prompt_logprobs=prompt_logprobs, grammar=grammar,
    )  # fmt: skip


def family(name: str, *layers: Layer, head_dim: int = 16, **features: Any) -> Architecture:
    """Return the shape of a small model with the features of a family."""
    ropes = {"full": Rope(10_000.0, head_dim), "local": Rope(100.0, head_dim)}
    plain = config_of(4, 2, head_dim)
    return structs.replace(plain, family=name, layers=layers, ropes=ropes, **features)


FAMILIES = {
    "gemma3": family(
        "gemma3", Layer(window=20, rope="local"), Layer(window=20, rope="local"), Layer(),
        head_dim=24, place="sandwich", qk_norm="head", activation="gelu_tanh", embed_scale=5.6,
        score_scale=0.3),
    "gemma2": family(
        "gemma2", Layer(window=40), Layer(), place="sandwich", activation="gelu_tanh",
        score_cap=2.0, logit_cap=5.0),
    "attention of gpt-oss": family(
        "gpt_oss", Layer(window=24), Layer(), sinks=True, qkv_bias=True, output_bias=True),
    "windows as masks": family("mistral", Layer(window=24), Layer(window=40)),
    "cohere2": family(
        "cohere2", Layer(window=24), Layer(rope=""), place="parallel", norm="mean"),
    "granite": family("granite", Layer(), residual_scale=0.5, score_scale=0.1, embed_scale=3.0),
    "olmo2": family("olmo2", Layer(), place="post", qk_norm="whole"),
    "ministral3": family("ministral3", Layer(), query_growth=(0.3, 10)),
    "qwen3_moe": family(
        "qwen3_moe", Layer(ffn="moe"), Layer(), qk_norm="head",
        moe=Moe(experts=4, top_k=2, intermediate=32)),
    "lfm2": family(
        "lfm2", Layer("conv"), Layer(), Layer("conv"), qk_norm="head", conv_width=3),
    "qwen3_next": family(
        "qwen3_next", Layer("delta"), Layer(), Layer("delta", ffn="moe"), qk_norm="head",
        conv_width=4, output_gate=True, delta=Delta(2, 4, 16, 24),
        moe=Moe(experts=4, top_k=2, intermediate=32, shared="gated", shared_intermediate=32)),
    "granite hybrid": family(
        "granitemoehybrid", Layer("mamba"), Layer(rope=""), Layer("mamba"), conv_width=4,
        conv_bias=True, residual_scale=0.5, mamba=Mamba(4, 16, 12, 2)),
    "deepseek_v3": structs.replace(
        config_of(4, 1, 48), family="deepseek_v3", ropes={"full": Rope(10_000.0, 16)},
        layers=(Layer(mixer="mla"), Layer(mixer="mla", ffn="moe")),
        latent=Latent(rank=32, nope=16, rope=16, value=24, query_rank=24), score_scale=0.2,
        moe=Moe(experts=4, top_k=2, intermediate=32, score="sigmoid", choose_by_bias=True,
                groups=2, groups_kept=1, shared="add", shared_intermediate=32)),
}  # fmt: skip
