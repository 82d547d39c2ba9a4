"""Models with recurrent layers on a GPU: python -m tests.bench.gpu_hybrids [--json FILE]

    --parts kernels,tokens,layer,restore,step,prompt   what is measured
    --layers 20                                        of Qwen3.5-35B-A3B's 40
    --step-tokens 2048                                 of a prompt in a step, as engines have it
    --device cpu                                       tiny, with TRITON_INTERPRET=1

`kernels` compares each kernel with its twin in fp64 on new random inputs, at Qwen3.5-35B-A3B's and
Granite 4's shapes. `tokens` runs tiny hybrids through the core, cold and with cached prefixes, and
compares each token and its logprob with a whole recomputation in torch. `layer` times the kernels
of a layer alone, under a graph, against the bytes that they move. `restore` copies a whole state
from blocks. `step` decodes with random weights: its floor is the bytes of dense weights, of the
experts that so many rows choose by chance, of states, read and written, and of KV, over the copy
rate. `prompt` computes 8,192 tokens, and gives the rate of multiplications beside a dense model's.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace

from engine.api import CacheGrant, Finished, Request, SampledToken, Sampling, Tokens
from engine.attention.batch import make_batch
from engine.attention.torch_backend import TorchAttention
from engine.cache import PrefixCache
from engine.config import EngineConfig
from engine.core.core import Core
from engine.kv.format import kv_format
from engine.kv.storage import KvStorage
from engine.model_store import Architecture, Layer, Rope
from engine.model_store.architecture import Delta, Mamba, Moe
from engine.models.decoder import DecoderModel
from engine.models.layers import TorchOps
from engine.plan import BegunSequence, Row, StepPlan
from engine.runner.gpu_build import assemble
from engine.states.gpu_states import GpuStates
from engine.states.places import blocks_of_state
from engine.states.sequence_states import SequenceStates
from engine.weights import Tensors, random_weights
from kernels import reference
from kernels.gpu import tree_attention
from kernels.gpu.recurrent.convolution import convolve
from kernels.gpu.recurrent.delta import TOKEN_COLUMNS, TOKEN_WARPS, DeltaShape, delta
from kernels.gpu.recurrent.mamba2 import MambaShape, mamba2
from kernels.gpu.recurrent.states import gated_norm
from kernels.gpu.recurrent.step import StepRuns
from kernels.reference_convolution import short_convolution
from kernels.reference_delta import delta_inputs, gated_delta_chunk
from kernels.reference_mamba2 import mamba2_chunk, mamba2_inputs
from kernels.reference_weights import Packed
from tests.bench.device import copy_rate, describe, release_memory, time_graph, time_queued
from tests.bench.gpu_workloads import CoreBench
from tests.bench.models import BLOCK, LLAMA_8B, QWEN35_35B_A3B, packed_weights, with_layers
from tests.bench.results import Results, print_line
from tests.unit.kernels.gpu.recurrent_steps import runs_of

PARTS = ("kernels", "tokens", "layer", "restore", "step", "prompt")
GRANITE_TINY = MambaShape(heads=48, head_dim=64, state_dim=128, groups=1)
SEATS = 8
ERROR_MAX = 2e-2
"""Of a kernel in bf16: what is read is rounded, and so are a chunk's factors."""
LOGPROB_ERROR_MAX = 0.05
VARIANTS = ((16, 1), (16, 2), (32, 2), (32, 4), (64, 4), (128, 8))
"""Value channels and warps of a program in a run of one row."""
RUNS = 7
"""Of a prompt."""
SEATS_TIMED = 128
"""States that a graph goes through, so that none is found in the cache."""

