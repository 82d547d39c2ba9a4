"""The append-only ledger: holds, entries, adjustments, and the writer that makes them durable."""
