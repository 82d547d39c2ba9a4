"""Wire dialects: pure translations to and from the canonical form."""
