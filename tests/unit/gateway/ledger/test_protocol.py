"""Messages between gateway and ledger process arrive as they were sent, however they were cut."""

from __future__ import annotations

from typing import TypeVar

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.wire import FrameReader, encode_frame
from gateway.ledger.protocol import (
    BatchResult,
    FromWriter,
    NotOpened,
    Open,
    Opened,
    error_of,
    failure_of,
    read_from_writer,
    read_items,
    read_open,
)
from tenancy import errors
from tenancy.errors import BudgetExceeded, IdempotencyConflict, LimitExceeded, TenancyError
from tenancy.ledger.engine_counts import EngineTotals
from tenancy.ledger.epochs import LedgerEpoch
from tenancy.ledger.holds import ProgressNote
from tenancy.ledger.idempotency import Claim, ReplayedResponse, ReplayRecord
from tenancy.ledger.transactions import (
    Hold,
    Item,
    NamedEntry,
    StorageReading,
    StorageReadings,
)
from tenancy.types import TokenCounts, UsageEntry
from tests.examples import examples
from tests.tables import each_row

T = TypeVar("T", bound=msgspec.Struct)
TEXT = st.text(st.characters(codec="utf-8"), max_size=20)
NUMBER = st.integers(-(2**63), 2**63 - 1)
COUNTS = st.dictionaries(TEXT, st.integers(0, 2**63 - 1), max_size=3)
KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type)]

PLAIN: dict[object, st.SearchStrategy[object]] = {
    str: TEXT,
    int: NUMBER,
    bool: st.booleans(),
    dict[str, int]: COUNTS,
}


def structs_of(kind: type[T], **more: st.SearchStrategy[object]) -> st.SearchStrategy[T]:
    """Return a strategy for a struct of texts, numbers, counts and booleans; `more`: its other
    fields."""
    fields = {
        field.name: more[field.name] if field.name in more else PLAIN[field.type]
        for field in msgspec.structs.fields(kind)
    }
    return st.builds(kind, **fields)


CLAIM = st.none() | st.builds(Claim, TEXT, st.binary(max_size=40), NUMBER)
ANSWER = st.none() | st.builds(ReplayedResponse, TEXT, st.binary(max_size=500))
KEEPING = st.none() | st.builds(ReplayRecord, NUMBER, NUMBER, ANSWER)
ENTRY = structs_of(UsageEntry, ttft_ms=st.none() | NUMBER)
PROGRESS = st.builds(TokenCounts, COUNTS, COUNTS, *[st.integers(0, 2**63 - 1)] * 4)
ITEM: st.SearchStrategy[Item] = st.one_of(
    structs_of(Hold, claim=CLAIM),
    ENTRY,
    st.builds(NamedEntry, ENTRY, KEEPING),
    structs_of(
        StorageReadings, readings=st.lists(structs_of(StorageReading), max_size=3).map(tuple)
    ),
    structs_of(EngineTotals, is_ended=st.booleans()),
    st.builds(ProgressNote, st.dictionaries(TEXT, PROGRESS, max_size=3)),
)


def cut_into_pieces(data: bytes, at: list[int]) -> list[bytes]:
    """Return the same bytes in pieces."""
    places = sorted({place % (len(data) + 1) for place in at})
    return [data[a:b] for a, b in zip([0, *places], [*places, len(data)], strict=True)]


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.lists(ITEM, max_size=4), max_size=3), st.lists(st.integers(0), max_size=6))
def test_items_round_trip_however_they_were_cut(batches: list[list[Item]], at: list[int]) -> None:
    """A socket knows no frames, and a wrong token count would be wrong money."""
    reader = FrameReader()
    sent = b"".join(map(encode_frame, batches))
    frames = [frame for piece in cut_into_pieces(sent, at) for frame in reader.feed(piece)]

    assert [read_items(frame) for frame in frames] == batches


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=5, deadline=None)
@given(data=st.data())
def test_errors_round_trip(kind: type[TenancyError], data: st.DataObject) -> None:
    """A client's message depends on the class and on all fields."""
    seconds = st.none() | st.floats(0, 10**6)
    error: TenancyError
    if kind is BudgetExceeded:
        error = BudgetExceeded(
            scope=data.draw(TEXT),
            window=data.draw(TEXT),
            hard=data.draw(NUMBER),
            spent=data.draw(NUMBER),
            reserved=data.draw(NUMBER),
            resets_ms=data.draw(NUMBER),
            retry_after_s=data.draw(seconds),
        )
    elif kind is LimitExceeded:
        error = LimitExceeded(
            "code", "why", retry_after_s=data.draw(seconds), limit=1, remaining=2, reset_s=3.5
        )
    else:
        error = kind(data.draw(TEXT), data.draw(TEXT))
    (frame,) = FrameReader().feed(encode_frame(BatchResult(1, {0: failure_of(error)})))
    answered = read_from_writer(frame)
    assert isinstance(answered, BatchResult)
    again = error_of(answered.refused[0])

    assert type(again) is type(error)
    assert (vars(again), str(again)) == (vars(error), str(error))


@each_row(
    "message",
    [
        Opened(7, 2, LedgerEpoch(3, 10, "found", 9, b"\x00\xff")),
        Opened(0, 0, None),
        NotOpened(failure_of(IdempotencyConflict("in_use", "it is"))),
        BatchResult(128),
    ],
)
def test_writers_messages_are_distinguishable(message: FromWriter) -> None:
    """A BatchResult taken for an Opened would confirm items."""
    (frame,) = FrameReader().feed(encode_frame(message))

    assert read_from_writer(frame) == message


def test_open_names_the_database_and_running_requests() -> None:
    """The rest that a successor must know is in the database."""
    message = Open("trunkline.db", "/data", ["a", "b"], 7)
    (frame,) = FrameReader().feed(encode_frame(message))

    assert read_open(frame) == message


@pytest.mark.parametrize("wrong", ["\ud800", 2**70], ids=["text", "number"])
def test_unencodable_item_raises_before_anything_is_sent(wrong: str | int) -> None:
    """Half a frame would corrupt all that follow."""
    item = Hold(wrong if isinstance(wrong, str) else "a", 1, 1, "m", 1)
    if isinstance(wrong, int):
        item = msgspec.structs.replace(item, input_tokens=wrong)
    with pytest.raises((ValueError, OverflowError)):
        encode_frame([item])


def test_large_response_is_one_frame() -> None:
    """Stored responses have any size."""
    body = bytes(20 * 2**20)
    item = NamedEntry(
        UsageEntry("a", 1, 1, "m", "done", 1, 2, 0, 0, 0, 0, 0, 0),
        ReplayRecord(1, 2, ReplayedResponse("{}", body)),
    )
    data, reader = encode_frame([item]), FrameReader()
    frames = [
        frame for at in range(0, len(data), 2**16) for frame in reader.feed(data[at : at + 2**16])
    ]

    assert read_items(frames[0]) == [item]
    assert len(frames) == 1
