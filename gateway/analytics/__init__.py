"""Analytics for operators: hits, misses and their causes, latency, and advice, by tenant."""
