"""Usage queries, audits, daily closes, exports and backups over the ledger."""
