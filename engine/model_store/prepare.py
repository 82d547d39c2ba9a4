"""From a model's files to a prepared folder: tokenizer, chat template and card, made once.

Read from a GGUF's metadata or a Hugging Face folder. The folder is named after the digest of what
it was made from, so a second start finds it, and a changed model never meets an old tokenizer.
"""

from __future__ import annotations

import json
import os
import struct
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from engine.errors import ModelError
from engine.model_store.card import (
    CARD_VERSION,
    ModelCard,
    ModelConfig,
    RopeScaling,
    check_config,
    load_card,
)
from engine.model_store.gguf_header import GgufHeader, read_header
from engine.model_store.gguf_tokenizer import special_ids, tokenizer_json

PLAIN_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
)
"""For models without a chat template: roles and colons, as base models see them in the wild."""

END_WORDS = ("<|im_end|>", "<|eot_id|>", "<|endoftext|>", "<|end_of_text|>", "<|eom_id|>", "</s>")
"""Special tokens that end an answer wherever they exist."""


def prepare(name: str, source: Path, models_dir: Path) -> ModelCard:
    """Make, or find, the prepared folder of a model.

    The first time reads the whole metadata (about a second); later a small card. Raises ModelError.
    """
    digest = _fingerprint(source)
    folder = models_dir / "prepared" / f"{name.replace('/', '--')}-{digest[:16]}"
    if (folder / "model_card.json").exists():
        try:
            return load_card(folder)
        except ModelError:
            pass  # from another version: make it again
    folder.mkdir(parents=True, exist_ok=True)
    parts = _from_gguf(source) if source.is_file() else _from_folder(source)
    config, tokenizer, template, stops, specials, bos, add_bos = parts
    card = ModelCard(
        name=name,
        digest=xxhash.xxh3_128_hexdigest(f"{digest}|{CARD_VERSION}|{tokenizer}".encode()),
        config=check_config(config),
        source=str(source),
        folder=str(folder),
        template_digest=xxhash.xxh3_128_hexdigest(template.encode()),
        stop_token_ids=stops,
        special_token_ids=specials,
        bos_token_id=bos,
        add_bos=add_bos,
    )
    write_whole(folder / "tokenizer.json", tokenizer.encode())
    write_whole(folder / "chat_template.jinja", template.encode())
    write_whole(folder / "model_card.json", msgspec.json.format(msgspec.json.encode(card)))
    return card


def write_whole(path: Path, data: bytes) -> None:
    """Write a file so that it is there whole or not at all, whatever happens meanwhile."""
    handle, partial = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(partial).replace(path)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise


_Parts = tuple[ModelConfig, str, str, tuple[int, ...], tuple[int, ...], int | None, bool]


def _fingerprint(source: Path) -> str:
    """Names a model by its files' names, sizes, times and first and last megabyte: 0.01 s."""
    files = [source] if source.is_file() else sorted(p for p in source.iterdir() if p.is_file())
    digest = xxhash.xxh3_128()
    for path in files:
        facts = path.stat()
        digest.update(f"{path.name}|{facts.st_size}|".encode())
        with path.open("rb") as file:
            digest.update(file.read(1 << 20))
            file.seek(max(0, facts.st_size - (1 << 20)))
            digest.update(file.read(1 << 20))
    return digest.hexdigest()


# --- GGUF --------------------------------------------------------------------------------------


def _from_gguf(path: Path) -> _Parts:
    header = read_header(path)
    tokens = header.texts("tokenizer.ggml.tokens")
    stops = [
        header.whole("tokenizer.ggml.eos_token_id"),
        header.whole("tokenizer.ggml.eot_token_id"),
    ]
    index = {token: i for i, token in enumerate(tokens)}
    stops += [index.get(word) for word in END_WORDS]
    template = header.text("tokenizer.chat_template") or PLAIN_TEMPLATE
    bos = header.whole("tokenizer.ggml.bos_token_id")
    return (
        _gguf_config(path, header, len(tokens)),
        tokenizer_json(header),
        template,
        tuple(sorted({stop for stop in stops if stop is not None})),
        special_ids(header),
        bos,
        header.metadata.get("tokenizer.ggml.add_bos_token") is True and bos is not None,
    )


