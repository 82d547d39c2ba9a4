"""JSON Schemas as grammars: their keywords, patterns and numbers."""
