"""Tiny encoders for tests: seeded random BERTs of some kilobytes, as folders and as zip files.

The tokenizer is WordPiece over letters and a few words, so it takes any text. The vectors mean
nothing, and are equal for equal seeds.
"""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from engine.encoder.bert import expected_tensors
from engine.encoder.card import BertShape, EncoderCard, prepare_encoder

SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
WORDS = ("the", "cat", "sat", "hello", "world", "[", "]", "!", ".")
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"
VOCABULARY = (*SPECIALS, *WORDS, *LETTERS, *(f"##{letter}" for letter in LETTERS))
TOKENS_MAX = 24
SHAPE = BertShape(
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=48,
    vocab_size=len(VOCABULARY),
    max_position_embeddings=40,
)


def encoder_config(shape: BertShape = SHAPE) -> dict[str, Any]:
    """Return the content of config.json."""
    fields = {name: getattr(shape, name) for name in shape.__struct_fields__}
    return {"model_type": "bert", "architectures": ["BertModel"], "hidden_act": "gelu", **fields}


def encoder_tokenizer() -> dict[str, Any]:
    """Return the content of tokenizer.json, with padding and truncation, as such files have."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    ends = {
        word: {"id": word, "ids": [SPECIALS.index(word)], "tokens": [word]}
        for word in ("[CLS]", "[SEP]")
    }
    around: list[dict[str, Any]] = [
        {"SpecialToken": {"id": "[CLS]", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
        {"SpecialToken": {"id": "[SEP]", "type_id": 0}},
    ]
    return {
        "version": "1.0",
        "truncation": {
            "max_length": 8, "strategy": "LongestFirst", "stride": 0, "direction": "Right",
        },
        "padding": {
            "strategy": {"Fixed": 8}, "direction": "Right", "pad_to_multiple_of": None,
            "pad_id": 0, "pad_type_id": 0, "pad_token": "[PAD]",
        },
        "added_tokens": [
            {"id": i, "content": word, "special": True, **flags} for i, word in enumerate(SPECIALS)
        ],
        "normalizer": {
            "type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True,
            "strip_accents": None, "lowercase": True,
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": {
            "type": "TemplateProcessing", "single": around, "pair": around,
            "special_tokens": ends,
        },
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {
            "type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
            "vocab": {token: number for number, token in enumerate(VOCABULARY)},
        },
    }  # fmt: skip


def encoder_tensors(shape: BertShape = SHAPE, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return seeded random weights, and those of a pooler, which no vector depends on."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {**expected_tensors(shape), "pooler.dense.weight": (shape.hidden_size,) * 2}
    found = {}
    for name, size in shapes.items():
        scale = 0.5 if len(size) == 1 else size[-1] ** -0.5
        base = 1.0 if name.endswith("LayerNorm.weight") else 0.0
        found[name] = base + scale * torch.randn(size, generator=generator)
    return found


def write_encoder(folder: Path, *, seed: int = 0, **changed: Any) -> Path:
    """Write an encoder's folder as sentence-transformers saves it. `changed`: config fields."""
    (folder / "1_Pooling").mkdir(parents=True, exist_ok=True)
    files: dict[str, Any] = {
        "config.json": {**encoder_config(), **changed},
        "tokenizer.json": encoder_tokenizer(),
        "sentence_bert_config.json": {"max_seq_length": TOKENS_MAX},
        "1_Pooling/config.json": {
            "pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True,
        },
    }  # fmt: skip
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    save_file(encoder_tensors(seed=seed), folder / "model.safetensors")
    return folder


def zip_encoder(folder: Path, target: Path) -> Path:
    """Write a zip file of a folder; return its path."""
    with zipfile.ZipFile(target, "w") as archive:
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                archive.write(path, path.relative_to(folder).as_posix())
    return target


def prepared_encoder(tmp: Path, *, seed: int = 0, **changed: Any) -> EncoderCard:
    """Write and prepare a tiny encoder under `tmp`; return its card."""
    return prepare_encoder("tiny-bert", write_encoder(tmp / "bert", seed=seed, **changed), tmp)
