"""The wire codec: any split gives the same messages; any garbage gives one typed error."""

from __future__ import annotations

import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.api import (
    PROTOCOL_VERSION,
    CacheGrant,
    Cancel,
    Command,
    EndSample,
    Finished,
    Frame,
    GetStats,
    Grammar,
    Peek,
    Peeked,
    Quota,
    Request,
    SampledToken,
    SetQuotas,
    Submit,
    Tokens,
    Usage,
)
from engine.errors import EngineError
from engine.protocol import (
    FRAME_BYTES_MAX,
    FrameError,
    Hello,
    PackedSubmit,
    Upward,
    downward_decoder,
    encode,
    upward_decoder,
)

COMMANDS: list[Upward] = [
    Hello(PROTOCOL_VERSION, "/models/m", {"heartbeat_s": 0.5}),
    Submit(Request("a", (1, 2, 3), 4, CacheGrant(b"n\x00"))),
    Submit(Request("b", (1,), 4, CacheGrant(b"n"), grammar=Grammar("regex", "[äö]*"))),
    Cancel("a"),
    EndSample("a", 0, 2),
    Peek(7, b"n", (1, 2)),
    GetStats(8),
    SetQuotas((Quota(2, 9, 0.5, None, b"p"),)),
]


@given(st.lists(st.sampled_from(COMMANDS), max_size=6), st.lists(st.integers(1, 40)))
def test_messages_survive_any_split(sent: list[Upward], cuts: list[int]) -> None:
    """A socket splits anywhere, in the length too."""
    data = b"".join(encode(message) for message in sent)
    decoder = upward_decoder()
    read: list[Upward] = []

    for size in [*cuts, len(data)]:
        read += decoder.feed(data[:size])
        data = data[size:]

    assert read == sent


@pytest.mark.parametrize("token_id", [-1, 2**32])
def test_a_token_id_beyond_four_bytes_is_not_sent(token_id: int) -> None:
    """The caller gets an error; the connection stays open."""
    with pytest.raises(FrameError):
        encode(Submit(Request("a", (1, token_id), 4, CacheGrant(b"n"))))


def test_half_a_token_id_is_a_frame_error() -> None:
    """Packed ids have four bytes each."""
    packed = PackedSubmit(Request("a", (), 4, CacheGrant(b"n")), b"12345")
    body = msgspec.msgpack.encode(packed)

    with pytest.raises(FrameError):
        list(upward_decoder().feed(struct.pack("<I", len(body)) + body))


def test_a_frame_carries_a_whole_step() -> None:
    """Tokens, an end and a reply of one step travel as one message, in order."""
    frame = Frame(
        3,
        17,
        (
            Tokens("a", 0, (SampledToken(5, -0.5),)),
            Finished("a", "done", Usage(prompt_tokens=3, computed_tokens=3, output_tokens=1)),
            Peeked(7, 16),
        ),
    )

    assert list(downward_decoder().feed(encode(frame))) == [frame]


@given(st.binary(min_size=1, max_size=64))
def test_garbage_is_one_typed_error_and_breaks_the_decoder(body: bytes) -> None:
    """No byte after garbage can be trusted, and no other exception leaves the codec."""
    data = struct.pack("<I", len(body)) + body
    decoder = upward_decoder()
    try:
        list(decoder.feed(data))
    except FrameError:
        with pytest.raises(FrameError):
            list(decoder.feed(encode(Cancel("a"))))
    else:  # it happens to be a message; the same body decodes again
        assert msgspec.msgpack.decode(body, type=Upward)


def test_an_error_does_not_repeat_the_input() -> None:
    """The input may hold a prompt, and errors are logged."""
    body = msgspec.msgpack.encode({"type": "PLANTED-SECRET", "PLANTED-SECRET": 1})

    with pytest.raises(FrameError) as caught:
        list(upward_decoder().feed(struct.pack("<I", len(body)) + body))

    assert "PLANTED" not in str(caught.value)
    assert isinstance(caught.value, EngineError)


def test_a_length_over_the_limit_is_refused_before_its_bytes_arrive() -> None:
    """A peer must not make the codec buffer 4 GiB."""
    with pytest.raises(FrameError):
        list(upward_decoder().feed(struct.pack("<I", FRAME_BYTES_MAX + 1)))


def test_a_client_does_not_accept_a_command() -> None:
    """Each side accepts only the other side's messages."""
    command: Command = Cancel("a")

    with pytest.raises(FrameError):
        list(downward_decoder().feed(encode(command)))


def test_deep_nesting_is_a_frame_error() -> None:
    """Recursion must end in the codec's own error."""
    body = b"\x91" * 100_000 + b"\x01"

    with pytest.raises(FrameError):
        list(upward_decoder().feed(struct.pack("<I", len(body)) + body))


def test_a_newer_hello_is_still_understood() -> None:
    """A peer with a newer version must be able to report the mismatch."""
    body = msgspec.msgpack.encode(
        {"type": "hello", "version": 99, "model_dir": "m", "compression": "zstd"}
    )

    assert list(upward_decoder().feed(struct.pack("<I", len(body)) + body)) == [Hello(99, "m")]
