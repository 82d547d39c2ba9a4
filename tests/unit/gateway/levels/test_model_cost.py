"""What a model costs, by its shape alone."""

from __future__ import annotations

import math
from typing import Any

import pytest

from engine.model_store.families import architecture_of
from engine.weights.shapes import expected_shapes
from gateway.levels.model_cost import weights_of

COMMON: dict[str, Any] = {
    "hidden_size": 2_048, "num_attention_heads": 16, "num_key_value_heads": 4, "vocab_size": 32_000,
    "num_hidden_layers": 6, "intermediate_size": 5_632, "max_position_embeddings": 8_192,
}  # fmt: skip
EXPERTS = {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 768}
LATENT = {
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "n_routed_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 1_408,
    "n_shared_experts": 2, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
    "num_key_value_heads": 16,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"head_dim": 128, "tie_word_embeddings": True},
    "qwen3_moe": EXPERTS,
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 5_632},
    "gpt_oss": {"num_local_experts": 32, "num_experts_per_tok": 4, "head_dim": 64},
    "deepseek_v2": {**LATENT, "q_lora_rank": None, "topk_method": "greedy"},
    "deepseek_v3": {**LATENT, "q_lora_rank": 768},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_those_of_the_tensors(family: str) -> None:
    """Norms and biases are left out: the sum is below that of all tensors, by less than 0.1 %."""
    shape = architecture_of({**COMMON, "model_type": family, **FAMILIES[family]})
    all_values = sum(math.prod(one) for one in expected_shapes(shape).values())

    assert 0.999 * all_values < weights_of(shape) <= all_values
