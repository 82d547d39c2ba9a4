"""A transaction of one of the store's databases."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

import apsw


@contextmanager
def transaction(db: apsw.Connection) -> Iterator[None]:
    """Make one transaction of what is done in this context; an exception takes all of it back."""
    db.execute("begin immediate")
    try:
        yield
        db.execute("commit")
    except BaseException:
        if db.in_transaction:
            with suppress(apsw.Error):
                db.execute("rollback")
        raise


@contextmanager
def change_or_join(db: apsw.Connection) -> Iterator[None]:
    """Make one transaction, or be a part of the caller's."""
    if db.in_transaction:
        yield
        return
    with transaction(db):
        yield
