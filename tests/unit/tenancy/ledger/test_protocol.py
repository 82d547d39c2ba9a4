"""What crosses between a gateway and its ledger's process arrives as it was sent, however cut."""

from __future__ import annotations

from typing import TypeVar

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tenancy import errors
from tenancy.errors import BudgetExceeded, IdempotencyConflict, LimitExceeded, TenancyError
from tenancy.ledger.child_process import FrameReader, packed
from tenancy.ledger.epochs import LedgerEpoch
from tenancy.ledger.idempotency import Claim, ReplayRecord, StoredResponse
from tenancy.ledger.progress import Progress, ProgressNote
from tenancy.ledger.protocol import (
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
from tenancy.ledger.transactions import EngineTotals, Hold, Item, NamedEntry, StorageReading
from tenancy.types import UsageEntry

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


def made(kind: type[T], **more: st.SearchStrategy[object]) -> st.SearchStrategy[T]:
    """Any value of a struct of texts, numbers, counts and truths; `more` for its other fields."""
    fields = {
        field.name: more[field.name] if field.name in more else PLAIN[field.type]
        for field in msgspec.structs.fields(kind)
    }
    return st.builds(kind, **fields)


CLAIM = st.none() | st.builds(Claim, TEXT, st.binary(max_size=40), NUMBER)
ANSWER = st.none() | st.builds(StoredResponse, TEXT, st.binary(max_size=500))
KEEPING = st.none() | st.builds(ReplayRecord, NUMBER, NUMBER, ANSWER)
ENTRY = made(UsageEntry, ttft_ms=st.none() | NUMBER)
PROGRESS = st.builds(Progress, COUNTS, COUNTS, *[st.integers(0, 2**63 - 1)] * 4)
ITEM: st.SearchStrategy[Item] = st.one_of(
    made(Hold, claim=CLAIM),
    ENTRY,
    st.builds(NamedEntry, ENTRY, KEEPING),
    made(StorageReading),
    made(EngineTotals, is_ended=st.booleans()),
    st.builds(ProgressNote, st.dictionaries(TEXT, PROGRESS, max_size=3)),
)


def cut(data: bytes, at: list[int]) -> list[bytes]:
    """The same bytes in pieces."""
    places = sorted({place % (len(data) + 1) for place in at})
    return [data[a:b] for a, b in zip([0, *places], [*places, len(data)], strict=True)]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(ITEM, max_size=4), max_size=3), st.lists(st.integers(0), max_size=6))
def test_items_arrive_as_they_were_sent_however_they_were_cut(
    batches: list[list[Item]], at: list[int]
) -> None:
    """A socket knows no frames; a token that came as another would be money."""
    reader = FrameReader()
    sent = b"".join(map(packed, batches))
    frames = [frame for piece in cut(sent, at) for frame in reader.feed(piece)]

    assert [read_items(frame) for frame in frames] == batches


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=5, deadline=None)
@given(data=st.data())
def test_each_error_arrives_as_the_same_error(
    kind: type[TenancyError], data: st.DataObject
) -> None:
    """What a client is told depends on its class and on all of its fields."""
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
    (frame,) = FrameReader().feed(packed(BatchResult(1, {0: failure_of(error)})))
    answered = read_from_writer(frame)
    assert isinstance(answered, BatchResult)
    again = error_of(answered.refused[0])

    assert type(again) is type(error)
    assert (vars(again), str(again)) == (vars(error), str(error))


@pytest.mark.parametrize(
    "message",
    [
        Opened(7, 2, LedgerEpoch(3, 10, "found", 9, b"\x00\xff")),
        Opened(0, 0, None),
        NotOpened(failure_of(IdempotencyConflict("in_use", "it is"))),
        BatchResult(128),
    ],
)
def test_the_writers_words_are_told_apart(message: FromWriter) -> None:
    """An answer that is taken for a start would be a promise."""
    (frame,) = FrameReader().feed(packed(message))

    assert read_from_writer(frame) == message


def test_the_first_word_says_which_database_and_who_lives() -> None:
    """The rest of what a successor must know is in the database."""
    message = Open("trunkline.db", "/data", ["a", "b"], 7)
    (frame,) = FrameReader().feed(packed(message))

    assert read_open(frame) == message


@pytest.mark.parametrize("wrong", ["\ud800", 2**70], ids=["text", "number"])
def test_what_cannot_be_said_raises_before_anything_is_sent(wrong: str | int) -> None:
    """Half a frame would be the end of all others."""
    item = Hold(wrong if isinstance(wrong, str) else "a", 1, 1, "m", 1)
    if isinstance(wrong, int):
        item = msgspec.structs.replace(item, input_tokens=wrong)
    with pytest.raises((ValueError, OverflowError)):
        packed([item])


def test_an_answer_of_many_megabytes_is_one_frame() -> None:
    """Kept answers are as large as they are."""
    body = bytes(20 * 2**20)
    item = NamedEntry(
        UsageEntry("a", 1, 1, "m", "done", 1, 2, 0, 0, 0, 0, 0, 0),
        ReplayRecord(1, 2, StoredResponse("{}", body)),
    )
    data, reader = packed([item]), FrameReader()
    frames = [
        frame for at in range(0, len(data), 2**16) for frame in reader.feed(data[at : at + 2**16])
    ]

    assert read_items(frames[0]) == [item]
    assert len(frames) == 1