def _gguf_config(path: Path, header: GgufHeader, tokens: int) -> ModelConfig:
    architecture = header.text("general.architecture") or ""

    def size(key: str, default: int | None = None) -> int:
        value = header.whole(f"{architecture}.{key}")
        if value is None:
            value = default
        if value is None:
            raise ModelError("corrupt", f"The file does not say {architecture}.{key}.")
        return value

    hidden, heads = size("embedding_length"), size("attention.head_count")
    return ModelConfig(
        architecture=architecture,
        layers=size("block_count"),
        hidden=hidden,
        intermediate=size("feed_forward_length"),
        heads=heads,
        kv_heads=size("attention.head_count_kv", heads),
        head_dim=size("attention.key_length", hidden // max(1, heads)),
        vocab=size("vocab_size", tokens),
        context=size("context_length"),
        rope_theta=header.number(f"{architecture}.rope.freq_base") or 10_000.0,
        rope_scaling=_gguf_scaling(path, header, architecture),
        norm_eps=header.number(f"{architecture}.attention.layer_norm_rms_epsilon") or 1e-5,
        tie_embeddings=not any(t.name == "output.weight" for t in header.tensors),
    )


def _gguf_scaling(path: Path, header: GgufHeader, architecture: str) -> RopeScaling | None:
    """Llama 3.1 and later carry a divisor for each frequency as a tensor of 32-bit floats."""
    for tensor in header.tensors:
        if tensor.name == "rope_freqs.weight" and tensor.type_id == 0 and len(tensor.shape) == 1:
            count = tensor.shape[0]
            with path.open("rb") as file:
                file.seek(tensor.offset)
                data = file.read(4 * count)
            if len(data) != 4 * count:
                raise ModelError("corrupt", f"{path}: rope_freqs.weight lies outside the file.")
            return RopeScaling(kind="divisors", divisors=struct.unpack(f"<{count}f", data))
    kind = header.text(f"{architecture}.rope.scaling.type")
    factor = header.number(f"{architecture}.rope.scaling.factor")
    if kind in (None, "none") or factor is None:
        return None
    if kind != "linear":
        raise ModelError(
            "unsupported", f"Rotary scaling {kind!r}; linear and llama3 are supported."
        )
    return RopeScaling(kind="linear", factor=factor)


# --- Hugging Face folders ----------------------------------------------------------------------


def _from_folder(folder: Path) -> _Parts:
    config = _read_json(folder / "config.json")
    if not (folder / "tokenizer.json").exists():
        raise ModelError("unsupported", f"{folder} has no tokenizer.json.")
    tokenizer = (folder / "tokenizer.json").read_text()
    settings = _read_json(folder / "tokenizer_config.json", optional=True)
    generation = _read_json(folder / "generation_config.json", optional=True)
    added = _read_json(folder / "tokenizer.json").get("added_tokens") or []
    specials = {int(t["id"]): str(t["content"]) for t in added if t.get("special")}
    stops: set[int] = {i for i, word in specials.items() if word in END_WORDS}
    for value in (config.get("eos_token_id"), generation.get("eos_token_id")):
        stops.update(value if isinstance(value, list) else [] if value is None else [value])
    bos = config.get("bos_token_id")
    return (
        _folder_config(config),
        tokenizer,
        _folder_template(folder, settings),
        tuple(sorted(stops)),
        tuple(sorted(specials)),
        bos if isinstance(bos, int) else None,
        settings.get("add_bos_token") is True,
    )


def _folder_template(folder: Path, settings: dict[str, Any]) -> str:
    path = folder / "chat_template.jinja"
    if path.exists():
        return path.read_text()
    template = settings.get("chat_template")
    if isinstance(template, list):  # several by name
        named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else PLAIN_TEMPLATE


def _folder_config(config: dict[str, Any]) -> ModelConfig:
    try:
        heads = int(config["num_attention_heads"])
        hidden = int(config["hidden_size"])
        rope = config.get("rope_parameters") or {}
        return ModelConfig(
            architecture=str(config.get("model_type", "")),
            layers=int(config["num_hidden_layers"]),
            hidden=hidden,
            intermediate=int(config["intermediate_size"]),
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or hidden // heads),
            vocab=int(config["vocab_size"]),
            context=int(config["max_position_embeddings"]),
            rope_theta=float(config.get("rope_theta") or rope.get("rope_theta") or 10_000.0),
            rope_scaling=_folder_scaling(config.get("rope_scaling") or rope),
            norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            tie_embeddings=bool(config.get("tie_word_embeddings", False)),
            attention_bias=bool(config.get("attention_bias", False)),
            mlp_bias=bool(config.get("mlp_bias", False)),
        )
    except KeyError as missing:
        raise ModelError("corrupt", f"config.json does not say {missing.args[0]}.") from missing
    except (TypeError, ValueError) as error:
        raise ModelError("corrupt", f"config.json: {error}.") from error


def _folder_scaling(scaling: dict[str, Any]) -> RopeScaling | None:
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "default":
        return None
    if kind not in ("llama3", "linear"):
        raise ModelError(
            "unsupported", f"Rotary scaling {kind!r}; linear and llama3 are supported."
        )
    return RopeScaling(
        kind="llama3" if kind == "llama3" else "linear",
        factor=float(scaling["factor"]),
        low_freq_factor=float(scaling.get("low_freq_factor", 1.0)),
        high_freq_factor=float(scaling.get("high_freq_factor", 4.0)),
        original_context=int(scaling.get("original_max_position_embeddings", 8192)),
    )


def _read_json(path: Path, *, optional: bool = False) -> dict[str, Any]:
    if optional and not path.exists():
        return {}
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelError("not_found", f"{path} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise ModelError("corrupt", f"{path} is not JSON: {error}.") from error
    if not isinstance(value, dict):
        raise ModelError("corrupt", f"{path} is not a JSON object.")
    return value
