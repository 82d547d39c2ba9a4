"""The wire codec: any split gives the same messages; any garbage gives one typed error."""

from __future__ import annotations

import struct
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine import wire
from engine.api import (
    AttentionWindow,
    CacheGrant,
    Cancel,
    Command,
    EndSample,
    Event,
    FindLease,
    Finished,
    GetStats,
    Grammar,
    LetGo,
    Peek,
    Peeked,
    PromptLogprobs,
    Quota,
    Request,
    SampledToken,
    SetQuotas,
    Started,
    Submit,
    TokenLogprob,
    Tokens,
    Usage,
    WatchPrefixes,
)
from engine.client.request_stream import RequestStream
from engine.encoder.protocol import EncodedBatch
from engine.errors import EngineError
from engine.protocol import (
    PROTOCOL_VERSION,
    Frame,
    Hello,
    PackedSubmit,
    Reply,
    Upward,
    encode,
    encode_step,
    read_downward,
    read_upward,
)
from engine.statistics import CacheNews, Gain, Loss, NamespaceStats, Stats
from engine.storage.messages import HeldNamespaces
from engine.wire import FRAME_BYTES_MAX, Decoder, FrameError, encode_frame, frame_body

COMMANDS: list[Upward] = [
    Hello(PROTOCOL_VERSION, "/models/m", {"heartbeat_s": 0.5}),
    Submit(Request("a", (1, 2, 3), 4, CacheGrant(b"n\x00"))),
    Submit(Request("b", (1,), 4, CacheGrant(b"n"), grammar=Grammar("regex", "[äö]*"))),
    Submit(Request("c", (1,), 4, CacheGrant(b"n"), attention=AttentionWindow(4096, 64))),
    Submit(Request("d", (1,), 0, CacheGrant(b"n"), adopts=True)),
    FindLease(7, b"n", "ab"),
    LetGo(),
    Cancel("a"),
    EndSample("a", 0, 2),
    Peek(7, b"n", (1, 2)),
    GetStats(8),
    SetQuotas((Quota(2, 9, 0.5, None, b"p"),)),
    WatchPrefixes(),
]


@given(st.lists(st.sampled_from(COMMANDS), max_size=6), st.lists(st.integers(1, 40)))
def test_messages_survive_any_split(sent: list[Upward], cuts: list[int]) -> None:
    """A socket splits anywhere, in the length too."""
    data = b"".join(encode(message) for message in sent)
    decoder = Decoder(read_upward)
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
        list(Decoder(read_upward).feed(frame_body(body)))


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

    assert list(Decoder(read_downward).feed(encode(frame))) == [frame]


class NoTransport:
    """The transport of a stream that sends nothing."""

    def post(self, command: Command) -> None:
        raise AssertionError(command)

    def forget(self, request_id: str) -> None:
        raise AssertionError(request_id)


def sampled(ids: list[int], top: int = 0) -> tuple[SampledToken, ...]:
    return tuple(SampledToken(i, -0.5, (TokenLogprob(i, -0.5),) * top) for i in ids)


def joined(messages: list[Event | Reply]) -> dict[str, list[Event]]:
    """Return what the readers of the requests' streams get."""
    streams: dict[str, RequestStream] = {}
    for message in messages:
        if isinstance(message, Event):
            name = message.request_id
            streams.setdefault(name, RequestStream(name, NoTransport())).push(message)
    return {name: stream.take() for name, stream in streams.items()}


