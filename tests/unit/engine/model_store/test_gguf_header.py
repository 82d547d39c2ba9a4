"""The GGUF header reader: correct files are read, damaged files are refused."""

from __future__ import annotations

import contextlib
import struct
import tracemalloc
from pathlib import Path

import gguf
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import ModelError
from engine.model_store.architecture import check_architecture
from engine.model_store.gguf import read_gguf
from engine.model_store.gguf_header import parse_header, read_header
from tests.examples import examples
from tests.models import write_gguf
from tests.tables import each_row
from tests.tiny_tokenizer import MERGES, TOKENS

U32, STRING, ARRAY, U8 = 4, 8, 9, 0


def string(word: bytes) -> bytes:
    return struct.pack("<Q", len(word)) + word


def pair(key: bytes, kind: int, value: bytes) -> bytes:
    return string(key) + struct.pack("<I", kind) + value


def file_of(*pairs: bytes, tensors: bytes = b"", count: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, count, len(pairs)) + b"".join(pairs) + tensors


def tensor(name: bytes, shape: tuple[int, ...], offset: int = 0) -> bytes:
    dimensions = struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *shape)
    return string(name) + dimensions + struct.pack("<IQ", 0, offset)


def array(kind: int, count: int, data: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, count) + data


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


def test_header_equals_written_metadata_and_tensors(small: Path) -> None:
    """Against the reference writer, and its reader for data offsets."""
    header = read_header(small)

    assert header.strings("tokenizer.ggml.tokens") == TOKENS
    assert header.strings("tokenizer.ggml.merges") == MERGES
    assert header.integer("llama.block_count") == 2
    assert header.number("llama.rope.freq_base") == 10_000.0
    assert {t.name: (t.shape, t.offset) for t in header.tensors} == {
        t.name: (tuple(int(n) for n in t.shape), t.data_offset)
        for t in gguf.GGUFReader(small).tensors
    }


DAMAGED = {
    "no GGUF": b"GGML" + bytes(60),
    "nothing": b"GG",
    "only a magic": b"GGUF",
    "version 1": file_of(version=1),
    "big-endian version": b"GGUF" + struct.pack(">IQQ", 3, 0, 0),
    "absurd keys": b"GGUF" + struct.pack("<IQQ", 3, 0, 2**63),
    "absurd tensors": b"GGUF" + struct.pack("<IQQ", 3, 2**64 - 1, 0),
    "a key beyond the end": b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**62),
    "a text beyond the end": file_of(pair(b"k", STRING, struct.pack("<Q", 2**64 - 1))),
    "a text that is not UTF-8": file_of(pair(b"k", STRING, string(b"\xff\xfe"))),
    "an unknown type": file_of(pair(b"k", 77, b"")),
    "an array beyond the end": file_of(pair(b"k", ARRAY, array(U32, 2**40))),
    "an array whose size overflows": file_of(pair(b"k", ARRAY, array(U32, 2**62))),
    "texts beyond the end": file_of(pair(b"k", ARRAY, array(STRING, 2**50))),
    "arrays in arrays in arrays": file_of(pair(b"k", ARRAY, array(ARRAY, 1) * 50)),
    "one key twice": file_of(pair(b"k", U8, b"\1"), pair(b"k", U8, b"\2")),
    "no alignment": file_of(pair(b"general.alignment", U32, struct.pack("<I", 0))),
    "alignment in words": file_of(pair(b"general.alignment", STRING, string(b"32"))),
    "a tensor outside": file_of(tensors=tensor(b"t", (4,), 2**60), count=1),
    "one tensor twice": file_of(tensors=tensor(b"t", (1,)) * 2, count=2),
    "nine dimensions": file_of(tensors=tensor(b"t", (1,) * 9), count=1),
}


@each_row("data", DAMAGED.values())
def test_damaged_header_is_refused(data: bytes) -> None:
    """A clear error, without time or memory spent on the sizes that the header claims."""
    tracemalloc.start()
    try:
        with pytest.raises(ModelError) as caught:
            parse_header(data)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert caught.value.code in ("corrupt", "unsupported")
    assert peak < 1_000_000


def test_long_array_is_refused_before_it_fills_memory() -> None:
    """A sparse file of many gigabytes really has as many zeros as it claims; a list of them would
    be 8 times as large."""
    data = file_of(pair(b"k", ARRAY, array(U8, 2**25, bytes(2**25))))

    with pytest.raises(ModelError, match="arrays have more than"):
        parse_header(data)


@given(data=st.data())
@settings(max_examples=examples(200), deadline=None)
def test_mutated_file_is_read_or_refused(data: st.DataObject, small: Path) -> None:
    """Flipped, cut and repeated bytes give a header or a ModelError, nothing else."""
    content = bytearray(small.read_bytes())
    end = min(tensor.offset for tensor in read_header(small).tensors)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, end - 8))
        word = data.draw(st.sampled_from([0, 1, 7, 2**31, 2**32 - 1, 2**63, 2**64 - 1]))
        size = data.draw(st.sampled_from([1, 4, 8]))
        content[at : at + size] = (word % 2 ** (8 * size)).to_bytes(size, "little")
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content))) :]

    with contextlib.suppress(ModelError):
        parse_header(bytes(content))


@given(st.binary(max_size=200))
@settings(max_examples=examples(200), deadline=None)
def test_random_bytes_are_read_or_refused(data: bytes) -> None:
    """Random bytes after the magic."""
    with contextlib.suppress(ModelError):
        parse_header(b"GGUF\3\0\0\0" + data)


@pytest.mark.parametrize("content", [b"", b"GGUF"])
def test_short_file_is_refused_by_name(content: bytes, tmp_path: Path) -> None:
    """An empty file cannot be mapped, so it takes another path to the error."""
    path = tmp_path / "short.gguf"
    path.write_bytes(content)

    with pytest.raises(ModelError, match=r"short\.gguf"):
        read_header(path)


@pytest.mark.parametrize("value", [struct.pack("<If", 6, float("inf")), b"\4\0\0\0" + b"\xff" * 4])
@pytest.mark.parametrize("key", [b"block_count", b"embedding_length", b"attention.head_count"])
def test_damaged_number_is_refused(key: bytes, value: bytes, small: Path, tmp_path: Path) -> None:
    """A layer count of 2 ** 32 is refused before there is an object for each layer."""
    name, file = b"llama." + key, small.read_bytes()
    at = file.index(string(name)) + len(string(name))
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(file[:at] + value + file[at + len(value) :])

    with pytest.raises(ModelError) as caught:
        check_architecture(read_gguf(damaged).config)

    assert caught.value.code == "corrupt"


def test_missing_file_is_not_found(tmp_path: Path) -> None:
    """The code differs from that of a damaged file."""
    with pytest.raises(ModelError) as caught:
        read_header(tmp_path / "none.gguf")

    assert caught.value.code == "not_found"
