"""HTTP handlers: one file per group of routes. Handlers do not call each other."""
