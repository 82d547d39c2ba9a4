"""OpenAI's embeddings: texts or token ids in, vectors out. Functions are pure.

`generation.embedding` calls it; the vectors' coordinates are float32, little-endian.
"""

from __future__ import annotations

import base64
import sys
from array import array
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from gateway.dialects.canonical import NO_METADATA, RequestMetadata, UsageRecord
from gateway.dialects.openai import wire
from gateway.dialects.tolerance import Tolerance

INPUTS_MAX = 2_048
"""Most texts of one request, as OpenAI has it."""
DIMENSIONS_MAX = 65_536

EncodingFormat = Literal["float", "base64"]
RULES = wire.FieldRules(
    refused={
        "truncate_prompt_tokens": "the server cuts texts at the model's limit; omit it.",
        "add_special_tokens": "the two tokens of the model stand around each text; omit it.",
        "normalize": "vectors have length 1; omit it.",
        "input_type": "the model embeds queries and documents alike; omit it.",
    },
    neutral={"add_special_tokens": (True,), "normalize": (True,)},
)


class EmbeddingBody(Struct, frozen=True, kw_only=True):
    """A body. `input`: a text, a list of texts, token ids, or a list of token ids."""

    model: Annotated[str, Meta(min_length=1, max_length=512)]
    input: Any
    encoding_format: EncodingFormat | None = None
    dimensions: Annotated[int, Meta(ge=1, le=DIMENSIONS_MAX)] | None = None
    user: wire.Short | None = None


class EmbeddingCall(Struct, frozen=True):
    """A request for vectors."""

    model: str
    inputs: tuple[wire.TextOrIds, ...]
    encoding_format: EncodingFormat = "float"
    dimensions: int | None = None
    client_user: str = ""
    ignored: tuple[str, ...] = ()
    """Names of the fields without effect."""

    @property
    def is_list(self) -> bool:
        """Whether a field's path has an index."""
        return len(self.inputs) > 1

    def path(self, index: int) -> str:
        """Return the field of an input, for errors."""
        return f"input[{index}]" if self.is_list else "input"


SHAPE = wire.OpenAIErrors("openai_embeddings", "embeddings")
"""The error shape of `/v1/embeddings`, and the name of its dialect."""


def parse(body: bytes, metadata: RequestMetadata = NO_METADATA) -> EmbeddingCall:
    """Return the call of a body. O(bytes). Raises Refusal."""
    tolerance = Tolerance(metadata.tolerance)
    fields = wire.decode(body, EmbeddingBody, RULES, tolerance)
    return EmbeddingCall(
        model=fields.model,
        inputs=wire.texts_or_ids(fields.input, "input", "text", INPUTS_MAX),
        encoding_format=fields.encoding_format or "float",
        dimensions=fields.dimensions,
        client_user=fields.user or "",
        ignored=tolerance.ignored,
    )


def usage_object(record: UsageRecord) -> dict[str, Any]:
    """Return OpenAI's usage object of an embedding, with the tokens that were found."""
    return {
        "prompt_tokens": record.total_in,
        "total_tokens": record.total_in,
        "prompt_tokens_details": {"cached_tokens": record.read_tokens()},
    }


def encode_vector(vector: bytes, index: int, encoding_format: EncodingFormat) -> bytes:
    """Return one item of the answer's list. About 40 us for 384 numbers, 5 us in base64."""
    if encoding_format == "base64":
        found: object = base64.b64encode(vector).decode()
    else:
        numbers = array("f")
        numbers.frombytes(vector)
        if sys.byteorder == "big":
            numbers.byteswap()
        found = numbers.tolist()
    return msgspec.json.encode({"object": "embedding", "index": index, "embedding": found})


def join_answer(model: str, items: Sequence[bytes], record: UsageRecord) -> bytes:
    """Return the answer of encoded vectors."""
    rest = msgspec.json.encode({"model": model, "usage": usage_object(record)})
    return b'{"object":"list","data":[' + b",".join(items) + b"]," + rest[1:]
