"""Messages between gateway and engine, each in one frame over the engine process's socket or TLS.

The frames are those of `engine.wire`. A prompt's token ids take four bytes each, little-endian.
Pure: bytes in, messages out. Server and client share this module.

    client                               server
      Hello(version, model) ───────────▶
                             ◀─────────── Welcome(info)   once the engine answers, or Rejected
      Submit, Cancel, Peek… ───────────▶
                             ◀─────────── Frame           one per step: all its events and replies;
                                                          several if one would be too large
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from engine.api import (
    Command,
    Count,
    Departed,
    EngineInfo,
    Erased,
    Event,
    Fidelity,
    Finished,
    Held,
    LeaseFound,
    Namespace,
    Peeked,
    PromptLogprobs,
    Request,
    Submit,
    Surveyed,
    Tokens,
    Usage,
)
from engine.statistics import CacheNews, LoadReport, Stats
from engine.strides import PrefixChanges
from engine.wire import FRAME_BYTES_MAX, FrameError, encode_frame, frame_body, read_body

PROTOCOL_VERSION = 24
STEP_FRAME_BYTES = 2**20
"""Bytes above which a step's messages leave in several frames: the gateway decodes a frame at once,
in about 15 ms for this many bytes."""

T = TypeVar("T")

Facts = PrefixChanges | LoadReport
"""What a connection that watches prefixes gets, before the events of the step that made it true."""
Reply = Peeked | Erased | Surveyed | LeaseFound | Held | Departed | Stats | CacheNews | Facts
"""Answers to calls, by `call_id`. A `Stats` with call id 0 is a heartbeat; `CacheNews` and `Facts`
come unasked.
"""
Messages = tuple[Event | Reply, ...]


class PeerWant(Struct, frozen=True, forbid_unknown_fields=True):
    """What an engine asks of another one: copies of the runs of a prefix from run `first` on.

    `token_ids`: the whole prefix, four bytes each; `format`: the copies', by its name. `is_near`:
    it wants a `PeerLent` instead of copies, and answers that with a `PeerEnd` when it has read the
    blocks.
    """

    model_digest: str
    namespace: Namespace
    token_ids: bytes
    ticket: bytes
    first: Count
    format: str
    slot_bytes: Count
    is_near: bool = False


class PeerLent(Struct, frozen=True, tag="peer_lent", forbid_unknown_fields=True):
    """The blocks that have the runs which an engine of this host has asked for. They are held until
    its `PeerEnd`; the one that answers that says whether they were all the time. `limits_s`:
    as `limit_s` in `StoredRun`; `fidelity`: of the least exact one."""

    handle: bytes
    blocks: tuple[Count, ...]
    limits_s: tuple[float | None, ...]
    fidelity: Fidelity = "exact"


class PeerRun(Struct, frozen=True, tag="peer_run", forbid_unknown_fields=True):
    """The next run that another engine has asked for. `check`: the xxh3-128 digest of the
    `slot_bytes` that follow this frame; `limit_s`: as in `StoredRun`."""

    check: bytes
    limit_s: float | None = None


class PeerEnd(Struct, frozen=True, tag="peer_end", forbid_unknown_fields=True):
    """There are no more runs; `why` not all, empty where all were sent."""

    why: str


class Hello(Struct, frozen=True, tag="hello"):
    """The client's first message: from an engine's parent the model to load, and an `EngineConfig`
    as plain data; from a gateway elsewhere its name.

    Unknown fields are allowed, so that another version gets a `Rejected` that says so.
    """

    version: int
    model_dir: str = ""
    config: dict[str, Any] = {}
    record_fd: int = -1
    """An inherited descriptor of a `StepRecord`; -1 for none."""
    host_fds: tuple[int, int] | None = None
    """Inherited descriptors of the files of host memory (`HostMemoryFiles`), if that outlives the
    engine."""
    role: Literal["both", "keeper", "gateway", "peer"] = "both"
    """`both`: a gateway that has started the engine."""
    name: str = ""
    """Of the gateway; from a keeper, that of the engine."""
    start: str = ""
    """Names this start of a gateway: the engine keeps counts by it. "" for none."""
    listen_fd: int = -1
    """An inherited listening socket for gateways; -1 for none."""
    tls: str = ""
    """The folder of the engine's certificates, with `listen_fd`."""
    fallen: tuple[str, ...] = ()
    """From a keeper: ids of the requests in the step in which the life before ended."""
    peer_key: bytes = b""
    """From a gateway: what it signs tickets for peers with, as long as it is connected."""
    wanted: PeerWant | None = None
    """From another engine (`peer`): what it wants. A `PeerRun` for each run follows, each with its
    copy's bytes behind the frame, then a `PeerEnd`."""


class Welcome(Struct, frozen=True, tag="welcome", forbid_unknown_fields=True):
    """The engine is loaded and has produced a token."""

    info: EngineInfo
    fallen: tuple[str, ...] = ()
    """Ids of the requests in the step in which the life before ended; each gateway judges its own.
    """


class Rejected(Struct, frozen=True, tag="rejected", forbid_unknown_fields=True):
    """The engine has another protocol version, or cannot load the model, and exits; or it does not
    serve this gateway. After a Welcome: it takes no new requests from it."""

    code: str
    message: str


