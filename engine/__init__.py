"""The paged-attention engine.

Other packages import `api`, `config`, `errors`, `client`, `model_store`, `frames` and `signals`
only. `python -m engine.server.server` is its process, which `gateway.engine_supervisor` keeps
running.
"""
