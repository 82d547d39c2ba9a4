"""Writes a model that follows a script, so that agents run their real loops in seconds.

It calls the first tool that it knows, twice, and then answers. Its weights are zero but for a table
from one token to the next: the chat template, which sees the tools and how many results there are,
ends the prompt with a cue, and the table leads from the cue to a reply, one token long, and from
the reply to the end. The tokenizer is that of the default model, so the prompts have the lengths
that they have there; the context is long enough for any agent.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from engine.model_store import ModelCard

COMMAND = "echo trunkline-probe"
ANSWER = "All done. The probe printed trunkline-probe."
CALLS: Mapping[str, Mapping[str, object]] = {
    "Bash": {"command": COMMAND, "description": "Probe"},  # Claude Code
    "ToolSearch": {"query": "select:WebFetch", "max_results": 5},
    "bash": {"command": COMMAND, "description": "Probe"},  # opencode
    "exec_command": {"cmd": COMMAND},  # Codex
    "shell_command": {"command": COMMAND},
    "shell": {"command": ["bash", "-lc", COMMAND]},
    "get_weather": {"city": "Paris"},  # the programs' own tool
}
"""The tools that the model knows: what it calls each with."""
CALLS_PER_TURN = 2
CONTEXT_TOKENS = 262_144
HIDDEN, HEAD, MLP = 64, 32, 64
CERTAIN = 50.0
"""A logit that no other reaches."""
OTHER = HIDDEN - 1
"""The channel of every token without an entry in the table; it leads to the end."""

TEMPLATE = """
{%- set tools = tools if tools is defined and tools else [] -%}
{%- set ns = namespace(cue='', results=0) -%}
{%- if messages[0].role == 'system' or tools -%}
  {{- '<|im_start|>system\\n' -}}
  {%- if messages[0].role == 'system' -%}{{- messages[0].content -}}{%- endif -%}
  {%- if tools -%}
    {{- '\\n\\n<tools>' -}}
    {%- for tool in tools -%}
      {{- '\\n' -}}{{- tool | tojson -}}
      {%- if not ns.cue and tool.function.name in CALLS -%}
        {%- set ns.cue = '<|call ' + tool.function.name + '|>' -%}
      {%- endif -%}
    {%- endfor -%}
    {{- '\\n</tools>' -}}
  {%- endif -%}
  {{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
  {%- if message.role == 'system' and loop.first -%}
  {%- elif message.role == 'tool' -%}
    {%- set ns.results = ns.results + 1 -%}
    {{- '<|im_start|>user\\n<tool_response>\\n' + message.content -}}
    {{- '\\n</tool_response><|im_end|>\\n' -}}
  {%- elif message.role == 'assistant' -%}
    {{- '<|im_start|>assistant\\n' -}}
    {%- if message.content -%}{{- message.content -}}{%- endif -%}
    {%- if not message.tool_calls -%}{%- set ns.results = 0 -%}{%- endif -%}
    {%- for call in message.tool_calls or [] -%}
      {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' -}}
      {{- call.function.arguments | tojson -}}
      {{- '}\\n</tool_call>' -}}
    {%- endfor -%}
    {{- '<|im_end|>\\n' -}}
  {%- else -%}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|im_start|>assistant\\n' -}}
  {{- ns.cue if ns.cue and ns.results < CALLS_PER_TURN else '<|answer|>' -}}
{%- endif -%}
"""


def write_scripted_model(card: ModelCard, folder: Path) -> Path:
    """Write the model as a Hugging Face folder and return the folder. `card`: of the model whose
    tokenizer it takes."""
    tokenizer: dict[str, Any] = json.loads(card.tokenizer_path.read_text())
    known = {one["content"]: one["id"] for one in tokenizer["added_tokens"]}
    end = known["<|im_end|>"]
    script = {"<|answer|>": ANSWER}
    for name, arguments in CALLS.items():
        call = json.dumps({"name": name, "arguments": arguments})
        script[f"<|call {name}|>"] = f"<tool_call>\n{call}\n</tool_call>"
    following: dict[int, int] = {}
    first = card.config.vocab
    for number, (cue, reply) in enumerate(script.items()):
        cue_id, reply_id = first + 2 * number, first + 2 * number + 1
        tokenizer["added_tokens"] += [
            _added(cue_id, cue, is_special=True),
            _added(reply_id, reply, is_special=False),
        ]
        following |= {cue_id: reply_id, reply_id: end}
    vocab = first + 2 * len(script)
    vocab += -vocab % 32
    template = TEMPLATE.replace("CALLS_PER_TURN", str(CALLS_PER_TURN))
    documents = {
        "config.json": _config(vocab, end),
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": {
            "add_bos_token": False,
            "chat_template": template.replace("in CALLS", f"in {list(CALLS)}"),
        },
        "generation_config.json": {"eos_token_id": end},
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, document in documents.items():
        (folder / name).write_text(json.dumps(document))
    save_file(_weights(vocab, following, end), folder / "model.safetensors")
    return folder


def _added(token_id: int, text: str, *, is_special: bool) -> dict[str, object]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token_id, "content": text, "special": is_special, **flags}


def _config(vocab: int, end: int) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": HIDDEN,
        "intermediate_size": MLP,
        "num_attention_heads": HIDDEN // HEAD,
        "num_key_value_heads": 1,
        "head_dim": HEAD,
        "vocab_size": vocab,
        "max_position_embeddings": CONTEXT_TOKENS,
        "rope_theta": 10_000.0,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_act": "silu",
        "bos_token_id": end,
        "eos_token_id": end,
    }


def _weights(vocab: int, following: Mapping[int, int], end: int) -> dict[str, torch.Tensor]:
    """Return weights under which each token of the table has a channel of its own, and the layer
    adds nothing to it."""
    assert len(following) < HIDDEN, "each token of the table has a channel"
    embed, head = torch.zeros(vocab, HIDDEN), torch.zeros(vocab, HIDDEN)
    embed[:, OTHER], head[end, OTHER] = 1.0, CERTAIN
    for channel, (token, reply) in enumerate(following.items()):
        embed[token] = 0.0
        embed[token, channel] = 1.0
        head[reply, channel] = CERTAIN
    sizes = {
        "self_attn.q_proj": (HIDDEN, HIDDEN),
        "self_attn.k_proj": (HEAD, HIDDEN),
        "self_attn.v_proj": (HEAD, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HIDDEN),
        "mlp.gate_proj": (MLP, HIDDEN),
        "mlp.up_proj": (MLP, HIDDEN),
        "mlp.down_proj": (HIDDEN, MLP),
    }
    layer = "model.layers.0"
    return {
        "model.embed_tokens.weight": embed,
        "lm_head.weight": head,
        "model.norm.weight": torch.ones(HIDDEN),
        **{f"{layer}.{name}.weight": torch.zeros(size) for name, size in sizes.items()},
        f"{layer}.input_layernorm.weight": torch.ones(HIDDEN),
        f"{layer}.post_attention_layernorm.weight": torch.ones(HIDDEN),
    }
