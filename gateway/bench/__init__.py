"""`trunkline bench` and `trunkline replay`: seeded load for any OpenAI-compatible endpoint.

It is a client: it speaks HTTP, and knows of our own server only how to start one.
"""
