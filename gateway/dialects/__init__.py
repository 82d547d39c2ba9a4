"""Wire dialects: pure translations between HTTP bodies and the canonical form."""
