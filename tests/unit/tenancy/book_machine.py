"""What state machines over a ledger share: a store, a clock, an end, and a run on a server."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from tenancy.accounts.tenants import create_tenant
from tenancy.ledger.ledger import Ledger
from tenancy.storage.interface import Store
from tenancy.storage.postgres import PostgresStore
from tests.unit.tenancy.conftest import Wall
from tests.unit.tenancy.storage.new_sqlite import new_sqlite
from tests.unit.tenancy.storage.postgres_server import Server

ON_SERVER = settings(max_examples=6, stateful_step_count=25, deadline=None)


class BookMachine(RuleBasedStateMachine):
    """A state machine over a store with a tenant, `ada`, and a ledger, which a rule may replace."""

    server: Server | None = None
    """Where each example has a database of its own; None for a file each."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.wall = Wall()
        self.store = self._new_store()
        create_tenant(self.store, self.wall, "ada")
        self.ledger = Ledger(self.store, self.wall)

    def _new_store(self) -> Store:
        if self.server is None:
            return new_sqlite(Path(self.folder.name) / "test.db")
        return PostgresStore(self.server.address(self.server.database()), is_ready=True)

    def restart_ledger(self) -> None:
        """End the ledger, and begin its next life."""
        self.ledger.close()
        self.ledger = Ledger(self.store, self.wall)

    def teardown(self) -> None:
        self.ledger.close()
        self.store.close()
        self.folder.cleanup()


def run_on_server(machine: type[BookMachine], server: Server) -> None:
    """Run a few examples of a machine with round trips between, each on a new database."""
    on_server = type("OnServer", (machine,), {"server": server})
    run_state_machine_as_test(on_server, settings=ON_SERVER)