@given(
    prompts=st.lists(st.integers(1, 60), min_size=1, max_size=4),
    outputs=st.lists(st.integers(1, 20), min_size=1, max_size=4),
    top=st.integers(0, 3),
    names=st.integers(0, 30),
    frame_bytes=st.integers(64, 3_000),
)
def test_a_step_of_any_size_is_cut_into_small_frames_without_a_gap(
    prompts: list[int], outputs: list[int], top: int, names: int, frame_bytes: int
) -> None:
    """The streams of all requests and the statistics are as if there were one frame."""
    messages: list[Event | Reply] = []
    for number, length in enumerate(prompts):
        name = f"p{number}"
        messages += [
            Started(name, length, 0),
            PromptLogprobs(name, sampled(list(range(length)), top)),
            Finished(name, "done", Usage(prompt_tokens=length, computed_tokens=length)),
        ]
    for number, length in enumerate(outputs):
        name = f"o{number}"
        tokens = Tokens(name, 0, sampled(list(range(length)), top))
        messages += [tokens, Finished(name, "done", Usage(output_tokens=length))]
    changed = tuple(NamespaceStats(b"%d" % number, 1, 0, 0, 0) for number in range(names))
    news = CacheNews(
        tuple(Loss(s.namespace, "expired", b"", 1) for s in changed),
        tuple(Gain(s.namespace, 2) for s in changed[::2]),
    )
    messages += [Stats(7, changed=changed), news]

    frames = encode_step(5, 17, tuple(messages), frame_bytes=frame_bytes)

    read = [frame for data in frames for frame in Decoder(read_downward).feed(data)]
    assert all(isinstance(frame, Frame) for frame in read)
    parts = [frame for frame in read if isinstance(frame, Frame)]
    assert [part.number for part in parts] == list(range(5, 5 + len(frames)))
    assert {part.step for part in parts} == {17}
    got = [message for part in parts for message in part.messages]
    assert joined(got) == joined(messages)
    stats = [message for message in got if isinstance(message, Stats)]
    assert [s.call_id for s in stats] == [0] * (len(stats) - 1) + [7]
    assert tuple(name for s in stats for name in s.changed) == changed
    moves = [message for message in got if isinstance(message, CacheNews)]
    assert sorted(loss.namespace for m in moves for loss in m.losses) == sorted(
        loss.namespace for loss in news.losses
    )
    assert sum(gain.blocks for m in moves for gain in m.gains) == 2 * len(news.gains)
    # what exceeds the bound has a single message, which cannot be cut
    for data, part in zip(frames, parts, strict=True):
        (message, *more) = part.messages
        items = getattr(message, "tokens", getattr(message, "changed", ()))
        assert len(data) <= frame_bytes + 4 or (not more and len(items) <= 1)


def test_a_message_that_fits_no_frame_fails_its_own_request_alone() -> None:
    """No other request loses an event, and no caller is told that the answer is whole."""
    big = Finished("big", "done", Usage(), message="x" * 5_000)
    messages = (Tokens("a", 0, sampled([1])), big, Tokens("b", 0, sampled([2])))

    frames = encode_step(0, 1, messages, frame_bytes=200, frame_bytes_max=1_000)

    got = [
        message
        for data in frames
        for frame in Decoder(read_downward).feed(data)
        if isinstance(frame, Frame)
        for message in frame.messages
    ]
    assert (got[0], got[2]) == (messages[0], messages[2])
    assert isinstance(got[1], Finished)
    assert (got[1].request_id, got[1].ending, got[1].code) == ("big", "failed", "answer_lost")


@given(st.binary(min_size=1, max_size=64))
def test_garbage_is_one_typed_error(body: bytes) -> None:
    """No other exception leaves the codec."""
    try:
        list(Decoder(read_upward).feed(frame_body(body)))
    except FrameError:
        return
    assert msgspec.msgpack.decode(body, type=Upward)  # it happens to be a message


def test_an_error_does_not_repeat_the_input() -> None:
    """The input may hold a prompt, and errors are logged."""
    body = msgspec.msgpack.encode({"type": "PLANTED-SECRET", "PLANTED-SECRET": 1})

    with pytest.raises(FrameError) as caught:
        list(Decoder(read_upward).feed(frame_body(body)))

    assert "PLANTED" not in str(caught.value)
    assert isinstance(caught.value, EngineError)


def test_a_length_over_the_limit_is_refused_before_its_bytes_arrive() -> None:
    """A peer must not make the codec buffer 4 GiB."""
    with pytest.raises(FrameError):
        list(Decoder(read_upward).feed(struct.pack("<I", FRAME_BYTES_MAX + 1)))


@pytest.mark.parametrize(
    "encode_one",
    [
        lambda: encode(Cancel("a" * 99)),
        lambda: encode_frame(EncodedBatch(1, [b"a" * 99])),
        lambda: encode_frame(HeldNamespaces((b"a" * 99,))),
    ],
)
def test_no_process_sends_a_frame_that_its_peer_would_refuse(
    encode_one: Callable[[], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sender knows which message was too large; the receiver can only close the connection."""
    monkeypatch.setattr(wire, "FRAME_BYTES_MAX", 64)

    with pytest.raises(FrameError):
        encode_one()


def test_a_client_does_not_accept_a_command() -> None:
    """Each side accepts only the other side's messages."""
    command: Command = Cancel("a")

    with pytest.raises(FrameError):
        list(Decoder(read_downward).feed(encode(command)))


def test_deep_nesting_is_a_frame_error() -> None:
    """Recursion must end in the codec's own error."""
    body = b"\x91" * 100_000 + b"\x01"

    with pytest.raises(FrameError):
        list(Decoder(read_upward).feed(frame_body(body)))


def test_a_newer_hello_is_still_understood() -> None:
    """A peer with a newer version must be able to report the mismatch."""
    body = msgspec.msgpack.encode(
        {"type": "hello", "version": 99, "model_dir": "m", "compression": "zstd"}
    )

    assert list(Decoder(read_upward).feed(frame_body(body))) == [Hello(99, "m")]
