"""A process that stores, drops and erases until it is killed: `python -m tests.crash.storage_child
FOLDER SEED [LIE]`, or with `sealed` instead of a lie: then its copies are sealed.

It prints a line before and after each erasure and each store that is kept. With LIE `unstored` it
prints a store that it never made and kills itself; with `rows_first` it commits rows before their
bytes are written, and kills itself in between: the controls of the test.
"""

from __future__ import annotations

import os
import random
import signal
import sys
from pathlib import Path

from engine.api import Quota
from engine.moves import SetStoredQuotas
from engine.storage.sealing.master_key import KEY_BYTES, MasterKey
from tests.fakes import FakeClock
from tests.unit.engine.storage.local_storage import LocalRig, run_in_turn
from tests.unit.engine.storage.storage_rig import RUN, content_of

MASTER = MasterKey(b"1" * KEY_BYTES)
KEPT, SCAN = b"kept", b"scan"
SCAN_RECORDS = 12
FORKS = 3


def tokens_of(number: int) -> tuple[int, ...]:
    """Return a path of one to five runs, a function of its number."""
    runs = 1 + number % 5
    return tuple(number * 7 % FORKS if at < RUN else number + at for at in range(runs * RUN))


def say(word: str, namespace: bytes, number: int = -1) -> None:
    """Print one line at once."""
    os.write(1, f"{word} {namespace.decode()} {number}\n".encode())


def store_path(rig: LocalRig, namespace: bytes, number: int, payer: bytes) -> None:
    """Store a path, as much of it as the payer's ceiling allows."""
    promise_s = 1e6 if payer == KEPT and number % 2 else 0.0
    command = rig.store_command(
        namespace, tokens_of(number), payer=payer, promise_s=promise_s, lease_ids=(str(number),)
    )
    if payer == KEPT:
        say("storing", namespace, number)
    outcome = rig.send_store(command)
    if payer == KEPT:
        assert outcome.code == "", outcome
        say("stored", namespace, number)


def main(folder: Path, seed: int, lie: str) -> None:
    """Store, drop and erase without end."""
    rng = random.Random(seed)
    master = MASTER if lie == "sealed" else None
    rig = LocalRig(folder, clock=FakeClock(1_000.0 + seed), master=master)
    rig.storage.send(SetStoredQuotas((Quota(ceiling_blocks=SCAN_RECORDS, payer=SCAN),)))
    say("opened", b"-")
    number = 0
    while True:
        number += 1
        namespace = b"kept-%d-%d" % (seed, number % 4)
        store_path(rig, namespace, number, KEPT)
        store_path(rig, b"scan", rng.randrange(1_000), SCAN)
        if rng.random() < 0.2:
            victim = b"kept-%d-%d" % (seed, rng.randrange(4))
            say("erasing", victim)
            rig.erase(victim)
            say("erased", victim)
        if rng.random() < 0.1:
            rig.disk.maintain()
        if number == 6 and lie == "unstored":
            say("stored", b"kept-0-0", 999)
            os.kill(os.getpid(), signal.SIGKILL)
        if number == 6 and lie == "rows_first":
            batch = rig.disk.writer.plan(
                [rig.store_command(b"kept-0-0", tokens_of(999), payer=KEPT)]
            )
            rig.disk.writer.commit(batch)
            os.kill(os.getpid(), signal.SIGKILL)
            rig.disk.writer.write(batch, run_in_turn)


def expected(namespace: bytes, number: int) -> bytes:
    """Return the bytes of a path's last run."""
    return content_of(namespace, tokens_of(number))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] if sys.argv[3:] else "")
