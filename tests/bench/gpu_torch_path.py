"""Models without kernels of their own on a GPU: python -m tests.bench.gpu_torch_path [--json FILE]

DeepSeek-V2-Lite's shape (latent attention, experts) and gpt-oss-20b's (experts) run in torch, step
by step. Random weights in bf16, built as the server builds them; prompts of 2,048 shared tokens and
64 of their own, 32 tokens out, greedy, 1 and 32 at once. `hits`: cached tokens of a warm run over
its prompts' tokens but the last ones. The floor of a step is all weights but the embedding, and the
keys, over the copy rate: with 32 rows nearly every expert is chosen by one of them.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from engine.api import CacheGrant, Finished, Request, Sampling, Tokens
from engine.cache import PrefixCache
from engine.config import EngineConfig
from engine.core.core import Core
from engine.model_store import Architecture, ModelCard
from engine.model_store.families import architecture_of
from engine.runner.gpu_build import build_gpu_runner
from engine.weights import expected_shapes
from tests.bench.gpu_workloads import BLOCK, Workload, copy_rate, print_line

OUTPUT = 32
V2_LITE = architecture_of(
    {
        "model_type": "deepseek_v2", "num_hidden_layers": 27, "hidden_size": 2048,
        "intermediate_size": 10_944, "num_attention_heads": 16, "num_key_value_heads": 16,
        "vocab_size": 102_400, "max_position_embeddings": 8192, "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0, "hidden_act": "silu", "tie_word_embeddings": False,
        "kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
        "v_head_dim": 128, "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6,
        "moe_intermediate_size": 1408, "first_k_dense_replace": 1, "routed_scaling_factor": 1.0,
        "topk_method": "greedy", "norm_topk_prob": False,
    }
)  # fmt: skip
GPT_OSS_20B = architecture_of(
    {
        "model_type": "gpt_oss", "num_hidden_layers": 24, "hidden_size": 2880,
        "intermediate_size": 2880, "num_attention_heads": 64, "num_key_value_heads": 8,
        "head_dim": 64, "vocab_size": 201_088, "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5, "rope_theta": 150_000.0, "sliding_window": 128,
        "num_local_experts": 32, "num_experts_per_tok": 4, "hidden_act": "silu",
        "tie_word_embeddings": False, "attention_bias": True,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
    }
)  # fmt: skip
SHAPES = {"V2-Lite": V2_LITE, "gpt-oss-20b": GPT_OSS_20B}


class TorchPathBench:
    """A core over a model that the server would run in torch on the GPU."""

    def __init__(self, name: str, config: Architecture) -> None:
        card = ModelCard(
            name=name, digest="random-0", config=config, source="random:0", folder="",
            template_digest="none", stop_token_ids=(), special_token_ids=(),
        )  # fmt: skip
        settings = EngineConfig(
            device="cuda", kv_blocks=4096, step_tokens_max=2048, prefill_chunk_tokens_max=2048
        )
        began_s = time.perf_counter()
        built = build_gpu_runner(card, settings)
        self.built_s = time.perf_counter() - began_s
        sizes = {name: math.prod(shape) for name, shape in expected_shapes(config).items()}
        self.weight_bytes = 2 * (sum(sizes.values()) - sizes["model.embed_tokens.weight"])
        self.token_bytes = built.kv_format.block_bytes // BLOCK
        cache = PrefixCache(blocks=built.blocks, block_size=BLOCK, windows=built.kv_format.windows)
        self.core = Core(
            cache, built.runner, settings.for_device(built.device), time.perf_counter,
            vocab_size=config.vocab, context_tokens=built.context,
            pipeline_depth=built.pipeline_depth,
        )  # fmt: skip

    def run(self, prompts: list[tuple[int, ...]]) -> dict[str, Any]:
        """Answer all prompts at once; return times, and the tokens that were cached."""
        began_s = time.perf_counter()
        for index, tokens in enumerate(prompts):
            grant = CacheGrant(b"%d" % len(prompts))
            self.core.submit(Request(f"{index}", tokens, OUTPUT, grant, Sampling(temperature=0)))
        first_s, cached = 0.0, 0
        steps: list[float] = []
        while self.core.has_work():
            step_s = time.perf_counter()
            events = self.core.step()
            now_s = time.perf_counter()
            drawn = sum(isinstance(event, Tokens) for event in events)
            if drawn and not first_s:
                first_s = now_s - began_s
            elif drawn == len(prompts):
                steps.append(now_s - step_s)
            for event in events:
                if isinstance(event, Finished):
                    assert event.ending == "done", event
                    cached += event.usage.cached_tokens
        wall_s = time.perf_counter() - began_s
        return {
            "first_ms": round(first_s * 1e3, 1),
            "step_ms": round(statistics.median(steps) * 1e3, 2),
            "tok_s": round(len(prompts) * OUTPUT / wall_s),
            "cached": cached,
        }

    def measure(self, rows: int, rate: float) -> dict[str, Any]:
        """Run `rows` prompts cold, then warm; return both with the floor of a step."""
        prompts = Workload("", rows, ((1, 2048), (rows, 64))).prompts(rows)
        prompts = [tuple(token % 100_000 for token in prompt) for prompt in prompts]
        cold, warm = self.run(prompts), self.run(prompts)
        keys = 2048 + rows * (64 + OUTPUT // 2)
        floor_s = (self.weight_bytes + keys * self.token_bytes) / rate
        shared = rows * (2112 - 1)
        return {
            "rows": rows, "floor_ms": round(floor_s * 1e3, 2), "cold": cold, "warm": warm,
            "hits": round(warm["cached"] / shared, 4),
        }  # fmt: skip


def main() -> None:
    """Print one JSON line per model and batch."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--models", default=",".join(SHAPES), help="with commas")
    options = parser.parse_args()
    rate = copy_rate()
    print_line(f"{torch.cuda.get_device_name()}, copy {rate / 1e9:.0f} GB/s")
    results: list[dict[str, Any]] = []
    for name in options.models.split(","):
        bench = TorchPathBench(name, SHAPES[name])
        sizes = {"weights_gb": round(bench.weight_bytes / 1e9, 1), "token_bytes": bench.token_bytes}
        for rows in (1, 32):
            found = bench.measure(rows, rate)
            results.append({"model": name, "built_s": round(bench.built_s, 1), **sizes, **found})
            print_line(json.dumps(results[-1]))
        del bench
        torch.cuda.empty_cache()
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
