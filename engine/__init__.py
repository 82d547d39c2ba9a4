"""The paged-attention engine.

Its door is `api`, `config`, `errors`, `client`, `supervisor` and `model_store`; nothing else is
imported from outside.
"""
