"""The paged-attention engine.

Other packages import its interface only; ARCHITECTURE.md lists the modules. Its process is
`python -m engine.server.server`, which `gateway.engines.keeper` keeps running.
"""
