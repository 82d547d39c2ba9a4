"""The writer of stored responses: each caller gets an answer, also after a fault."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from gateway.config import Config
from gateway.ledger import response_writer
from gateway.ledger.response_writer import ResponseWriter
from tenancy.responses.stored_responses import StoredResponse
from tenancy.responses.stored_sums import Obstacle
from tenancy.storage.sqlite import SqliteStore
from tests.unit.tenancy.storage.new_sqlite import new_sqlite

RECORD = StoredResponse(
    response_id="resp_1",
    tenant_id=1,
    workspace="",
    created_ms=0,
    expires_ms=1,
    input=b"[]",
    response=b"{}",
    previous_id=None,
)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SqliteStore]:
    store = new_sqlite(tmp_path / "t.db")
    yield store
    store.close()


async def test_unexpected_error_reaches_the_caller_and_the_next_write_succeeds(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = [ZeroDivisionError("a fault of the program")]

    def store_all(_: object, records: Sequence[StoredResponse], *bounds: object) -> list[Obstacle]:
        if errors:
            raise errors.pop()
        return ["" for _ in records]

    monkeypatch.setattr(response_writer, "store_responses", store_all)
    writer = ResponseWriter(store, Config())
    with pytest.raises(ZeroDivisionError):
        await writer.write(RECORD)

    assert await writer.write(RECORD) == ""
    await writer.close()
