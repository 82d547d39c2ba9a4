"""The names of a model's tensors in published files, and how the tensors are laid out there.

Loaded weights have one set of names, Llama's, extended by the parts that Llama lacks. A family's
table says which of them a tensor of a Hugging Face folder or a GGUF file holds, and in which form.
`engine.weights` reads by these tables. It knows no tensor.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

Form = Literal["rows", "experts", "in_turns", "in_turns_transposed", "transposed", "by_head"]


class Source(Struct, frozen=True):
    """The parts that a tensor of a file holds.

    `rows`: parts below each other, in order; one part is the tensor itself. `experts`: parts below
    each other in each expert. `in_turns`: [experts, outputs, ...], whose outputs alternate between
    the parts; `in_turns_transposed`: the same of [experts, inputs, outputs]. `transposed`: [experts
    or heads, inputs, outputs] of one part. `by_head`: the parts of each head below each other.
    """

    parts: tuple[str, ...]
    form: Form = "rows"


Names = dict[str, Source]
"""Tables by a name's end behind the layer's number, without `.weight` or `.bias` where it has one.
`*` is an expert's number: such a tensor is one expert of a stack. `_blocks` means a matrix in
MXFP4, with its scales in a tensor beside."""


def one(part: str, form: Form = "rows") -> Source:
    """Return the source of a tensor that holds one part."""
    return Source((part,), form)


QKV = Source(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"))
GATE_UP = Source(("mlp.gate_proj", "mlp.up_proj"))
EXPERTS_GATE_UP = ("mlp.experts.gate_proj", "mlp.experts.up_proj")
KV_B = ("self_attn.k_b_proj", "self_attn.v_b_proj")

FOLDER_NAMES: Names = {
    "self_attn.qkv_proj": QKV,
    "mlp.gate_up_proj": GATE_UP,
    "self_attn.kv_b_proj": Source(KV_B, "by_head"),
    **{f"mlp.experts.*.{n}_proj": one(f"mlp.experts.{n}_proj") for n in ("gate", "up", "down")},
    "mlp.experts.gate_up_proj": Source(EXPERTS_GATE_UP, "experts"),
    **{f"mlp.shared_experts.{n}_proj": one(f"mlp.shared_expert.{n}_proj")
       for n in ("gate", "up", "down")},
}  # fmt: skip
"""Names of Hugging Face folders that differ from the loaded ones, in every family."""

MIXTRAL_NAMES: Names = {
    "block_sparse_moe.gate": one("mlp.gate"),
    "block_sparse_moe.experts.*.w1": one("mlp.experts.gate_proj"),
    "block_sparse_moe.experts.*.w3": one("mlp.experts.up_proj"),
    "block_sparse_moe.experts.*.w2": one("mlp.experts.down_proj"),
}
GPT_OSS_NAMES: Names = {
    "mlp.router": one("mlp.gate"),
    "mlp.experts.gate_up_proj": Source(EXPERTS_GATE_UP, "in_turns_transposed"),
    "mlp.experts.gate_up_proj_bias": Source(
        ("mlp.experts.gate_proj.bias", "mlp.experts.up_proj.bias"), "in_turns"
    ),
    "mlp.experts.gate_up_proj_blocks": Source(EXPERTS_GATE_UP, "in_turns"),
    "mlp.experts.down_proj": one("mlp.experts.down_proj", "transposed"),
    "mlp.experts.down_proj_bias": one("mlp.experts.down_proj.bias"),
    "mlp.experts.down_proj_blocks": one("mlp.experts.down_proj"),
}
SANDWICH_NAMES: Names = {
    "post_attention_layernorm": one("attention_output_layernorm"),
    "pre_feedforward_layernorm": one("post_attention_layernorm"),
    "post_feedforward_layernorm": one("mlp_output_layernorm"),
}
"""Norms of Gemma 2 and 3, and of OLMo 2 and 3, which have no norm before the MLP."""
GLM4_NAMES: Names = {
    "post_self_attn_layernorm": one("attention_output_layernorm"),
    "post_mlp_layernorm": one("mlp_output_layernorm"),
}

GGUF_NAMES: Names = {
    "attn_norm": one("input_layernorm"),
    "ffn_norm": one("post_attention_layernorm"),
    "post_attention_norm": one("attention_output_layernorm"),
    "post_ffw_norm": one("mlp_output_layernorm"),
    "attn_q": one("self_attn.q_proj"),
    "attn_k": one("self_attn.k_proj"),
    "attn_v": one("self_attn.v_proj"),
    "attn_qkv": QKV,
    "attn_output": one("self_attn.o_proj"),
    "attn_q_norm": one("self_attn.q_norm"),
    "attn_k_norm": one("self_attn.k_norm"),
    "attn_sinks": one("self_attn.sinks"),
    "attn_q_a": one("self_attn.q_a_proj"),
    "attn_q_a_norm": one("self_attn.q_a_layernorm"),
    "attn_q_b": one("self_attn.q_b_proj"),
    "attn_kv_a_mqa": one("self_attn.kv_a_proj_with_mqa"),
    "attn_kv_a_norm": one("self_attn.kv_a_layernorm"),
    "attn_kv_b": Source(KV_B, "by_head"),
    "attn_k_b": one("self_attn.k_b_proj", "transposed"),
    "attn_v_b": one("self_attn.v_b_proj"),
    "ffn_gate": one("mlp.gate_proj"),
    "ffn_up": one("mlp.up_proj"),
    "ffn_down": one("mlp.down_proj"),
    "ffn_gate_inp": one("mlp.gate"),
    "exp_probs_b": one("mlp.gate.e_score_correction_bias"),
    "ffn_gate_exps": one("mlp.experts.gate_proj"),
    "ffn_up_exps": one("mlp.experts.up_proj"),
    "ffn_down_exps": one("mlp.experts.down_proj"),
    "ffn_gate_up_exps": Source(EXPERTS_GATE_UP, "experts"),
    "ffn_gate_shexp": one("mlp.shared_expert.gate_proj"),
    "ffn_up_shexp": one("mlp.shared_expert.up_proj"),
    "ffn_down_shexp": one("mlp.shared_expert.down_proj"),
    "ffn_gate_inp_shexp": one("mlp.shared_expert_gate"),
}
"""Names of GGUF files, behind `blk.N.`."""

GGUF_FUSED_NAMES: Names = {"ffn_up": GATE_UP}
"""Phi-3 and GLM-4: gate and up in one tensor."""
GGUF_NORM_NAMES: Names = {"post_attention_norm": one("post_attention_layernorm")}
"""gpt-oss and GLM-4.5: this norm comes before the MLP."""