class PackedSubmit(Struct, frozen=True, tag="packed_submit", forbid_unknown_fields=True):
    """A `Submit` on the wire: its request without tokens, and the packed tokens.

    Reading two thousand packed ids takes half the time of reading as many msgpack integers.
    """

    request: Request
    token_ids: bytes


class Frame(Struct, frozen=True, tag="frame", forbid_unknown_fields=True):
    """The messages of one step, in order. `number` counts the frames of one connection from 0: a
    gap is a protocol error.
    """

    number: Count
    step: Count
    messages: Messages


PeerMessage = PeerRun | PeerLent | PeerEnd | Rejected
Upward = Hello | Command
Downward = Welcome | Rejected | Frame


def encode(message: Upward | Downward | PeerMessage) -> bytes:
    """Encode one frame. Raises FrameError if it exceeds FRAME_BYTES_MAX."""
    packed = _pack_submit(message) if type(message) is Submit else message
    return encode_frame(packed)


def encode_step(
    number: int,
    step: int,
    messages: Messages,
    *,
    frame_bytes: int = STEP_FRAME_BYTES,
    frame_bytes_max: int = FRAME_BYTES_MAX,
) -> list[bytes]:
    """Encode the messages of one step as frames, in order, numbered from `number` without a gap.

    They are one frame of at most `frame_bytes` if possible. Otherwise the list of messages is
    divided, and then a message with a list of its own is cut; the client joins the pieces. A
    message that cannot be cut may have `frame_bytes_max`. If it has more, the failure of its own
    request takes its place. O(bytes), and O(bytes log bytes) for frames that are divided.
    """
    body = msgspec.msgpack.encode(Frame(number, step, messages))
    if len(body) <= frame_bytes:
        return [frame_body(body)]
    halves = _halve(messages)
    if halves is None:
        if len(body) > frame_bytes_max:
            body = msgspec.msgpack.encode(Frame(number, step, _failure_of(messages[0])))
        return [frame_body(body)]
    frames: list[bytes] = []
    for half in halves:
        frames += encode_step(
            number + len(frames),
            step,
            half,
            frame_bytes=frame_bytes,
            frame_bytes_max=frame_bytes_max,
        )
    return frames


def _halve(messages: Messages) -> tuple[Messages, Messages] | None:
    """Return two parts of the messages, or of the only message; None if it cannot be cut."""
    if len(messages) > 1:
        middle = len(messages) // 2
        return messages[:middle], messages[middle:]
    (message,) = messages
    if isinstance(message, Tokens | PromptLogprobs) and len(message.tokens) > 1:
        head, tail = _cut(message.tokens)
        return (replace(message, tokens=head),), (replace(message, tokens=tail),)
    if isinstance(message, Stats) and len(message.changed) > 1:
        first, rest = _cut(message.changed)
        # The client adds the namespaces of both; the last one answers the call.
        return (replace(message, call_id=0, changed=first),), (replace(message, changed=rest),)
    if isinstance(message, CacheNews) and len(message.losses) + len(message.gains) > 1:
        (lost, more_lost), (gained, more_gained) = _cut(message.losses), _cut(message.gains)
        return (CacheNews(lost, more_gained),), (CacheNews(more_lost, gained),)
    return None


def _cut(items: tuple[T, ...]) -> tuple[tuple[T, ...], tuple[T, ...]]:
    middle = len(items) // 2
    return items[:middle], items[middle:]


def _failure_of(message: Event | Reply) -> Messages:
    """Return what is sent in place of a message that fits no frame: a reply is left out, and its
    caller runs into its timeout.
    """
    if isinstance(message, Reply):
        return ()
    text = "A part of the answer is too large to be sent."
    return (Finished(message.request_id, "failed", Usage(), "answer_lost", text),)


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Return token ids in four bytes each, little-endian. Raises FrameError."""
    try:
        return struct.pack(f"<{len(tokens)}I", *tokens)
    except struct.error as error:
        raise FrameError("a token id does not fit into four bytes") from error


def unpack_tokens(token_ids: bytes) -> tuple[int, ...]:
    """Return the tokens that were packed. Raises struct.error for an incomplete one."""
    return struct.unpack(f"<{len(token_ids) // 4}I", token_ids)


def _pack_submit(message: Submit) -> PackedSubmit:
    request = message.request
    return PackedSubmit(replace(request, tokens=()), pack_tokens(request.tokens))


def _unpack_submit(body: bytes) -> Upward:
    """Decode a body. Raises struct.error for an incomplete token id."""
    message: PackedSubmit | Upward = _decode_upward(body)
    if not isinstance(message, PackedSubmit):
        return message
    return Submit(replace(message.request, tokens=unpack_tokens(message.token_ids)))


_decode_upward = msgspec.msgpack.Decoder(PackedSubmit | Upward).decode
_decode_peer: Callable[[bytes], PeerMessage] = msgspec.msgpack.Decoder(PeerMessage).decode
_decode_downward: Callable[[bytes], Downward] = msgspec.msgpack.Decoder(Downward).decode


def read_upward(body: bytes) -> Upward:
    """Return the client's message of a frame. Raises FrameError."""
    return read_body(_unpack_submit, body)


def read_downward(body: bytes) -> Downward:
    """Return the server's message of a frame. Raises FrameError."""
    return read_body(_decode_downward, body)


def read_peer(body: bytes) -> PeerMessage:
    """Return another engine's message of a frame. Raises FrameError."""
    return read_body(_decode_peer, body)
