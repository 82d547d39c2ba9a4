"""The life of one generation request, from the parsed call to its settled ledger entry."""
