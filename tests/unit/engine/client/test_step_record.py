"""`StepRecord`: two mappings of one memory file."""

from __future__ import annotations

import os

from engine.client.step_record import RECORD_BYTES, StepRecord


def test_a_reader_sees_what_was_written_last() -> None:
    """Also after the writer is gone."""
    reader = StepRecord.create()
    writer = StepRecord(os.dup(reader.fd))
    empty = reader.read()
    writer.write(["request-1", "request-22"])
    first = reader.read()
    writer.write(["ä"])
    writer.close()

    assert not empty
    assert first == {"request-1", "request-22"}
    assert reader.read() == {"ä"}
    reader.close()


def test_too_many_ids_are_cut() -> None:
    """The ids that fit are kept."""
    record = StepRecord.create()
    names = [f"{number:015}" for number in range(RECORD_BYTES // 16 + 50)]
    record.write(names)

    found = record.read()
    assert names[0] in found
    assert len(found & set(names)) >= RECORD_BYTES // 16 - 2
    record.close()