TINY = Architecture(
    family="qwen3_next", layers=(Layer("delta"), Layer(), Layer("delta", ffn="moe")), hidden=64,
    intermediate=96, heads=4, kv_heads=2, head_dim=32, vocab=128, context=512,
    ropes={"full": Rope(10_000.0, 16)}, qk_norm="head", output_gate=True, conv_width=4,
    delta=Delta(2, 4, 16, 24),
    moe=Moe(experts=8, top_k=2, intermediate=32, shared="gated", shared_intermediate=32),
)  # fmt: skip
TINIES = {
    "qwen3_next": TINY,
    "lfm2": replace(
        TINY, family="lfm2", layers=(Layer("conv"), Layer(), Layer("conv")), conv_width=3,
        delta=None, moe=None, output_gate=False,
    ),
    "granite hybrid": replace(
        TINY, family="granitemoehybrid", layers=(Layer("mamba"), Layer(rope=""), Layer("mamba")),
        qk_norm="", conv_bias=True, delta=None, moe=None, output_gate=False,
        mamba=Mamba(8, 16, 12, 2),
    ),
    "nemotron h": replace(
        TINY, family="nemotron_h", qk_norm="", conv_bias=True, delta=None, moe=None,
        output_gate=False, mamba=Mamba(8, 16, 16, 2), place="single", activation="relu2",
        layers=tuple(Layer(m, rope="", ffn="none" if m != "none" else "dense")
                     for m in ("mamba", "none", "gqa", "mamba", "none")),
    ),
}  # fmt: skip


