"""The paged-attention engine.

Other packages import `api`, `config`, `errors`, `client`, `model_store`, `signals` and `own_folder`
only. `python -m engine.server.server` is its process, which `gateway.engine_supervisor` keeps running.
"""
