"""Commands of the ledger: prices, budgets, usage, the books, exports and backups."""