Case = tuple[
    torch.Tensor,
    Callable[[], torch.Tensor],
    Callable[[slice, torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
]
"""States of all seats, a launch over them, and the twin of a run from its state."""


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the relative error."""
    wide = expected.double()
    return float((found.double() - wide).norm() / wide.norm())


class Kernels:
    """The kernels of a layer beside their twins, on new random inputs."""

    def __init__(self, device: torch.device, delta_: DeltaShape, mamba: MambaShape) -> None:
        self.device, self.delta_shape, self.mamba_shape = device, delta_, mamba
        self.half = torch.bfloat16 if device.type == "cuda" else torch.float32

    def rand(self, *shape: int) -> torch.Tensor:
        """Return normal values in the model's dtype."""
        return torch.randn(*shape, device=self.device).to(self.half)

    def compare(self, counts: list[int]) -> dict[str, float]:
        """Return the errors of what is read and of the states, by kernel, of a step whose runs
        have so many rows."""
        seats = list(range(len(counts)))[::-1]
        runs = runs_of(seats, counts, SEATS, self.device, padding=3)
        ends = [sum(counts[: i + 1]) for i in range(len(counts))]
        parts = [(s, slice(e - c, e)) for s, c, e in zip(seats, counts, ends, strict=True)]
        found: dict[str, float] = {}
        for name, (states, run, twin) in {
            "convolution": self._convolution(ends[-1] + 3, runs),
            "delta": self._delta(ends[-1] + 3, runs),
            "mamba2": self._mamba(ends[-1] + 3, runs),
        }.items():
            expected = states.double()
            reads = []
            for seat, own in parts:
                read, expected[seat] = twin(own, states[seat].double())
                reads.append(read)
            out = run()
            found[name] = error(out[: ends[-1]], torch.cat(reads))
            found[f"{name} states"] = error(states, expected)
            assert not out[ends[-1] :].any(), f"{name}: padding rows read something"
        d, rows = self.delta_shape, ends[-1]
        read, gate = self.rand(rows, d.heads, d.value_dim), self.rand(rows, d.heads * d.value_dim)
        weight = self.rand(d.value_dim)
        found["gated norm"] = error(
            gated_norm(read, gate, weight, 1e-6, gate_first=False),
            reference.gated_norm(
                read.double(), gate.double(), weight.double(), 1e-6, gate_first=False
            ),
        )
        return {name: float(f"{one:.3g}") for name, one in found.items()}

    def _convolution(self, rows: int, runs: StepRuns) -> Case:
        d = self.delta_shape
        channels = 2 * d.key_heads * d.key_dim + d.heads * d.value_dim
        windows = self.rand(SEATS + 1, 3, channels)
        x, taps = self.rand(rows, channels), self.rand(channels, 4)
        wide, wide_taps = x.double(), taps.double()
        return (
            windows, lambda: convolve(x, windows, taps, None, runs),
            lambda own, state: short_convolution(wide[own], state, wide_taps, None),
        )  # fmt: skip

    def _delta(self, rows: int, runs: StepRuns) -> Case:
        d = self.delta_shape
        keys = d.key_heads * d.key_dim
        x = self.rand(rows, 2 * keys + d.heads * d.value_dim)
        beta, decay = torch.split(self.rand(rows, 2 * d.heads), d.heads, 1)
        rate, bias = torch.rand(2, d.heads, device=self.device)
        states = torch.randn(SEATS + 1, d.heads, d.key_dim, d.value_dim, device=self.device)
        q, k, v, fades, strengths = delta_inputs(
            x.double(), beta, decay, rate, bias, keys, d.key_dim
        )
        return (
            states, lambda: delta(x, beta, decay, rate, bias, states, runs, d),
            lambda own, state: gated_delta_chunk(
                q[own], k[own], v[own], fades[own], strengths[own], state
            ),
        )  # fmt: skip

    def _mamba(self, rows: int, runs: StepRuns) -> Case:
        m = self.mamba_shape
        inner = m.heads * m.head_dim
        mixed = self.rand(rows, inner + 2 * m.groups * m.state_dim)
        step = self.rand(rows, m.heads)
        rate, bias, through = torch.rand(3, m.heads, device=self.device)
        states = torch.randn(SEATS + 1, m.heads, m.head_dim, m.state_dim, device=self.device)
        given = mamba2_inputs(mixed.double(), step, rate, bias, inner, m.groups)

        def twin(own: slice, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            written, fade, b, c, plain = (one[own] for one in given)
            read, after = mamba2_chunk(written, fade, b, c, state)
            return read + plain * through.double()[:, None], after

        return (
            states, lambda: mamba2(mixed, step, rate, bias, through, states, runs, m), twin
        )  # fmt: skip

    def time(self, rows: int, rate: float) -> dict[str, Any]:
        """Return microseconds of the kernels of a decoding layer, and of the bytes they move."""
        d = self.delta_shape
        keys, values = d.key_heads * d.key_dim, d.heads * d.value_dim
        channels, size = 2 * keys + values, d.heads * d.key_dim * d.value_dim
        many = [
            runs_of(range(r * rows, (r + 1) * rows), [1] * rows, SEATS_TIMED, self.device)
            for r in range(SEATS_TIMED // rows)
        ]
        x, taps = self.rand(rows, channels), self.rand(channels, 4)
        gates, one = self.rand(rows, 2 * d.heads), torch.ones(d.heads, device=self.device)
        beta, decay = torch.split(gates, d.heads, 1)
        windows = self.rand(SEATS_TIMED + 1, 3, channels)
        states = torch.zeros(SEATS_TIMED + 1, d.heads, d.key_dim, d.value_dim, device=self.device)
        read, gate = self.rand(rows, d.heads, d.value_dim), self.rand(rows, values)
        weight = self.rand(d.value_dim)

        def us(run: Callable[[StepRuns], object]) -> float:
            def all_runs() -> None:
                for runs in many:
                    run(runs)

            return round(time_graph(all_runs)[0] / len(many), 2)

        def token(columns: int, warps: int) -> Callable[[StepRuns], object]:
            return lambda runs: delta(
                x, beta, decay, one, one, states, runs, d, columns=columns, warps=warps
            )

        variants = {f"{c}x{w}": us(token(c, w)) for c, w in VARIANTS}
        return {
            "rows": rows,
            "delta_us": variants[f"{TOKEN_COLUMNS}x{TOKEN_WARPS}"],
            "delta_floor_us": round(8 * size * rows / rate * 1e6, 2),
            "delta_variants_us": variants,
            "convolution_us": us(lambda runs: convolve(x, windows, taps, None, runs, silu=True)),
            "gated_norm_us": us(lambda _: gated_norm(read, gate, weight, 1e-6, gate_first=False)),
        }

    def time_prompt(self, tokens: int) -> dict[str, Any]:
        """Return microseconds of a layer's kernels for a prompt."""
        d, m = self.delta_shape, self.mamba_shape
        channels = 2 * d.key_heads * d.key_dim + d.heads * d.value_dim
        runs = runs_of([0], [tokens], SEATS, self.device)
        x, taps = self.rand(tokens, channels), self.rand(channels, 4)
        beta, decay = torch.split(self.rand(tokens, 2 * d.heads), d.heads, 1)
        one, ones = torch.ones(d.heads, device=self.device), torch.ones(m.heads, device=self.device)
        windows = self.rand(SEATS + 1, 3, channels)
        states = torch.zeros(SEATS + 1, d.heads, d.key_dim, d.value_dim, device=self.device)
        inner = m.heads * m.head_dim
        mixed = self.rand(tokens, inner + 2 * m.groups * m.state_dim)
        step = self.rand(tokens, m.heads)
        states_m = torch.zeros(SEATS + 1, m.heads, m.head_dim, m.state_dim, device=self.device)
        timed: dict[str, Callable[[], object]] = {
            "convolution": lambda: convolve(x, windows, taps, None, runs, silu=True),
            "delta": lambda: delta(x, beta, decay, one, one, states, runs, d),
            "mamba2": lambda: mamba2(mixed, step, ones, ones, ones, states_m, runs, m),
        }
        found: dict[str, Any] = {"prompt": tokens}
        for name, run in timed.items():
            found[f"{name}_us"] = round(time_graph(partial(_call, run))[0], 1)
        return found


def _call(run: Callable[[], object]) -> None:
    run()


class HybridBench(CoreBench):
    """A core over a model on a device, with random weights."""

    def __init__(
        self, config: Architecture, device: torch.device, rate: float, *, blocks: int,
        sequences: int, step_tokens: int, weights: Tensors | None = None,
    ) -> None:  # fmt: skip
        loaded: dict[str, Any] = dict(weights or packed_weights(config, "auto", device))
        self.config, self.copy_rate = config, rate
        self.expert_bytes = self.weight_bytes = 0
        for name, one in loaded.items():
            size = sum(p.nbytes for p in (one.parts if isinstance(one, Packed) else (one,)))
            if ".experts." in name:
                self.expert_bytes += size
            elif config.tie_embeddings or name != "model.embed_tokens.weight":
                self.weight_bytes += size
        dtype = torch.float32 if weights else torch.bfloat16
        form = kv_format(config, dtype, BLOCK, has_groups=True)
        self.token_bytes = form.block_bytes // BLOCK
        self.runner, _ = assemble(
            config, [loaded], form, blocks, [device], context=config.context,
            seats=sequences + 32, tokens_max=step_tokens + sequences + 32, dtype=dtype,
        )  # fmt: skip
        settings = EngineConfig(
            step_tokens_max=step_tokens, prefill_chunk_tokens_max=step_tokens,
            sequences_max=sequences, queue_tokens_max=10_000_000,
        )  # fmt: skip
        cache = PrefixCache(
            blocks=blocks, block_size=BLOCK, windows=form.windows,
            state_blocks=self.runner.state_blocks,
        )  # fmt: skip
        self.core = Core(
            cache, self.runner, settings, time.perf_counter, vocab_size=config.vocab,
            context_tokens=config.context, pipeline_depth=2, run_up=config.run_up,
        )  # fmt: skip

    def floor_ms(self, rows: int, context: int) -> float:
        """Return the milliseconds in which a decoding step's bytes are copied."""
        moved: float = self.weight_bytes + rows * context * self.token_bytes
        states = self.runner.states
        moved += 2 * rows * states.layout.bytes if states else 0
        if (moe := self.config.moe) is not None:
            share = 1 - (1 - moe.top_k / moe.experts) ** rows
            moved += share * self.expert_bytes
        return moved / self.copy_rate * 1e3

    def answers(
        self, prompts: list[list[int]], name: str, count: int
    ) -> tuple[list[list[SampledToken]], int]:
        """Return greedy answers with their logprobs, and the cached tokens of all prompts."""
        found: list[list[SampledToken]] = [[] for _ in prompts]
        cached = 0
        for number, tokens in enumerate(prompts):
            sampling = Sampling(temperature=0, logprobs=0)
            self.core.submit(
                Request(f"{name}/{number}", tuple(tokens), count, CacheGrant(b"t"), sampling)
            )
        while self.core.has_work():
            for event in self.core.step():
                if isinstance(event, Tokens):
                    found[int(event.request_id.rpartition("/")[2])] += event.tokens
                if isinstance(event, Finished):
                    assert event.ending == "done", event
                    cached += event.usage.cached_tokens
        return found, cached


def whole_logprobs(config: Architecture, weights: Tensors, tokens: list[int]) -> torch.Tensor:
    """Return the logprobs of every position by a whole recomputation in torch, [n, vocab]."""
    device = next(iter(weights.values())).device
    blocks = list(range(-(-len(tokens) // BLOCK)))
    kv = KvStorage(kv_format(config, torch.float32, BLOCK), len(blocks), device)
    attention, states = (
        TorchAttention(config, kv, config.context),
        SequenceStates(config, torch.float32, device),
    )
    begun = (BegunSequence(0, Sampling(), tokens, len(tokens)),)
    plan = StepPlan(0, (Row(0, 0, len(tokens), blocks, 0, tokens),), begun=begun)
    model = DecoderModel(config, dict(weights), TorchOps(), states)
    batch = make_batch(plan, BLOCK, lambda _: 0)
    with torch.inference_mode():
        states.begin(plan)
        attention.begin(plan, batch)
        logits = model.logits(model.forward(batch.token_ids.to(device), attention))
    return logits.float().log_softmax(-1)


def compare_tokens(name: str, device: torch.device) -> dict[str, Any]:
    """Run a tiny hybrid cold and with cached prefixes; compare with recomputation. Raises
    AssertionError where a token is not the likeliest within rounding."""
    config = TINIES[name]
    weights = random_weights(config, torch.float32, 0, device)
    bench = HybridBench(
        config, device, 1.0, blocks=200, sequences=8, step_tokens=64, weights=weights
    )
    chance = random.Random(time.time_ns())
    is_gpu = device.type == "cuda"
    shared = [chance.randrange(config.vocab) for _ in range(90 if is_gpu else 34)]
    tails, output = ((3, 9, 40, 1), 12) if is_gpu else ((3, 9), 2)
    prompts = [shared + [chance.randrange(config.vocab) for _ in range(n)] for n in tails]
    worst, equal, count, hits = 0.0, 0, 0, 0
    for again in range(2):
        found, hits = bench.answers(prompts, f"{again}", output)
        for prompt, answer in zip(prompts, found, strict=True):
            ids = [token.token_id for token in answer]
            known = whole_logprobs(config, weights, prompt + ids)[len(prompt) - 1 :]
            for at, token in enumerate(answer):
                assert token.logprob is not None
                best = float(known[at].max())
                worst = max(worst, abs(token.logprob - float(known[at, token.token_id])))
                worst = max(worst, best - float(known[at, token.token_id]))
                equal += int(known[at].argmax()) == token.token_id
                count += 1
    assert worst < LOGPROB_ERROR_MAX, worst
    assert hits > 0, "the second round found nothing in the cache"
    return {"tokens": name, "equal": equal, "of": count, "logprob_error": round(worst, 5),
            "cached": hits, "graphs": bench.runner.graph_count}  # fmt: skip


def restore(config: Architecture, device: torch.device) -> dict[str, Any]:
    """Return the time in which a whole state is copied from blocks, and what is copied wrong."""
    form = kv_format(config, torch.bfloat16, BLOCK, has_groups=True)
    states = GpuStates(config, torch.bfloat16, device, 2)
    count = blocks_of_state(states.layout, form.block_bytes)
    pool = torch.randint(0, 255, (2 * count, form.block_bytes), dtype=torch.uint8, device=device)
    states = GpuStates(config, torch.bfloat16, device, 2, pool)
    blocks = random.Random(1).sample(range(2 * count), count)
    states.restore([(1, blocks)])
    expected = pool[blocks].flatten()[: states.layout.bytes]
    assert torch.equal(states.data[1], expected), "a state came back changed"
    states.data[0] = states.data[1].flip(0)
    states.keep([(0, blocks)])
    assert torch.equal(pool[blocks].flatten()[: states.layout.bytes], states.data[0])
    figures: dict[str, Any] = {"state_mb": round(states.layout.bytes / 1e6, 1), "blocks": count}
    if device.type == "cuda":
        took_us = time_queued(lambda: states.restore([(1, blocks)]))
        figures["restore_us"] = round(took_us, 1)
    return figures


def steps(bench: HybridBench, rows: int, prompt: int, output: int) -> dict[str, Any]:
    """Return a decoding step's time beside its floor."""
    chance = random.Random(rows)
    vocab = bench.config.vocab
    prompts = [tuple(chance.randrange(vocab) for _ in range(prompt)) for _ in range(rows)]
    bench.run(prompts, b"cold-%d" % rows, min(8, output))
    step_ms = bench.run(prompts, b"warm-%d" % rows, output)["step_ms"]
    layers = len(bench.config.layers)
    floor_ms = bench.floor_ms(rows, prompt + output // 2)
    return {
        "step_rows": rows, "layers": layers, "step_ms": step_ms, "floor_ms": round(floor_ms, 3),
        "ratio": round(step_ms / floor_ms, 3), "aim_ms": round(1.25 * floor_ms + 0.035 * layers, 3),
    }  # fmt: skip


def active_weights(config: Architecture, bench: HybridBench) -> float:
    """Return the weights that multiply a token, but the head's, which one token of a prompt has."""
    head = config.vocab * config.hidden
    count = bench.weight_bytes / 2 - head
    if config.moe is not None:
        count += bench.expert_bytes / 2 * config.moe.top_k / config.moe.experts
    return count


def prompt_rate(bench: HybridBench, tokens: int) -> dict[str, Any]:
    """Return the milliseconds of a prompt, and the rate of its linear maps' operations."""
    chance = random.Random(8)
    ids = tuple(chance.randrange(bench.config.vocab) for _ in range(tokens))
    bench.run([ids[::-1]], b"first", 1)
    took_ms = [bench.run([ids], b"p%d" % i, 1)["first_token_ms"] for i in range(RUNS)]
    flops = 2 * active_weights(bench.config, bench) * tokens
    return {
        "prompt_of": bench.config.family, "tokens": tokens, "ms": sorted(took_ms),
        "tflop_s": float(f"{flops / statistics.median(took_ms) / 1e9:.4g}"),
    }  # fmt: skip


def main() -> None:
    """Print a line of JSON for each figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--step-tokens", type=int, default=EngineConfig().step_tokens_max)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    options = parser.parse_args()
    device, parts, results = torch.device(options.device), options.parts.split(","), Results()
    is_gpu = device.type == "cuda"
    rate = copy_rate() if is_gpu else 1e10
    print_line(describe(rate) if is_gpu else "CPU, in the interpreter")
    shape = with_layers(QWEN35_35B_A3B, options.layers) if is_gpu else TINIES["granite hybrid"]
    if not is_gpu:  # merging one head at a time takes minutes in the interpreter
        tree_attention.FEW_ROW_HEADS = 0
    with torch.inference_mode():
        by_layer(parts, device, rate, results)
    release_memory()
    for name in TINIES if "tokens" in parts else ():
        results.add(compare_tokens(name, device))
    if "step" in parts or "prompt" in parts:
        whole(parts, shape, device, rate, options.step_tokens, results)
    results.write(options.json)


def by_layer(parts: list[str], device: torch.device, rate: float, results: Results) -> None:
    """Compare and time single kernels."""
    is_gpu = device.type == "cuda"
    shape = QWEN35_35B_A3B if is_gpu else TINY
    d = shape.delta
    assert d is not None
    kernels = Kernels(
        device, DeltaShape(d.key_heads, d.value_heads, d.key_dim, d.value_dim),
        GRANITE_TINY if is_gpu else MambaShape(8, 16, 12, 2),
    )  # fmt: skip
    for counts in ([1], [1, 1, 1], [70], [1, 300, 2, 64]) if "kernels" in parts else ():
        errors = kernels.compare(counts)
        results.add({"rows": counts, "errors": errors})
        assert max(errors.values()) < ERROR_MAX, errors
    if "layer" in parts and is_gpu:
        for rows in (1, 8, 64):
            results.add({"layer": "delta", **kernels.time(rows, rate)})
        results.add(kernels.time_prompt(8192))
    if "restore" in parts:
        results.add(restore(shape, device))


def whole(
    parts: list[str], shape: Architecture, device: torch.device, rate: float, step_tokens: int,
    results: Results,
) -> None:  # fmt: skip
    """Time steps and prompts of a model, and a dense model's prompt."""
    is_gpu = device.type == "cuda"
    longest, sequences = (8192, 64) if is_gpu else (20, 2)
    make = partial(
        HybridBench, device=device, rate=rate, sequences=sequences,
        step_tokens=min(step_tokens, longest),
    )  # fmt: skip
    bench = make(shape, blocks=12_000 if is_gpu else 200)
    for rows in (1, sequences) if "step" in parts else ():
        results.add(steps(bench, rows, 448 if is_gpu else 4, 64 if is_gpu else 2))
    if "prompt" in parts:
        found = prompt_rate(bench, longest)
        results.add(found)
        del bench
        release_memory()
        dense = with_layers(LLAMA_8B, 8) if is_gpu else TINIES["lfm2"]
        known = prompt_rate(make(dense, blocks=4000), longest)
        results.add({**known, "share": round(found["tflop_s"] / known["tflop_s"], 3)})


if __name__ == "__main__":
    main()
