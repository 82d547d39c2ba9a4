"""Writing usage to the ledger: holds, entries and progress notes of running requests."""
