"""The walk of a look: which records hold a prompt's prefix, proved run by run from the root."""

from __future__ import annotations

import struct

from engine.api import FIDELITIES
from engine.moves import ROOT, Look, Looked, StoredRun
from engine.storage.index.index import RecordIndex
from engine.storage.index.index_file import FOREVER_MS
from engine.storage.index.remote_rows import level_of
from engine.storage.slabs.record import pack_run


def walk(
    index: RecordIndex, command: Look, run_tokens: int, now_ms: int, *, has_remote: bool
) -> Looked:
    """Return the records of the longest stored prefix. About 10 us a run.

    `has_remote`: what lies in the remote store alone may be found too.
    """
    found: list[StoredRun] = []
    scope = index.names.scope(command.namespace)
    parent = ROOT
    runs = len(command.tokens) // run_tokens if scope is not None else 0
    for number in range(runs):
        assert scope is not None, "there are no runs without a scope"
        try:
            packed = pack_run(command.tokens[number * run_tokens : (number + 1) * run_tokens])
        except struct.error:
            break
        step = index.step(scope, parent, packed)
        if step is None or step[2] <= now_ms:
            break
        parent, fidelity, limit_ms, promise_ms, slot_bytes, slab = step
        level = level_of(slab)
        if level == "remote" and not has_remote:
            break
        limit_s = None if limit_ms >= FOREVER_MS else (limit_ms - now_ms) / 1_000
        promise_s = max(0, promise_ms - now_ms) / 1_000
        word = FIDELITIES[fidelity]
        found.append(StoredRun(parent, word, limit_s, promise_s, slot_bytes, level))
    return Looked(command.call_id, tuple(found))
